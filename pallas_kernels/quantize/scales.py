"""Scales of a tile from the largest magnitude in it, by integer arithmetic on float32 bits.

Bits of magnitudes compare as the magnitudes do, with infinity above all numbers and NaN above infinity; no denormal is
flushed on the way, and a power of two is exact on every back end. The functions are plain `jnp` code that runs inside
kernels, too.
"""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.quantize.formats import E4M3, LARGEST

INFINITY = 0x7F800000
_SIGN, _MANTISSA, _ABOVE_1_75 = 0x7FFFFFFF, 0x7FFFFF, 0x600000
_LARGEST_F32 = float(jnp.finfo(jnp.float32).max)
_TWO_TO_MINUS_127 = 0x00400000  # as a denormal float32


def magnitude_bits(x):
    """float32 -> int32 bits of |x|."""
    return lax.bitcast_convert_type(x, jnp.int32) & _SIGN


def as_float(bits):
    """int32 bits -> float32."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def two_to(exponent):
    """float32 2^(exponent - 127) of biased exponents, int32 from 0 to 254."""
    return as_float(jnp.where(exponent == 0, _TWO_TO_MINUS_127, exponent << 23))


def block_scales(amax, dtype, power_of_two: bool, loud: bool = False):
    """int32 bits of the largest magnitudes -> (encode, decode), float32: codes are x encode, values codes decode.

    encode is largest / amax, with its mantissa cleared for a power of two; 1 for amax 0, infinite or NaN; at most the
    largest float32 (2^127 as a power of two). decode is 1 / encode; or, if `loud`, NaN for an infinite or NaN amax.
    """
    plain = (amax == 0) | (amax >= INFINITY)
    if power_of_two:
        exponent = jnp.where(plain, 127, _exponent(amax, dtype))
        encode = as_float((254 - exponent) << 23)
        decode = two_to(exponent)
    else:
        encode = jnp.minimum(LARGEST[jnp.dtype(dtype)] / as_float(amax), _LARGEST_F32)
        encode = jnp.where(plain, 1.0, encode)
        decode = 1.0 / lax.optimization_barrier(encode)  # or the compiler makes it amax / largest, another number
    return encode, jnp.where(amax >= INFINITY, jnp.nan, decode) if loud else decode


def _exponent(amax, dtype):
    """Biased exponent of amax / largest, rounded up: both largest numbers are 1.75 times a power of two."""
    largest = 8 if jnp.dtype(dtype) == E4M3 else 15
    exponent = (amax >> 23) - largest + ((amax & _MANTISSA) > _ABOVE_1_75).astype(jnp.int32)
    return jnp.maximum(exponent, 0)


def mx_scales(amax, dtype):
    """-> (encode float32, E8M0 bytes as int32).

    A byte b stands for 2^(b - 127): 0 for amax 0, 0xFE for infinity, 0xFF for NaN. Byte 0 encodes by 1 and 0xFE by 0, as
    TransformerEngine's kernels do, so an infinity becomes NaN and what shares its tile 0.
    """
    byte = jnp.where(amax > INFINITY, 255, jnp.where(amax == INFINITY, 254, _exponent(amax, dtype)))
    encode = as_float(jnp.where(byte == 255, INFINITY | 1, (254 - byte) << 23))
    return jnp.where(byte == 0, 1.0, encode), byte


def nvfp4_outer(amax):
    """float32 bits of an array's largest magnitude -> (encode, decode) of the second level, float32.

    encode is 448 x 6 / amax; 1 where amax is 0, infinite or NaN, so that a bad value spoils its own tile only.
    """
    encode = jnp.minimum(448.0 * 6.0 / as_float(amax), _LARGEST_F32)
    encode = jnp.where((amax == 0) | (amax >= INFINITY), 1.0, encode)
    return encode, 1.0 / lax.optimization_barrier(encode)


def nvfp4_scales(amax, outer):
    """-> (encode float32, scales E4M3) of tiles under the second level (encode, decode).  NaN stays NaN in its scale."""
    outer_encode, outer_decode = outer
    wanted = jnp.clip(as_float(amax) * (outer_encode * jnp.float32(1 / 6)), -448.0, 448.0)
    scales = lax.optimization_barrier(wanted.astype(E4M3))  # or the GPU's compiler drops the rounding
    return jnp.minimum(1.0 / (scales.astype(jnp.float32) * outer_decode), _LARGEST_F32), scales
