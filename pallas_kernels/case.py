"""One call of a kernel at fixed shapes, for compilers and benchmarks: a name, a function and its arguments' types."""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Case:
    """name: unique within an op; op, dtype and shape, as a table's row shows it.  function: takes `arguments` in order.

    Every op's `specs.py` offers `production_cases() -> tuple[Case, ...]`, the shapes that published models have.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[jax.ShapeDtypeStruct, ...]


def find(specs: str, name: str) -> Case:
    """The case of that name that the module `specs` offers, e.g. `pallas_kernels.grouped_matmul.specs`.

    A function cannot be sent to another process, its module's name can.  Raises ValueError with the names there are.
    """
    cases = {case.name: case for case in importlib.import_module(specs).production_cases()}
    if name not in cases:
        raise ValueError(f"no case {name!r} in {specs}: it has {', '.join(cases)}")
    return cases[name]
