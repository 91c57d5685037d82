"""From scaled float32 values to codes: saturation, stochastic rounding, and the turn by a Hadamard matrix before it."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.quantize.formats import E2M1, LARGEST

SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""Signs of a row before its turn, those of TransformerEngine's recipe."""


def round_to_codes(x, dtype):
    """The nearest code, ties to even; beyond the largest the largest. NaN stays NaN; E2M1 has none and gets 0."""
    largest = LARGEST[jnp.dtype(dtype)]
    limited = jnp.clip(x, -largest, largest)
    nan = jnp.zeros_like(x) if jnp.dtype(dtype) == E2M1 else x
    return jnp.where(jnp.isnan(x), nan, limited).astype(dtype)  # XLA's minimum on CPUs need not keep a NaN


def stochastic_e2m1(x, bytes_):
    """E2M1 codes, rounded away from zero where the place of |x| between its two neighbours exceeds (byte + 1/2) / 256.

    What lies on the grid stays, and the mean over all bytes misses x by at most 1/512 of the step. With byte / 256 every
    mean would be short by that.
    """
    size = jnp.minimum(jnp.abs(x), 6.0)
    # Steps are 1/2 below 2, 1 below 4, then 2: powers of two, so the quotient is exact.
    step = jnp.where(size < 2, 0.5, jnp.where(size < 4, 1.0, 2.0))
    below = jnp.floor(size / step)
    up = size / step - below > (bytes_.astype(jnp.float32) + 0.5) / 256
    return round_to_codes(jnp.copysign((below + up.astype(jnp.float32)) * step, x), E2M1)


def random_bytes(key, shape: tuple[int, ...]):
    """uint8 of that shape, four of each 32-bit word, the lowest first; the last dim must be a multiple of 4."""
    words = jax.random.bits(key, (*shape[:-1], shape[-1] // 4), jnp.uint32)
    shifts = jnp.arange(0, 32, 8, dtype=jnp.uint32).reshape((1,) * len(shape) + (4,))
    return ((jnp.expand_dims(words, -1) >> shifts) & 0xFF).astype(jnp.uint8).reshape(shape)


def hadamard(x, *, inverse: bool = False):
    """Turns every 16 neighbours of the last dim by diag(SIGNS) H / 4, H the Sylvester matrix; orthogonal.

    A product of two arrays that were both turned along the dim it sums over is the same. Four rounds of sums and
    differences in a fixed order, so all back ends give the same bits.  x: float32 [..., K], K a multiple of 16.
    """
    signs = jnp.array(SIGNS, x.dtype).reshape((1,) * x.ndim + (16,))
    y = x.reshape(*x.shape[:-1], -1, 16)
    if not inverse:
        y = y * signs
    for half in (1, 2, 4, 8):
        pairs = y.reshape(*y.shape[:-1], -1, 2, half)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        y = jnp.stack([a + b, a - b], axis=-2).reshape(y.shape)
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
