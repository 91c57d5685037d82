"""The table of ops is complete: whatever the step could call has run, forward and backward, in one of its cases."""

import importlib
import inspect
import pkgutil
import sys
from types import ModuleType

import jax
import pytest
from flax import nnx
from jax import lax

import mesh
import moex
import moex.balance
import moex.dispatch
import moex.layers
import pallas_kernels
from mesh import collectives
from moex.models import decoder
from moex.train import loss
from pallas_kernels import grouped_matmul, tuned
from tests.dispatch import stand_in
from tests.replicated.check import cotangents_of, gradient_function
from tests.replicated.table import CASES

WITHOUT_GRADIENT = {
    "pallas_kernels.grouped_matmul.check_sizes": "reads values on the host, outside jit",
    "pallas_kernels.permute.rows.block_table": "whole numbers; its tests run it",
    "pallas_kernels.quantize.rounding.random_bytes": "has a key for its argument",
    "pallas_kernels.compat.races_found": "asks the interpreter",
    "pallas_kernels.compat.reset_interpreter": "clears the interpreter",
    "moex.layers.context.zigzag_order": "orders a batch on the host",
    "moex.layers.context.dealt": "orders a batch on the host",
    "moex.balance.bias.update_bias": "works on counts; a bias has no gradient",
    "moex.balance.bias.update_quantile_bias": "a bias has no gradient",
    "moex.balance.bias.centred": "a bias has no gradient",
    "moex.balance.echo.fold_back": "whole numbers; the planner's tests run it",
    "moex.balance.capacity.capacity_slots": "a form for users; its weights are those of apply_capacity",
    "moex.layers.tokens.unpacked": "makes whole numbers of no array",
    "moex.layers.tokens.own_part": "cuts whole numbers; the decoder's tests and foldings run it",
    "moex.layers.recall.places": "whole numbers; generation's tests run it",
    "moex.layers.recall.recalled": "of generation, which has no gradient",
    "moex.layers.recall.remember": "of generation, which has no gradient",
    "moex.layers.recall.texts": "of generation, which has no gradient",
    "moex.dispatch.unavailable": "takes no arrays",
    "moex.models.decoder.as_they_are": "changes nothing",
}
BESIDE_THE_OPS = ("case", "sass", "specs")
"""Modules of pallas_kernels for compilers, tests and benchmarks, which no step calls."""


def modules(package: ModuleType) -> list[ModuleType]:
    found = pkgutil.walk_packages(package.__path__, package.__name__ + ".")
    return [package, *(importlib.import_module(info.name) for info in found if not info.name.endswith("__main__"))]


def functions_of(module: ModuleType) -> dict[str, object]:
    """The code of public functions that are written in this module."""
    return {
        f"{module.__name__}.{name}": inspect.unwrap(function).__code__
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and not name.startswith("_")
    }


def wanted() -> dict[str, object]:
    """Name -> code that a case must have run."""
    ops = [m for m in modules(pallas_kernels) if m.__name__.rpartition(".")[2] not in BESIDE_THE_OPS]
    public = [collectives, loss, decoder, *ops, *modules(moex.dispatch), *modules(moex.balance)]
    public += [m for m in modules(moex.layers) if m.__name__ != "moex.layers.param"]  # declarations and initial values
    public = [m for m in public if m.__name__ != "moex.balance.simulate"]  # reckons with recorded counts on the host
    found = {}
    for module in public:
        found |= functions_of(module)
    for module in modules(moex.layers):
        for name, kind in inspect.getmembers(module, inspect.isclass):
            if issubclass(kind, nnx.Module) and kind.__module__ == module.__name__:
                found[f"{module.__name__}.{name}"] = kind.__call__.__code__
    for package in (mesh, moex, pallas_kernels):
        for module in modules(package):
            for name, op in inspect.getmembers(module, lambda x: isinstance(x, jax.custom_vjp)):
                if op.fun.__module__ != module.__name__:
                    continue
                found[f"{module.__name__}.{name} (own gradient)"] = op.bwd.__code__
    return found


WANTED = wanted()


@pytest.fixture(scope="module")
def has_run() -> set[object]:
    """The code of all functions that ran while every case was traced on two devices."""
    seen, monitoring, tool = set(), sys.monitoring, 4
    tuned._all_of.cache_clear()  # read from files by an earlier test of this process, it would not run again

    def started(code, _):
        seen.add(code)
        return monitoring.DISABLE

    with pytest.MonkeyPatch.context() as patch:
        if jax.default_backend() == "cpu":
            patch.setattr(lax, "ragged_all_to_all", stand_in.ragged_all_to_all)
        monitoring.use_tool_id(tool, "the table of ops")
        monitoring.register_callback(tool, monitoring.events.PY_START, started)
        monitoring.set_events(tool, monitoring.events.PY_START)
        try:
            for case in CASES.values():
                with case.within():
                    jax.eval_shape(gradient_function(case, "split"), case.weights, case.inputs, cotangents_of(case))
        finally:
            monitoring.set_events(tool, 0)
            monitoring.free_tool_id(tool)
            monitoring.restart_events()
    return seen


@pytest.mark.parametrize("name", sorted(WANTED))
def test_a_case_runs_it(name, has_run):
    if name in WITHOUT_GRADIENT:
        assert WANTED[name] not in has_run, f"{name} runs in the step: take it off the list of those without a gradient"
    else:
        assert WANTED[name] in has_run, f"{name} is in no case of tests/replicated/table.py"


def test_the_exempt_exist():
    assert set(WITHOUT_GRADIENT) <= set(WANTED)


def test_every_grouped_matmul_that_runs_here_has_a_case():
    runs = {name for name, reason in grouped_matmul.implementations().items() if not reason}
    assert {f"grouped matmul by {name}" for name in runs} <= set(CASES)
    assert {"xla", "reference"} <= runs


def test_every_transport_has_a_case():
    assert {
        name.split(",")[0].removeprefix("dispatch by ") for name in CASES if name.startswith("dispatch by ")
    } == set(moex.dispatch.TRANSPORTS)
