"""Traces of some steps for a profiler, and a picture of device memory when it runs out."""

import contextlib
from collections.abc import Generator
from pathlib import Path
from typing import Any, Self

import jax

from moex.config import RunConfig


def parse_range(text: str) -> tuple[int, int]:
    """FIRST:STOP as two numbers.  Raises ValueError."""
    first, colon, stop = text.partition(":")
    if not colon or not first.isdigit() or not stop.isdigit() or not int(first) < int(stop):
        raise ValueError(f"{text!r} must be FIRST:STOP with FIRST below STOP, such as 10:13 for steps 10, 11 and 12")
    return int(first), int(stop)


class Profile:
    """Traces the steps of observe.profile into RUN/profiles, for `xprof --logdir`; every process its own devices.

    A context manager: a run that ends within the range ends the trace. With no range it does nothing.
    """

    def __init__(self, config: RunConfig):
        self.folder = Path(config.run_folder) / "profiles"
        self.first, self.stop = parse_range(config.observe.profile) if config.observe.profile else (-1, -1)
        self.tracing = False

    def before(self, step: int) -> None:
        """Call it before each step is enqueued."""
        if not self.tracing and self.first <= step < self.stop:
            jax.profiler.start_trace(str(self.folder))
            self.tracing = True
        elif self.tracing and step >= self.stop:
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.tracing:
            self._end()

    def _end(self) -> None:
        jax.profiler.stop_trace()
        self.tracing = False


@contextlib.contextmanager
def out_of_memory_told(folder: Path, log: Any) -> Generator[None]:
    """Where a device runs out of memory: writes what filled it to RUN/memory.prof (for pprof), logs it, and says so."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        path = folder / f"memory-{jax.process_index()}.prof"
        jax.profiler.save_device_memory_profile(str(path))
        log.event("out_of_memory", profile=path.name, message=str(error)[:2000])
        error.add_note(
            f"A device ran out of memory; {path} says what filled it (pprof -top {path}). What takes less: a smaller "
            "batch_size / accumulation, memory.recompute, parallel.zero=3, smaller buffers (parallel.row_factor), or more "
            "devices."
        )
        raise
