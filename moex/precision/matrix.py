"""A weight as a matrix, its tiles filled up, and codes as bytes that autodiff passes by.

K and N are the dims of a weight's matrix [..., K, N], `...` the experts if there are any.
"""

import math

import jax.numpy as jnp
from jax import lax

from pallas_kernels.quantize import Quantised


def bits(quantised: Quantised) -> Quantised:
    """Codes as bytes: an integer has no gradient. Four-bit codes stay, each in an element of its own."""
    codes, scales, outer = quantised
    if codes.dtype == jnp.float4_e2m1fn:
        return Quantised(lax.bitcast_convert_type(codes, jnp.uint4), _scale_bits(scales), outer)
    return Quantised(lax.bitcast_convert_type(codes, jnp.uint8), _scale_bits(scales), outer)


def _scale_bits(scales):
    return scales if scales.dtype == jnp.float32 else lax.bitcast_convert_type(scales, jnp.uint8)


def codes(bits: Quantised, format) -> Quantised:
    """The inverse of `bits`."""
    stored = dict(mx=jnp.float8_e8m0fnu, nvfp4=jnp.float8_e4m3fn).get(format.kind)
    scales = bits.scales if stored is None else lax.bitcast_convert_type(bits.scales, stored)
    return Quantised(lax.bitcast_convert_type(bits.codes, format.dtype), scales, bits.outer)


def matrix_shape(shape, slices: int, contracted: int) -> tuple[int, ...]:
    """[*experts, *K, *N] -> [*experts, K, N]."""
    lead, rest = shape[:slices], shape[slices:]
    return (*lead, math.prod(rest[:contracted]), math.prod(rest[contracted:]))


def as_matrix(x, slices: int, contracted: int):
    """The array in that shape."""
    return x.reshape(matrix_shape(x.shape, slices, contracted))


def whole_tiles(x, tile: int, dims: tuple[int, ...] = (-2, -1)):
    """The array with zeros behind it, so that each of the dims has whole tiles."""
    more = [(0, 0)] * x.ndim
    for dim in dims:
        more[dim] = (0, -x.shape[dim] % tile)
    return jnp.pad(x, more) if any(after for _, after in more) else x
