"""Weights go from storage to the ranks whose stages need them, and gradients come back to where weights are stored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from mesh import build_mesh, fold, place, sharded
from moex.models.pattern import Kind
from moex.pipeline import storage
from moex.pipeline.layout import layout
from tests.quick import quick_jit

FOLD = fold(dict(pp=2, dp=2, tp=2), dict(pp=2, edp=2, ep=2))
PP = FOLD.dense.pp
MOE = Kind(sparse=True, window=0)


def on_mesh(devices, function, specs, out_specs):
    return quick_jit(sharded(function, build_mesh(FOLD, devices), specs, out_specs))


@pytest.mark.parametrize("layers, chunks", [(4, 1), (4, 2), (3, 1)], ids=["in order", "interleaved", "uneven"])
@pytest.mark.parametrize(
    "shape, axes", [((8, 6), ("tp", None)), ((2, 8, 3), ("ep", None, None)), ((5, 3), (None, None))]
)
def test_ranks_get_their_layers_and_stored_shards_their_gradients(devices, shape, axes, layers, chunks):
    """(5, 3) can't be split for storage, so that all ranks hold all of it."""
    order = layout([MOE] * layers, 2, chunks).order("moe_layers", [MOE] * layers)
    got = place((layers, *shape), (None, *axes), FOLD, stacked_dims=1)
    whole = np.arange(np.prod((layers, *shape)), dtype=np.float32).reshape(layers, *shape)
    of_rank = np.stack([whole[np.maximum(slots, 0)] for slots in order])
    staged = storage.of_stage(got, PP)

    split = {a for axes in got.dims for a in axes}
    copies = tuple(a for a in FOLD.names if a not in split | set(PP))

    def run(shard):
        mine = storage.to_stages(shard, got, order, PP, jnp.bfloat16)
        entered = staged.enter(mine, jnp.bfloat16).astype(jnp.float32)
        here = jnp.asarray(order >= 0)[jax.lax.axis_index(PP)].reshape(-1, *[1] * len(shape))
        home = storage.from_stages(staged.leave(jnp.where(here, entered, 0)), got, order, PP, layers)
        return jax.lax.pmax(entered, copies)[None], home

    model = PartitionSpec(PP, None, *got.dims[1:])
    entered, home = on_mesh(devices, run, got.spec, (model, got.spec))(whole)
    np.testing.assert_array_equal(entered, of_rank)
    np.testing.assert_array_equal(home, whole * FOLD.size(copies))  # each of these used them


@pytest.mark.parametrize("shape", [(32, 6), (4, 32)], ids=["rows stored apart", "columns stored apart"])
def test_rows_of_the_vocabulary_are_split_over_tp_then_the_pipeline(devices, shape):
    got = place(shape, ("tp", None), FOLD)
    whole = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)

    def run(shard):
        rows = storage.rows_to_ranks(shard, got, PP, jnp.float32)
        return jax.lax.pmax(rows, FOLD.dense.dp), storage.rows_from_ranks(rows, got, PP)

    split = PartitionSpec(FOLD.dense.tp + PP)
    rows, home = on_mesh(devices, run, got.spec, (split, got.spec))(whole)
    np.testing.assert_array_equal(rows, whole)
    np.testing.assert_array_equal(home, 2 * whole)  # each of two devices along dp used it
