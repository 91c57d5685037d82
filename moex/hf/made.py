"""Folders that a command makes: whole, or not there at all."""

import contextlib
import shutil
import signal
import sys
import threading
from collections.abc import Generator
from pathlib import Path


def check_empty(folder: Path) -> None:
    """Raises ValueError when a folder can't be made here, or is there and holds something."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not empty: give a folder that doesn't exist")
    parent = next(path for path in folder.absolute().parents if path.exists())
    if not parent.is_dir():
        raise ValueError(f"{folder} cannot be made: {parent} is no folder")


@contextlib.contextmanager
def whole_or_nothing(folder: Path, *, mine: bool = True) -> Generator[None]:
    """Makes the empty folder; what is in it goes again when the block fails or the process is asked to end (SIGTERM).

    mine: whether this process, of several, makes and removes it.
    """
    existed = folder.exists()
    if mine:
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with _sigterm_raises():
            yield
    except BaseException:
        if mine:
            shutil.rmtree(folder)
            if existed:
                folder.mkdir()
        raise


@contextlib.contextmanager
def _sigterm_raises() -> Generator[None]:
    """SIGTERM ends the process by an exception, with the exit code that a shell would give."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)
