"""From scaled float32 values to codes: saturation, stochastic rounding, and the turn by a Hadamard matrix before it."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.quantize import casts, scales
from pallas_kernels.quantize.formats import E2M1, LARGEST

SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""Signs of a row before its turn, those of TransformerEngine's recipe."""
_ONE, _SIX = 0x3F800000, 0x40C00000  # bits of float32 numbers


def round_to_codes(x, dtype):
    """The nearest code, ties to even; beyond the largest the largest. NaN stays NaN; E2M1 has none and gets 0."""
    largest = LARGEST[jnp.dtype(dtype)]
    limited = jnp.clip(x, -largest, largest)
    nan = jnp.zeros_like(x) if jnp.dtype(dtype) == E2M1 else x
    return casts.to_codes(jnp.where(jnp.isnan(x), nan, limited), dtype)  # XLA's minimum on CPUs need not keep a NaN


def stochastic_e2m1(x, bytes_):
    """E2M1 codes, rounded away from zero where the place of |x| between its two neighbours exceeds (byte + 1/2) / 256.

    What lies on the grid stays, and the mean over all bytes misses x by at most 1/512 of the step. With byte / 256 every
    mean would be short by that.
    """
    byte, size = bytes_.astype(jnp.int32), jnp.where(jnp.isnan(x), 0, jnp.minimum(scales.magnitude_bits(x), _SIX))
    # From 1 on a code is the exponent and the first bit of the mantissa; the 22 bits behind are the place between two codes.
    place = size & 0x3FFFFF
    above_1 = (size >> 22) - 2 * 126 + (place > (byte << 14) + (1 << 13)).astype(jnp.int32)
    halves = scales.as_float(size) * 2
    whole = (halves >= 1).astype(jnp.int32)
    below_1 = whole + (halves - whole > (byte.astype(jnp.float32) + 0.5) / 256).astype(jnp.int32)
    code = jnp.where(size >= _ONE, above_1, below_1) | ((lax.bitcast_convert_type(x, jnp.int32) >> 28) & 8)
    return lax.bitcast_convert_type(code.astype(jnp.uint4), E2M1)


def random_bytes(key, shape: tuple[int, ...]):
    """uint8 of that shape, four of each 32-bit word, the lowest first; the last dim must be a multiple of 4."""
    words = jax.random.bits(key, (*shape[:-1], shape[-1] // 4), jnp.uint32)
    shifts = jnp.arange(0, 32, 8, dtype=jnp.uint32).reshape((1,) * len(shape) + (4,))
    return ((jnp.expand_dims(words, -1) >> shifts) & 0xFF).astype(jnp.uint8).reshape(shape)


def hadamard(x, *, inverse: bool = False, dim: int = -1):
    """Turns every 16 neighbours of a dim by diag(SIGNS) H / 4, H the Sylvester matrix; orthogonal.

    A product of two arrays that were both turned along the dim it sums over is the same. Four rounds of sums and
    differences in a fixed order, so all back ends give the same bits.  x: float32; the dim a multiple of 16.
    """
    before, after = x.shape[: x.ndim + dim], x.shape[x.ndim + dim + 1 :]
    y = x.reshape(*before, -1, 16, *after)
    signs = jnp.array(SIGNS, x.dtype).reshape((1,) * (len(before) + 1) + (16,) + (1,) * len(after))
    if not inverse:
        y = y * signs
    for half in (1, 2, 4, 8):
        pairs = y.reshape(*before, -1, 2, half, *after)
        a, b = (lax.index_in_dim(pairs, i, len(before) + 1, keepdims=False) for i in (0, 1))
        y = jnp.stack([a + b, a - b], axis=len(before) + 1).reshape(y.shape)
    y = y * jnp.asarray(0.25, x.dtype)
    return (y * signs if inverse else y).reshape(x.shape)


def no_gradient(function, name: str):
    """The function, made to refuse differentiation: a rounding has no derivative, and zeros would look like one."""

    @jax.custom_jvp
    def call(*arguments):
        return function(*arguments)

    @call.defjvp
    def refuse(primals, tangents):
        raise NotImplementedError(f"{name} has no gradient: call it inside the custom VJP of the product that needs it")

    return call


def behind_barrier(arrays):
    """The same arrays, opaque to the compiler: XLA for GPUs undoes a rounding whose result it sees widened again."""
    return lax.optimization_barrier(arrays)
