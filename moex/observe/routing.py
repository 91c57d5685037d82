"""Recorded choices of experts: RUN/routing/STEP.npz, a step each.

A micro-batches, B rows, S tokens of a row, L MoE layers, k experts a token, E experts.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

FOLDER = "routing"


def write(run: Path, step: int, experts_ABSLk, num_experts: int) -> Path:
    """Keeps a step's choices, two bytes each before compression.  num_experts: what stands for nobody."""
    path = run / FOLDER / f"{step:08}.npz"
    path.parent.mkdir(exist_ok=True)
    np.savez_compressed(path, experts=experts_ABSLk.astype(np.uint16), num_experts=num_experts)
    return path


def supersede(run: Path, step: int) -> None:
    """Moves the choices of this step and later ones, which will be done again, to a folder beside the others."""
    later = [path for path in (run / FOLDER).glob("*.npz") if path.stem.isdigit() and int(path.stem) >= step]
    for path in later:
        path.parent.joinpath("superseded").mkdir(exist_ok=True)
        path.replace(path.parent / "superseded" / path.name)


def read(run: Path, first_step: int = 0) -> Iterator[tuple[int, np.ndarray, int]]:
    """(step, choices [A, B, S, L, k], E) of each recorded step from `first_step` on, in order.

    Raises ValueError, naming the file, for one that cannot be read.
    """
    for path in sorted((run / FOLDER).glob("*.npz")):
        if not path.stem.isdigit() or int(path.stem) < first_step:
            continue
        try:
            with np.load(path) as file:
                yield int(path.stem), file["experts"].astype(np.int32), int(file["num_experts"])
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"{path}: no recorded choices ({error})") from error
