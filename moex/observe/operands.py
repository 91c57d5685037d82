"""What quantisation did to the operands of a run's products: RUN/precision.jsonl, a line for each measured step."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moex.observe.jsonl import encode, read_jsonl
from moex.precision.statistics import Summary, summary

FILE = "precision.jsonl"
OPERANDS = ("x", "dy", "w")
"""The rows of a measurement: of the forward product, of the gradient, and the stored weight."""


def write(run_folder: Path, step: int, measured: Mapping[str, np.ndarray]) -> None:
    """Appends a line: for each parameter and operand a list of `Summary` fields by layer.  measured: [L, 3, M] by name."""
    products = {
        name: {operand: [summary(layer[i])._asdict() for layer in vectors] for i, operand in enumerate(OPERANDS)}
        for name, vectors in measured.items()
    }
    with (run_folder / FILE).open("ab") as file:
        file.write(encode(dict(step=step, products=products)))


def newest(run_folder: Path) -> tuple[int, list[tuple[str, str, Summary]]]:
    """The last measured step, and for each parameter and operand the worst of its layers.

    Raises ValueError when the run has measured none.
    """
    path = run_folder / FILE
    lines: list[dict[str, Any]] = list(read_jsonl(path)) if path.is_file() else []
    if not lines:
        there = "has" if run_folder.is_dir() else "does not exist, so it has"
        raise ValueError(f"{run_folder} {there} no {FILE}: train with --observe.measure_precision_every")
    return lines[-1]["step"], list(_worst(lines[-1]["products"]))


def _worst(products: Mapping[str, Any]) -> Iterator[tuple[str, str, Summary]]:
    for name, of_operand in products.items():
        for operand, layers in of_operand.items():
            found = [Summary(**layer) for layer in layers]
            most = lambda field, found=found: max(getattr(one, field) for one in found)
            lows, highs = (
                [e for e in scales if e is not None] for scales in zip(*[one[4:] for one in found], strict=True)
            )
            ends = min(lows, default=None), max(highs, default=None)
            yield (
                name,
                operand,
                Summary(most("numbers"), most("not_finite"), most("saturated"), most("vanished"), *ends),
            )
