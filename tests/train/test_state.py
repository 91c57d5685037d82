"""The state's counters, and where its parts lie."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesh import abstract_mesh
from moex.config import ParallelConfig
from moex.train.program import build
from moex.train.state import count, counted
from moex.validate import resolve_fold


@pytest.mark.parametrize("start", [0, 1, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1, 2**32, 2**40 + 2**32 - 1, 2**63])
@pytest.mark.parametrize("number", [0, 1, 3, 2**31 - 1])
def test_counting_carries(start, number):
    counter = jnp.array([start & 0xFFFFFFFF, start >> 32], jnp.uint32)
    assert counted(jax.jit(count)(counter, jnp.int32(number))) == start + number


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("model", ["gqa", "mla"])
def test_moments_lie_where_their_parameters_lie(harness, model, zero):
    parallel = ParallelConfig(dp=2, cp=2, tp=2, zero=zero)
    config = harness.config(model, optimizer=harness.ADAMW, parallel=parallel)
    fold = resolve_fold(config.parallel, 8)
    state = build(config, fold, mesh=abstract_mesh(fold)).state
    places = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding.spec), state.params)
    found = [
        tree
        for tree in jax.tree.leaves(state.optimizer, is_leaf=lambda x: isinstance(x, dict))
        if isinstance(tree, dict)
    ]
    assert len(found) == 2
    for moments in found:
        assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding.spec), moments) == places


def test_large_parameters_are_stored_once_over_all_devices(harness):
    """ZeRO: what a device holds of parameters and moments is an eighth, but for a few short vectors."""
    config = harness.config("gqa", optimizer=harness.ADAMW, parallel=ParallelConfig(dp=4, cp=2))
    state = build(config, fold := resolve_fold(config.parallel, 8), mesh=abstract_mesh(fold)).state
    sizes = [
        (x.size, np.prod(x.sharding.shard_shape(x.shape))) for x in jax.tree.leaves((state.params, state.optimizer))
    ]
    whole, held = (sum(column) for column in zip(*sizes, strict=True))
    assert whole / 8 <= held < 1.01 * whole / 8
