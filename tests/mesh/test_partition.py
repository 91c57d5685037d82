"""place: how a parameter is split for compute and for storage, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mesh import abstract_mesh, build_mesh, collectives, fold, place, sharded

FOLD = fold(dict(dp=2, cp=2, tp=2), dict(edp=2, ep=4))
DP, CP, TP = FOLD.dense.dp, FOLD.dense.cp, FOLD.dense.tp


@pytest.mark.parametrize(
    "shape, views, stacked, dims, zero_dim, zero",
    [
        # Storage takes the dim that most of the free axes can split, the largest of equals.
        ((16, 32), (None, None), 0, ((), ()), 1, DP + CP + TP),
        ((32, 16), (None, None), 0, ((), ()), 0, DP + CP + TP),
        # The larger dim is odd: the other one is split.
        ((33, 16), (None, None), 0, ((), ()), 1, DP + CP + TP),
        # Only 4 divides: outer axes are dropped first.
        ((4, 3), (None, None), 0, ((), ()), 0, CP + TP),
        ((3, 5), (None, None), 0, ((), ()), 0, ()),
        # Model parallelism first, storage inside it.
        ((16, 8), (None, "tp"), 0, ((), TP), 0, DP + CP),
        ((6, 16), (None, "tp"), 0, ((), TP), 1, DP + CP),
        # Experts: only edp is left; a scan's leading dim is never split.
        ((8, 4, 6), ("ep", None, None), 0, (CP + TP, (), ()), 0, DP),
        ((8, 8, 16), (None, "ep", None), 1, ((), CP + TP, ()), 2, DP),
        ((8, 16, 3), (None, None, None), 1, ((), (), ()), 1, DP + CP + TP),
    ],
)
def test_storage_split(shape, views, stacked, dims, zero_dim, zero):
    got = place(shape, views, FOLD, stacked_dims=stacked)
    assert (got.dims, got.zero) == (dims, zero)
    if zero:
        assert got.zero_dim == zero_dim
    used = {a for axes in dims for a in axes} | set(zero)
    assert set(got.replicated) == set(FOLD.names) - used
    assert not set(got.zero) & {a for axes in dims for a in axes}


def test_spec_puts_storage_inside_model_parallelism():
    got = place((8, 16), (None, "tp"), FOLD)
    assert got.spec == PartitionSpec((), TP + DP + CP)
    sharding = NamedSharding(abstract_mesh(FOLD), got.spec)
    assert sharding.shard_shape((8, 16)) == (8, 2)


def test_every_element_is_stored_once_where_sizes_allow():
    for shape, views in [((8, 16), (None, "tp")), ((8, 8, 2), ("ep", None, None)), ((64,), (None,))]:
        got = place(shape, views, FOLD)
        shard = NamedSharding(abstract_mesh(FOLD), got.spec).shard_shape(shape)
        assert np.prod(shard) * FOLD.num_devices == np.prod(shape)
        assert got.replicated == ()


def test_storage_is_split_over_the_pipeline_too():
    """Within a stack of layers its axes come last: the parts of a layer that all its ranks hold make one part without it."""
    folded = fold(dict(pp=2, dp=4), dict(pp=2, edp=4))
    pp, dp = folded.dense.pp, folded.dense.dp
    assert place((64, 64), (None, None), folded).zero == pp + dp
    assert place((3, 64, 64), (None, None, None), folded, stacked_dims=1).zero == dp + pp
    got = place((3, 2, 1), (None, None, None), folded, stacked_dims=1)
    assert (got.zero_dim, got.zero, got.replicated) == (1, pp, dp)


def test_a_dim_that_does_not_divide_is_refused_by_name_unless_it_may_replicate():
    with pytest.raises(ValueError, match=r"attention\.key: a dim of 3 doesn't divide by tp=2"):
        place((16, 3, 8), (None, "tp", None), FOLD, name="attention.key")
    got = place((16, 3, 8), (None, "tp", None), FOLD, may_replicate=True)
    assert got.dims == ((), (), ())
    assert got.zero == DP + CP + TP


@pytest.mark.parametrize("stacked", [False, True])
def test_enter_gives_the_parameter_and_leave_its_summed_gradient(devices, stacked):
    """Each device holds rank + 1 as gradient of the whole parameter; a scan may have taken off the leading dim."""
    lead = (2,) if stacked else ()
    got = place((*lead, 4, 16), (None,) * len(lead) + ("tp", None), FOLD, stacked_dims=len(lead))
    w = np.arange(64 * max(1, sum(lead)), dtype=np.float32).reshape(*lead, 4, 16)

    def local(shard):
        shard = shard[1] if stacked else shard
        full = got.enter(shard, jnp.bfloat16)
        rank = collectives.axis_index(FOLD.names).astype(jnp.float32) + 1
        return full, got.leave(jnp.full(full.shape, rank, jnp.bfloat16))

    out_specs = (PartitionSpec(FOLD.dense.dp + CP + TP), PartitionSpec(*got.spec[len(lead) :]))
    full, grad = jax.jit(sharded(local, build_mesh(FOLD, devices), got.spec, out_specs))(w)
    want = w[1] if stacked else w
    assert full.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(full, np.float32).reshape(4, 4, 16), np.broadcast_to(want, (4, 4, 16)))
    assert grad.dtype == jnp.float32
    np.testing.assert_array_equal(grad, np.repeat([[1 + 3 + 5 + 7], [2 + 4 + 6 + 8]], 2, axis=0) * np.ones((4, 16)))
