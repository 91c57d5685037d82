"""Micro-batches whose documents lie over fewer ranks: the step of one device, on packed documents of very unequal length."""

import jax
import numpy as np
import pytest

from moex.config import DataConfig, ParallelConfig, TrainConfig
from moex.data import Buckets, Tokens
from moex.train.placing import place_batch
from moex.train.program import build
from moex.validate import resolve_fold
from tests.train.tiny import equations

S, CP = 32, 4
RNG = np.random.default_rng(0)
LENGTHS = np.clip(RNG.lognormal(1.6, 1.2, 400).astype(int), 1, 3 * S)
STARTS = np.cumsum([0, *LENGTHS])
CORPUS = [Tokens(RNG.integers(0, 259, STARTS[-1]).astype(np.uint32), STARTS, tuple(map(str, LENGTHS)))]
PARALLEL = ParallelConfig(
    dp=2, cp=CP, ep=4, zero=3, transport="alltoall", context="ring", cp_groups=(1, 1, 2, 4), deal="document"
)


@pytest.fixture(scope="module")
def config(harness):
    train = TrainConfig(steps=100, batch_size=16, accumulation=4, seq_len=S, loss_chunk_tokens=24)
    return harness.config("gqa", train=train, parallel=PARALLEL, data=DataConfig(packing="documents"))


@pytest.fixture(scope="module")
def buckets(config):
    return Buckets(CORPUS, S, config.parallel.groups_of(4), rows=4, seed=3)


def stepped(harness, config, num_devices, rows):
    program = harness.program(config, num_devices)
    parallel = config.parallel
    groups = parallel.groups_of(4)
    batch = place_batch(lambda some: {n: x[:, some] for n, x in rows.items()}, 0, program.batch, parallel.deal, groups)
    state = program.initial_state()
    before = jax.device_get(state.params)
    nll, valid, overflow = program.eval(state.params, state.router_bias, batch)
    assert not overflow
    state, metrics = program.train(state, batch)
    change = jax.tree.map(lambda a, b: np.asarray(a) - b, jax.device_get(state.params), before)
    return change, jax.device_get(metrics), float(nll / valid)


def test_loss_and_gradients_are_those_of_one_device(harness, config, buckets):
    """The evaluating program takes the same batch with rings of all ranks, as it does to record routing."""
    rows = buckets.batch(0)
    change, metrics, loss = stepped(harness, config, 8, rows)
    want, expected, expected_loss = stepped(harness, harness.on_one_device(config), 1, rows)
    assert metrics["valid_tokens"] == expected["valid_tokens"] == rows["mask"].sum()
    np.testing.assert_array_equal(metrics["expert_counts"], expected["expert_counts"])
    for name in ("loss", "lm_loss", "grad_norm"):
        np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-6, err_msg=name)
    np.testing.assert_allclose([loss, metrics["lm_loss"]], [expected_loss] * 2, rtol=1e-6)

    def same(path, ours, theirs):
        name, largest = jax.tree_util.keystr(path), np.abs(theirs).max()
        assert largest > 0, f"{name} does not change"
        assert np.abs(ours - theirs).max() <= 1e-5 * largest, name

    jax.tree_util.tree_map_with_path(same, change, want)


def test_a_ring_is_as_short_as_the_documents_allow(config):
    """Steps of the rings that the program has: three among four ranks, one among two, none for documents on one."""
    program = build(config, resolve_fold(config.parallel, 8), jax.devices()[:8])
    jaxpr = program.train.trace(program.state, program.batch).jaxpr
    passes = lambda equation: any(e.primitive.name == "ppermute" for e in equations(equation.params["jaxpr"]))
    scans = [e for e in equations(jaxpr) if e.primitive.name == "scan"]
    rings = [
        e for e in scans if passes(e) and not any(i.primitive.name == "scan" for i in equations(e.params["jaxpr"]))
    ]
    assert {e.params["length"] for e in rings} == {1, 3}
