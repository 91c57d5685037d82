"""Quantisation in plain XLA, on any back end.  R rows, K columns, r x c the tile; suffixes as in [..., R/r, r, K/c, c]."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.quantize import rounding, scales
from pallas_kernels.quantize.formats import Format, Quantised


def quantize(x, bytes_, outer_amax, format: Format, *, transpose: bool = False, amax=None) -> Quantised:
    """As in the package's `quantize`. A transpose is taken of codes, not of numbers: XLA for CPUs moves bytes faster."""
    turn = (lambda a: a.swapaxes(-1, -2)) if transpose else (lambda a: a)
    tile = format.tile((*x.shape[:-2], *x.shape[-2:][::-1]) if transpose else x.shape)
    tile_rows, tile_columns = tile[::-1] if transpose else tile
    x = x.astype(jnp.float32)
    if format.hadamard:
        x = rounding.hadamard(x, dim=-2 if transpose else -1)
    *batch, rows, columns = x.shape
    x = x.reshape(*batch, rows // tile_rows, tile_rows, columns // tile_columns, tile_columns)
    if amax is None:
        largest = scales.magnitude_bits(x).max(axis=(-3, -1), initial=0)
    else:
        largest = turn(_bits(amax, x.ndim - 2))
    outer_amax = None if outer_amax is None else turn(_bits(outer_amax, x.ndim - 2))
    encode, stored, outer = _scales(largest, outer_amax, format)
    scaled = (x * encode[..., :, None, :, None]).reshape(*batch, rows, columns)
    if format.stochastic:
        codes = rounding.stochastic_e2m1(scaled, turn(bytes_))
    else:
        codes = rounding.round_to_codes(scaled, format.dtype)
    codes, stored = rounding.behind_barrier((codes, stored))
    return Quantised(turn(codes), turn(stored), None if outer is None else turn(outer))


def tile_scales(amax, outer_amax, format: Format):
    """As in the package's `tile_scales`."""
    amax = _bits(amax, amax.ndim)
    _, stored, outer = _scales(amax, None if outer_amax is None else _bits(outer_amax, amax.ndim), format)
    return rounding.behind_barrier(stored), outer


def _scales(amax, outer_amax, format: Format):
    """Bits of the largest magnitudes of tiles, and of what they share -> (encode, stored scales, outer or None)."""
    if format.kind == "tensor" and outer_amax is not None:
        amax = jnp.broadcast_to(outer_amax, amax.shape)
    if format.loud:
        amax = jnp.where(amax == scales.INFINITY, scales.INFINITY | 1, amax)
    if format.kind == "mx":
        encode, byte = scales.mx_scales(amax, format.dtype)
        return encode, lax.bitcast_convert_type(byte.astype(jnp.uint8), jnp.float8_e8m0fnu), None
    if format.kind == "nvfp4":
        pair = scales.nvfp4_outer(
            amax.max(axis=(-2, -1), keepdims=True, initial=0) if outer_amax is None else outer_amax
        )
        return *scales.nvfp4_scales(amax, pair), pair[1]
    return *scales.block_scales(amax, format.dtype, format.power_of_two, format.loud), None


def _bits(outer_amax, ndim: int):
    amax = jnp.asarray(outer_amax, jnp.float32)
    return scales.magnitude_bits(amax.reshape((1,) * (ndim - amax.ndim) + amax.shape))


def dequantize(quantised: Quantised) -> jax.Array:
    """As in the package's `dequantize`."""
    codes, stored, outer = quantised
    *batch, rows, columns = codes.shape
    down, across = stored.shape[-2:]
    values = codes.astype(jnp.float32).reshape(*batch, down, rows // down, across, columns // across)
    if stored.dtype == jnp.float8_e8m0fnu:
        byte = lax.bitcast_convert_type(stored, jnp.uint8).astype(jnp.int32)
        factor = jnp.where(byte == 255, jnp.nan, scales.two_to(byte))
    else:
        factor = stored.astype(jnp.float32)
    if outer is not None:
        factor = factor * outer
    return (values * factor[..., :, None, :, None]).reshape(codes.shape)
