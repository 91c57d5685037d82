"""Counts are whole numbers to the end: exact where a sum passes 2^24, at which float32 stops counting by ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mesh import sharded
from moex.config import ParallelConfig, TrainConfig
from moex.layers import param, router
from moex.train import reading, step
from moex.train.program import build
from moex.validate import resolve_fold
from tests.quick import quick_jit

BIG = 2**24
PARALLEL = ParallelConfig(dp=2, cp=2, tp=2, ep=8, transport="alltoall")


def built(harness, **train):
    config = harness.config("gqa", parallel=PARALLEL, train=TrainConfig(steps=10, **train))
    return build(config, resolve_fold(config.parallel, 8))


def inner(program):
    """The step's function inside shard_map: (parameters, bias, batch) -> (gradients, loss, sums, valid tokens)."""
    places = param.placements(program.decoder.declarations, program.fold)
    specs, scalar = jax.tree.map(lambda p: p.spec, places), P()
    return sharded(
        step.loss_and_gradients(program.config, program.decoder, program.fold), program.mesh,
        (specs, scalar, step.batch_specs(program.fold)),
        (specs, scalar, step.Sums(*[scalar] * len(step.Sums._fields)), scalar),
    )  # fmt: skip


def test_an_expert_of_one_device_counts_past_two_to_the_24():
    experts, real = jnp.zeros((BIG + 3, 1), jnp.int32), jnp.arange(BIG + 3) > 1
    counts = jax.jit(lambda experts, real: router.expert_counts(experts, real, 2))(experts, real)
    assert counts.tolist() == [BIG + 1, 0]


@pytest.mark.parametrize("function", ["train", "eval"])
def test_valid_tokens_are_counted_past_two_to_the_24(harness, function):
    """Of the step only the number of valid tokens is asked for, so that nothing else of so large a batch is computed."""
    program = built(harness, batch_size=8, accumulation=1, seq_len=BIG // 8 + 16)
    evaluation = reading.make_eval_step(program.config, program.decoder, program.fold, program.mesh)
    run = inner(program) if function == "train" else evaluation

    @quick_jit
    def valid(mask):
        params, bias, batch = zeros((program.state.params, program.state.router_bias, program.batch))
        return run(params, bias, batch._replace(mask=mask))[3 if function == "train" else 1]

    mask = np.ones(program.batch.mask.shape, bool)
    mask[0, 3, 5] = mask[0, 7, -1] = mask[0, 0, 0] = False
    counted = int(valid(mask))
    assert counted == int(mask.sum()) > BIG
    assert int(np.float32(counted)) != counted


def test_expert_counts_are_summed_past_two_to_the_24(harness, monkeypatch):
    """Each pair counts as 2^19 + 1: a sum over devices and micro-batches that was rounded is no multiple of that."""
    each = 2**19 + 1
    plain = router.expert_counts
    monkeypatch.setattr(router, "expert_counts", lambda *arguments: each * plain(*arguments))
    program = built(harness, batch_size=32, accumulation=4, seq_len=16)
    run, state, rows = inner(program), program.initial_state(), harness.rows(program.config)
    only_counts = quick_jit(lambda params, bias, batch: run(params, bias, batch)[2].counts_LE)
    counts = np.asarray(only_counts(state.params, state.router_bias, harness.put(program, rows)), np.int64)
    assert counts.max() > BIG
    np.testing.assert_array_equal(counts % each, 0)
    np.testing.assert_array_equal((counts // each).sum(axis=1), 2 * (rows["segments"] > 0).sum())


def zeros(tree):
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)
