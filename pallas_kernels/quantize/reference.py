"""Oracle of the quantisation: codes looked up among all values that there are, scales by the definitions in float32. Slow.

R rows, K columns, r x c the tile.
"""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.quantize.formats import E4M3, LARGEST, Format, Quantised
from pallas_kernels.quantize.rounding import SIGNS, behind_barrier

_LARGEST_F32 = np.finfo(np.float32).max


def quantize(x, bytes_, outer_amax, format: Format) -> Quantised:
    """As in the package's `quantize`."""
    rows, columns = format.tile(x.shape)
    x = x.astype(jnp.float32)
    if format.hadamard:
        x = _turned(x)
    spread = lambda scale: jnp.repeat(jnp.repeat(scale, rows, axis=-2), columns, axis=-1)
    parts = x.reshape(*x.shape[:-2], x.shape[-2] // rows, rows, x.shape[-1] // columns, columns)
    amax = _amax(parts, (-3, -1))
    if format.kind == "tensor" and outer_amax is not None:
        amax = jnp.broadcast_to(outer_amax, amax.shape).astype(jnp.float32)
    if format.loud:
        amax = jnp.where(jnp.isinf(amax), jnp.nan, amax)
    outer = None
    if format.kind == "mx":
        encode, stored = _mx(amax, LARGEST[format.dtype])
    elif format.kind == "nvfp4":
        top = _amax(amax, (-2, -1), keepdims=True) if outer_amax is None else jnp.asarray(outer_amax)
        encode, stored, outer = _nvfp4(amax, top)
    else:
        encode, stored = _block(amax, LARGEST[format.dtype], format.power_of_two)
        stored = jnp.where(jnp.isfinite(amax), stored, jnp.nan) if format.loud else stored
    scaled = x * spread(encode)
    codes = _stochastic(scaled, bytes_) if format.stochastic else _nearest(scaled, format.dtype)
    codes, stored = behind_barrier((codes, stored))
    return Quantised(codes, stored, outer)


def _amax(x, axes, keepdims=False):
    """NaN where there is one: XLA's maximum on CPUs need not tell."""
    largest = jnp.abs(x).max(axis=axes, keepdims=keepdims, initial=0)
    return jnp.where(jnp.isnan(x).any(axis=axes, keepdims=keepdims), jnp.nan, largest)


def _plain(amax):
    return (amax == 0) | ~jnp.isfinite(amax)


def _inverse(scale):
    return 1 / behind_barrier(scale)


def _block(amax, largest, power_of_two):
    encode = jnp.minimum(largest / amax, _LARGEST_F32)
    if power_of_two:
        encode = (encode.view(jnp.int32) & 0x7F800000).view(jnp.float32)  # rounds down
    encode = jnp.where(_plain(amax), 1.0, encode)
    return encode, _inverse(encode)


def _mx(amax, largest):
    fraction, exponent = jnp.frexp(amax)
    of_largest = np.frexp(np.float32(largest))
    byte = 127 + exponent - of_largest[1] + (fraction > of_largest[0]).astype(jnp.int32)
    byte = jnp.where(amax < 2.0**-126, 0, jnp.clip(byte, 0, 254))
    byte = jnp.where(jnp.isnan(amax), 255, jnp.where(jnp.isinf(amax), 254, byte))
    encode = jnp.where(byte == 254, 0.0, jnp.where(byte == 0, 1.0, jnp.ldexp(1.0, 127 - byte)))
    return jnp.where(byte == 255, jnp.nan, encode), byte.astype(jnp.uint8).view(jnp.float8_e8m0fnu)


def _nvfp4(amax, top):
    outer_encode = jnp.where(_plain(top), 1.0, jnp.minimum(2688 / top, _LARGEST_F32))
    outer = _inverse(outer_encode)
    stored = _nearest(amax * (outer_encode * np.float32(1 / 6)), E4M3)
    return jnp.minimum(1 / (stored.astype(jnp.float32) * outer), _LARGEST_F32), stored, outer


def _magnitudes(dtype) -> np.ndarray:
    """The magnitudes that codes have, float32 in the order of their bits."""
    number = 8 if dtype.itemsize < 1 or "float4" in dtype.name else 128
    values = np.arange(number, dtype=np.uint8).view(dtype).astype(np.float32)
    return values[np.isfinite(values)]


def _nearest(x, dtype):
    """Among all codes the nearest; of two alike the one with even bits. Beyond the last the last, NaN stays."""
    grid = _magnitudes(jnp.dtype(dtype))
    between = (grid[1:] + grid[:-1]) / 2
    size = jnp.abs(x)
    below = jnp.searchsorted(between, size, side="left", method="compare_all")
    tie = (jnp.append(between, np.inf)[below] == size) & (below % 2 == 1)
    nearest = jnp.asarray(grid)[jnp.minimum(below + tie, grid.size - 1)]
    nan = jnp.nan if grid.size > 8 else 0.0  # E2M1 has none
    return jnp.where(jnp.isnan(x), nan, jnp.copysign(nearest, x)).astype(dtype)


def _stochastic(x, bytes_):
    grid = _magnitudes(jnp.dtype(jnp.float4_e2m1fn))
    size = jnp.minimum(jnp.abs(x), grid[-1])
    below = jnp.searchsorted(grid, size, side="right", method="compare_all") - 1
    low, high = jnp.asarray(grid)[below], jnp.asarray(grid)[jnp.minimum(below + 1, grid.size - 1)]
    up = size - low > (high - low) * ((bytes_.astype(jnp.float32) + 0.5) / 256)
    return jnp.copysign(jnp.where(up, high, low), x).astype(jnp.float4_e2m1fn)


def _turned(x):
    """By the 16 x 16 matrix itself, a column at a time, in the tree order of sums that the fast transform has."""
    sylvester = np.array([[1.0]], np.float32)
    while len(sylvester) < 16:
        sylvester = np.block([[sylvester, sylvester], [sylvester, -sylvester]])
    groups = x.reshape(*x.shape[:-1], -1, 16) * jnp.asarray(SIGNS, jnp.float32)[(None,) * x.ndim]
    turned = []
    for column in sylvester.T:
        terms = [groups[..., i] * column[i] for i in range(16)]
        while len(terms) > 1:
            terms = [terms[i] + terms[i + 1] for i in range(0, len(terms), 2)]
        turned.append(terms[0] * 0.25)
    return jnp.stack(turned, axis=-1).reshape(x.shape)
