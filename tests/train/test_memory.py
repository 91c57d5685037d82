"""Where experts' rows are kept doesn't show in a step: a stash gives the same bits, waves the same but for sums' order."""

import dataclasses

import jax
import numpy as np
import pytest

from mesh import ALONE
from moex.config import MemoryConfig, ParallelConfig
from moex.train.program import build
from tests.train.tiny import equations, one_step, tiny_config

STASH = MemoryConfig(stash=("experts",), stash_factor=0.0)
CLONES = dict(echo_slots=1, echo_cap=1.0)
FOLDINGS = {
    "one device": (1, ParallelConfig(), ()),
    "alltoall, cp and tp, layers recomputed": (
        8,
        ParallelConfig(dp=2, cp=2, tp=2, ep=8, transport="alltoall", context="ring", zero=3),
        ("layer",),
    ),
    "alltoall with spill, etp, clones": (
        8,
        ParallelConfig(tp=2, edp=2, ep=2, etp=2, transport="alltoall", cell_factor=1.0, spill_factor=4.0, **CLONES),
        ("attention", "moe"),
    ),
    "allgather, etp": (8, ParallelConfig(tp=4, ep=4, etp=2, transport="allgather"), ()),
}


def config_of(name, memory, **changes):
    num_devices, parallel, recompute = FOLDINGS[name]
    memory = dataclasses.replace(memory, recompute=recompute)
    model = changes.pop("model", "gqa")
    return num_devices, tiny_config(
        model, accumulation=2, parallel=dataclasses.replace(parallel, **changes), memory=memory
    )


def step(name, memory=MemoryConfig(), *, skewed=False, **changes):  # noqa: B008 (frozen)
    num_devices, config = config_of(name, memory, **changes)
    return one_step(config, num_devices, skewed)


@pytest.mark.parametrize("name", [name for name in FOLDINGS if name != "one device"])
def test_a_stash_gives_the_bits_of_buffers_in_every_layer(name):
    """Two MoE layers, so that the second writes over what the first left empty.

    Where layers are recomputed, buffers hold rows as XLA:CPU fuses them a second time, which may differ in a last bit.
    """
    want, got = step(name), step(name, STASH)
    assert got.metrics["applied"] == 1
    assert 0.5 < got.metrics["need_stash"] < 4
    if FOLDINGS[name][2]:
        np.testing.assert_array_equal(got.metrics["loss"], want.metrics["loss"])
        jax.tree.map(assert_close, got.change, want.change)
    else:
        for metric, value in want.metrics.items():
            np.testing.assert_array_equal(got.metrics[metric], value, err_msg=metric)
        jax.tree.map(np.testing.assert_array_equal, got.after, want.after)


def assert_close(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6 * np.abs(theirs).max())


def test_a_full_stash_leaves_the_state_as_it_was():
    """Every token wants one expert, whose device then has half of all rows: with room for balanced ones only, no step."""
    name = "allgather, etp"
    skewed = dict(skewed=True, model="mla")
    spared = step(name, STASH, **skewed)
    need = float(spared.metrics["need_stash"])
    assert spared.metrics["applied"] == 1
    assert need > 1.5
    tight = step(name, dataclasses.replace(STASH, stash_factor=1.0), **skewed)
    assert tight.metrics["applied"] == 0 < tight.metrics["overflow"]
    np.testing.assert_allclose(tight.metrics["need_stash"], need)
    jax.tree.map(np.testing.assert_array_equal, tight.after, tight.before)
    enough = step(name, dataclasses.replace(STASH, stash_factor=1.01 * need), **skewed)
    assert enough.metrics["overflow"] == 0
    jax.tree.map(np.testing.assert_array_equal, enough.after, spared.after)


def test_a_stash_keeps_no_rows_by_layer():
    """Nothing of [layers, rows, width] is left in the traced step; without a stash there is."""

    def stacked(memory):
        _, config = config_of("one device", memory)
        program = build(config, ALONE, jax.devices()[:1])
        traced = jax.make_jaxpr(program.train)(program.state, program.batch)
        pairs = 16 * 16 * 2  # of a micro-batch
        shapes = {out.aval.shape for e in equations(traced) for out in e.outvars if hasattr(out.aval, "shape")}
        return {shape for shape in shapes if shape[:2] == (config.model.num_layers, pairs) and shape[2:] > (1,)}

    assert stacked(MemoryConfig())
    assert not stacked(STASH)


@pytest.mark.parametrize("name", [name for name in FOLDINGS if not FOLDINGS[name][1].bounded])
def test_waves_sum_weight_gradients_in_another_order_only(name):
    want, got = step(name), step(name, waves=4)
    for metric in ("expert_counts", "applied", "overflow", "dropped", "valid_tokens"):
        np.testing.assert_array_equal(got.metrics[metric], want.metrics[metric], err_msg=metric)
    np.testing.assert_array_equal(got.metrics["lm_loss"], want.metrics["lm_loss"])
    np.testing.assert_allclose(got.metrics["need_rows"], want.metrics["need_rows"], rtol=1e-6)
    jax.tree.map(assert_close, got.change, want.change)
