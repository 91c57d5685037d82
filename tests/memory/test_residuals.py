"""What layers keep by name: what a name costs to compute again, and that where it stays changes no gradient."""

import collections
import dataclasses
import itertools

import jax
import numpy as np
import pytest

from mesh import abstract_mesh
from moex.config import MemoryConfig, ParallelConfig
from moex.memory.residuals import RESIDUALS, places
from moex.train.program import build
from moex.validate import resolve_fold
from tests.train.tiny import ADAMW, MODELS, equations, one_step, tiny_config

COMMUNICATION = ("all_gather", "all_to_all", "reduce_scatter", "ppermute")
SPREAD = ParallelConfig(dp=2, cp=2, tp=2, ep=8, transport="alltoall", zero=3)
ULYSSES = ParallelConfig(dp=4, cp=2, ep=4, etp=2, transport="allgather", context="ulysses", zero=3)
ALONE = ParallelConfig(zero=3)
SHARED = dataclasses.replace(MODELS["mla"], shared_gate=True, latent_width=24)


def traced(model, parallel, num_devices, **memory):
    config = tiny_config(model, parallel=parallel, memory=MemoryConfig(**memory))
    fold = resolve_fold(parallel, num_devices)
    program = build(config, fold, mesh=abstract_mesh(fold))
    return list(equations(program.train.trace(program.state, program.batch).jaxpr))


def work(found) -> tuple[int, int]:
    """Products and journeys between devices in a traced step."""
    names = collections.Counter(equation.primitive.name for equation in found)
    return names["dot_general"], sum(names[name] for name in COMMUNICATION)


# More products and journeys of a step where one name is computed again, in a layer of each kind.
SPREAD_GQA = dict(
    attn_norm=(0, 1), qkv=(2, 0), context=(0, 2), core_attn=(4, 0), attn_proj=(1, 1), mlp_norm=(0, 0), router=(1, 0),
    expert_rows=(0, 2), expert_fc1=(3, 0), layer=(12, 6),
)  # fmt: skip
ALONE_MLA = dict(
    mla_down_proj=(4, 0), mla_up_proj=(4, 0), mlp_norm=(0, 0), mlp_fc1=(1, 0), shared_experts=(2, 0), latent_rows=(3, 0),
)  # fmt: skip
CASES = [("gqa", SPREAD, 8, SPREAD_GQA), (SHARED, ALONE, 1, ALONE_MLA), ("gqa", ULYSSES, 8, dict(context=(0, 4)))]


@pytest.mark.parametrize("model, parallel, num_devices, more", CASES, ids=["spread", "alone", "ulysses"])
def test_a_name_is_computed_again_and_nothing_else(model, parallel, num_devices, more):
    """With ZeRO-3, where layers keep what they keep by name anyway."""
    kept = work(traced(model, parallel, num_devices))
    again = {name: work(traced(model, parallel, num_devices, recompute=(name,))) for name in more}
    assert {name: (found[0] - kept[0], found[1] - kept[1]) for name, found in again.items()} == more


def test_an_offloaded_name_goes_before_its_module():
    memory = MemoryConfig(recompute=("attention", "mlp"), offload=("qkv", "layer_input"))
    dense, sparse = (places(memory, sparse=sparse) for sparse in (False, True))
    assert {name for name in RESIDUALS if dense[name] == "again"} == {
        "attn_norm", "mla_down_proj", "mla_up_proj", "context", "core_attn", "mlp_norm", "mlp_fc1",
    }  # fmt: skip
    assert {name for name in RESIDUALS if dense[name] == "host"} == {"qkv", "layer_input"}
    assert sparse["mlp_norm"] == sparse["mlp_fc1"] == "device", "of dense layers alone"
    assert places(MemoryConfig(recompute=("layer",)), sparse=True)["layer_input"] == "device"


ALL = tuple(name for name in RESIDUALS if name not in ("mla_down_proj", "mla_up_proj", "mlp_fc1", "shared_experts"))
OFFLOADS = {
    "gqa over 8": (8, tiny_config("gqa", parallel=SPREAD, accumulation=2), ALL[:-1]),
    "mla over 8": (
        8,
        tiny_config("mla", parallel=ULYSSES),
        ("layer_input", "mla_down_proj", "mla_up_proj", "context", "core_attn", "mlp_fc1", "shared_experts", "expert_rows"),
    ),
    "the rest computed again": (
        1,
        tiny_config("gqa", memory=MemoryConfig(recompute=("attention", "mlp_norm", "router", "expert_fc1"))),
        ("attn_proj", "expert_rows"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OFFLOADS)
def test_offload_gives_the_bits_of_keeping(name):
    """Of what is named; its bytes on the host are compared in tests/plan/test_recipes.py."""
    num_devices, config, offload = OFFLOADS[name]
    memory = dataclasses.replace(config.memory, offload=offload)
    moved = dataclasses.replace(config, memory=memory)
    want, got = (one_step(c, num_devices) for c in (config, moved))
    for metric, value in want.metrics.items():
        np.testing.assert_array_equal(got.metrics[metric], value, err_msg=metric)
    jax.tree.map(np.testing.assert_array_equal, got.after, want.after)


# Every name that a model has, in a few sets: each compiles a step.
SETS = [
    ("gqa", ("attn_norm", "core_attn", "mlp_norm", "expert_rows")),
    ("gqa", ("qkv", "attn_proj", "router", "expert_fc1")),
    (SHARED, ("mla_down_proj", "mlp_norm", "mlp_fc1", "latent_rows", "shared_experts")),
    (SHARED, ("attention", "mlp", "moe")),
    ("gqa", ("layer",), ("layer_input", "expert_rows")),
]


@pytest.mark.parametrize("case", SETS, ids=lambda case: "-".join(itertools.chain(*case[1:])))
def test_recompute_changes_no_gradient(case):
    model, *places = case
    memory = MemoryConfig(**dict(zip(("recompute", "offload"), places, strict=False)))
    want, got = (one_step(tiny_config(model, memory=m), 1) for m in (MemoryConfig(), memory))
    np.testing.assert_array_equal(got.metrics["expert_counts"], want.metrics["expert_counts"])
    np.testing.assert_allclose(got.metrics["loss"], want.metrics["loss"], rtol=1e-6)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())
    jax.tree.map(close, got.change, want.change)


def test_moments_on_the_host_are_those_on_the_device():
    """Split over eight devices as their weights are."""
    config = tiny_config("gqa", optimizer=ADAMW)
    want, got = (
        one_step(dataclasses.replace(config, memory=MemoryConfig(optimizer=place)), 8) for place in ("device", "host")
    )
    jax.tree.map(np.testing.assert_array_equal, got.after, want.after)
    kinds = lambda state: {x.sharding.memory_kind for x in jax.tree.leaves(state) if x.ndim}
    assert kinds(got.state.optimizer) == {"pinned_host"}
    assert kinds(got.state.params) == kinds(want.state.optimizer) == {"device"}
