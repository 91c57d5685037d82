"""Executes every notebook from top to bottom in a fresh kernel; the files themselves stay as they are."""

import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError

ROOT = Path(__file__).resolve().parent.parent
CELL_TIMEOUT_S = 300


def main(paths: list[str]) -> int:
    """Executes the notebooks named, or all in notebooks/; returns 1 when one fails."""
    notebooks = [Path(path) for path in paths] or sorted((ROOT / "notebooks").glob("*.ipynb"))
    failures = 0
    for path in notebooks:
        started = time.monotonic()
        notebook: Any = nbformat.read(path, as_version=4)  # its declared type spans all old formats
        client = NotebookClient(
            notebook,
            timeout=CELL_TIMEOUT_S,
            kernel_name="python3",
            resources={"metadata": {"path": str(path.parent)}},
        )
        try:
            client.execute()
        except (CellExecutionError, CellTimeoutError) as error:
            failures += 1
            print(f"{path}: {error}", file=sys.stderr)
        else:
            print(f"{path}: {time.monotonic() - started:.0f} s")
    print(f"{len(notebooks)} notebooks, {failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
