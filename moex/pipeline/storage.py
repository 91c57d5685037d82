"""Weights and gradients on their way between storage and stages.

Storage doesn't know of stages: layers stand in their own order, and each is split over the pipeline's ranks like over all
other devices that would repeat it. So a checkpoint, an optimizer or an evaluation is the same for any number of stages and
chunks; once a step each rank gets the parts that others store of its stages' layers, and sends gradients back. L layers of a
stack, P ranks, N slots of a rank.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import lax

from mesh import Placement, collectives
from mesh.axes import Axes
from mesh.vma import vary, varying


def of_stage(place: Placement, pp: Axes) -> Placement:
    """Where the part of a rank's stages lies: as stored, but for the pipeline's axes."""
    without = lambda axes: tuple(a for a in axes if a not in pp)
    return dataclasses.replace(place, zero=without(place.zero), replicated=without(place.replicated))


def to_stages(shard, place: Placement, order_PN: np.ndarray, pp: Axes, dtype):
    """Stored shards [L, ...] -> this rank's layers [N, ...] in `dtype`, split as `of_stage` says.

    order_PN: layer in each slot; a slot without one (-1) gets some layer's weights, which are finite.
    """
    shard = shard.astype(dtype)
    if _in_order(order_PN):
        sent = shard.reshape(*order_PN.shape, *shard.shape[1:])
    else:
        sent = shard[jnp.asarray(np.maximum(order_PN, 0))]
    if not set(pp) & set(place.zero):
        return vary(sent, pp)[collectives.axis_index(pp)]
    return collectives.all_to_all(sent, pp, split_dim=0, concat_dim=place.zero_dim + 1)[0]


def from_stages(gradient, place: Placement, order_PN: np.ndarray, pp: Axes, num_layers: int):
    """Gradients [N, ...] of this rank's layers, split as `of_stage` says -> of the stored shards [L, ...].

    A slot without a layer has a gradient of zeros, and is left out.
    """
    rank_L, slot_L = np.array([np.argwhere(order_PN == layer)[0] for layer in range(num_layers)]).T
    if set(pp) & set(place.zero):
        home = collectives.all_to_all(gradient[None], pp, split_dim=place.zero_dim + 1, concat_dim=0)
        return home.reshape(-1, *home.shape[2:]) if _in_order(order_PN) else home[rank_L, slot_L]
    mine_L = jnp.asarray(rank_L) == collectives.axis_index(pp)
    own = jnp.where(mine_L.reshape(-1, *[1] * (gradient.ndim - 1)), gradient[slot_L], 0)
    return collectives.psum(own, pp)


def _in_order(order_PN: np.ndarray) -> bool:
    """Ranks have consecutive layers, and no slot is empty."""
    return np.array_equal(order_PN.reshape(-1), np.arange(order_PN.size))


def rows_to_ranks(shard, place: Placement, pp: Axes, dtype):
    """Stored shard of a matrix with a row for each token id -> this rank's rows of it, those of tp split further over pp."""
    if place.zero_dim == 0 and place.zero[: len(pp)] == pp:
        return of_stage(place, pp).enter(shard, dtype)
    return _own_rows(place.enter(shard, dtype), pp)


def rows_from_ranks(gradient, place: Placement, pp: Axes):
    """Its transpose: gradient of this rank's rows, not summed over devices yet -> of the stored shard."""
    if place.zero_dim == 0 and place.zero[: len(pp)] == pp:
        return of_stage(place, pp).leave(gradient)
    whole = jnp.zeros((gradient.shape[0] * collectives.axis_size(pp), *gradient.shape[1:]), gradient.dtype)
    first = collectives.axis_index(pp) * gradient.shape[0]
    return place.leave(lax.dynamic_update_slice_in_dim(vary(whole, varying(gradient)), gradient, first, axis=0))


def _own_rows(whole, pp: Axes):
    size = whole.shape[0] // collectives.axis_size(pp)
    return lax.dynamic_slice_in_dim(vary(whole, pp), collectives.axis_index(pp) * size, size, axis=0)
