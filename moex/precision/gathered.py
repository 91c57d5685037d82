"""A weight's codes, gathered: each device quantises its shard of the float32 master as if it had the whole."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from mesh import collectives
from mesh.axes import Axes
from moex.precision.matrix import as_matrix, bits, codes, matrix_shape, whole_tiles
from moex.precision.recipes import GemmRecipe
from pallas_kernels.quantize import Quantised, quantize, tile_scales, transposed
from pallas_kernels.quantize.scales import as_float, magnitude_bits


def gathered_in_codes(shard, zero: Axes, dim: int, recipe: GemmRecipe, slices: int, contracted: int) -> Quantised:
    """The codes [*experts, K, N] that the whole weight has in `recipe.w`, filled up to whole tiles.

    Where a tile lies on several devices they agree on its largest magnitude first, for which each row of a shard sends a
    float32 a tile; elsewhere nothing but codes and scales travels.

    Args:
      shard: float32, split along `dim` over `zero`.
      recipe: with square tiles of weights.
      slices, contracted: as in `moex.precision.weight.enter`.
    """
    if dim < slices:
        return _whole_experts(shard, zero, dim, recipe, slices, contracted)
    if dim < slices + contracted:
        return _rows(shard, zero, dim, recipe, slices, contracted)
    dims = (*range(slices), *range(slices + contracted, shard.ndim), *range(slices, slices + contracted))
    turned = _rows(shard.transpose(dims), zero, dim - contracted, recipe, slices, shard.ndim - slices - contracted)
    return transposed(turned)


def _whole_experts(shard, zero: Axes, dim: int, recipe: GemmRecipe, slices: int, contracted: int) -> Quantised:
    """Each device has all of some experts."""
    found = bits(quantize(whole_tiles(as_matrix(shard, slices, contracted), recipe.tile), recipe.w))
    gather = functools.partial(collectives.all_gather, axes=zero, dim=dim)
    return codes(jax.tree.map(gather, found), recipe.w)


def _rows(shard, zero: Axes, dim: int, recipe: GemmRecipe, slices: int, contracted: int) -> Quantised:
    """Each device has some rows of every matrix, wherever in a tile they begin."""
    format, side, ways = recipe.w, recipe.tile, collectives.axis_size(zero)
    rows_here = matrix_shape(shard.shape, slices, contracted)[-2]
    master = whole_tiles(as_matrix(shard, slices, contracted), side, (-1,))
    lead = shard.shape[: slices + contracted]
    # Both ways keep the rows' own dims: shards may interleave in the matrix.
    gather = lambda x: as_matrix(collectives.all_gather(x.reshape(*lead, -1), zero, dim=dim), slices, contracted)
    outer = None
    if format.kind in ("tensor", "nvfp4"):  # one number for a whole matrix
        outer = as_float(collectives.pmax(magnitude_bits(master).max(axis=(-2, -1), keepdims=True), zero))
    if (one_scale := format.kind == "tensor") or (rows_here % side == 0 and dim == slices):
        found = bits(quantize(master, format, outer_amax=outer))
        stored = found.scales if one_scale else collectives.all_gather(found.scales, zero, dim=slices)
        return codes(Quantised(gather(found.codes), stored, found.outer), format)
    # Bits of magnitudes: their maximum keeps a NaN on every back end.
    largest = gather(magnitude_bits(master).reshape(*master.shape[:-1], -1, side).max(axis=-1))
    of_tiles = whole_tiles(largest, side, (-2,))
    of_tiles = of_tiles.reshape(*of_tiles.shape[:-2], -1, side, of_tiles.shape[-1]).max(axis=-2)
    spread = jnp.repeat(of_tiles, side, axis=-2)[..., : largest.shape[-2], :]
    own = spread.reshape(*lead[:dim], lead[dim] * ways, *lead[dim + 1 :], -1)
    own = lax.dynamic_slice_in_dim(own, collectives.axis_index(zero) * lead[dim], lead[dim], axis=dim)
    own = as_float(own.reshape(*master.shape[:-2], rows_here, -1))
    found = quantize(master, dataclasses.replace(format, rows=1), outer_amax=outer, amax=own)
    stored, second = tile_scales(as_float(of_tiles), format, outer_amax=outer)
    return codes(Quantised(whole_tiles(gather(bits(found).codes), side, (-2,)), stored, second), format)
