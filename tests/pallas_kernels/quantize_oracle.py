"""Quantisation in NumPy, number by number from the formats' definitions: nothing of pallas_kernels is used.

R rows, K columns.
"""

from fractions import Fraction

import ml_dtypes
import numpy as np

E4M3, E5M2, E2M1 = (np.dtype(t) for t in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float4_e2m1fn))
LARGEST = {E4M3: 448, E5M2: 57344, E2M1: 6}
LARGEST_F32 = np.finfo(np.float32).max


def grid(dtype) -> np.ndarray:
    """Finite magnitudes, computed from exponent and mantissa fields in the order of their bits."""
    exponent_bits, mantissa_bits, bias = {E4M3: (4, 3, 7), E5M2: (5, 2, 15), E2M1: (2, 1, 1)}[np.dtype(dtype)]
    values = []
    for exponent in range(2**exponent_bits):
        for mantissa in range(2**mantissa_bits):
            fraction = mantissa / 2**mantissa_bits
            values.append((1 + fraction) * 2.0 ** (exponent - bias) if exponent else fraction * 2.0 ** (1 - bias))
    return np.array([v for v in values if v <= LARGEST[np.dtype(dtype)]])


def nearest(x, dtype) -> np.ndarray:
    """Values of the nearest codes: least distance, of two alike the one with even bits; NaN stays."""
    values = grid(dtype)
    x = np.asarray(x, np.float64)
    size = np.minimum(np.abs(np.nan_to_num(x, nan=0.0, posinf=1e300, neginf=-1e300)), values[-1])
    above = np.minimum(np.searchsorted(values, size), values.size - 1)
    below = np.maximum(above - 1, 0)
    up, down = values[above] - size, size - values[below]
    index = np.where(up < down, above, np.where(down < up, below, np.where(above % 2, below, above)))
    found = np.copysign(values[index], x)
    return np.where(np.isnan(x), 0.0 if np.dtype(dtype) == E2M1 else np.nan, found)


def block_scale(amax: np.float32, dtype, power_of_two: bool) -> tuple[np.float32, np.float32]:
    """(encode, decode) of one tile."""
    if amax == 0 or not np.isfinite(amax):
        return np.float32(1), np.float32(1)
    if not power_of_two:
        encode = min(np.float32(LARGEST[dtype]) / amax, LARGEST_F32)
        return encode, np.float32(1) / encode
    power = 127
    while Fraction(2) ** power * Fraction(float(amax)) > LARGEST[dtype]:
        power -= 1
    return np.float32(2.0**power), np.float32(2.0**-power)


def mx_byte(amax: np.float32, dtype) -> int:
    """The least byte whose power of two brings amax within range, by exact fractions."""
    if np.isnan(amax):
        return 255
    if np.isinf(amax):
        return 254
    byte = max(0, int(np.frexp(amax)[1]) + 126 - int(np.log2(LARGEST[dtype])) - 3) if amax else 0  # below the least
    while Fraction(float(amax)) > LARGEST[dtype] * Fraction(2) ** (byte - 127):
        byte += 1
    return byte


def mx_encode(byte: int) -> np.float32:
    return np.float32({255: np.nan, 254: 0.0, 0: 1.0}.get(byte, 2.0 ** (127 - byte)))


def nvfp4_scale(amax: np.float32, top: np.float32) -> tuple[np.float32, float, np.float32]:
    """(encode, the tile's scale, outer) in float32 steps."""
    one = np.float32(1)
    outer_encode = one if top == 0 or not np.isfinite(top) else min(np.float32(2688) / top, LARGEST_F32)
    outer = one / outer_encode
    scale = np.float32(nearest(amax * (outer_encode * np.float32(1 / 6)), E4M3))
    return np.fmin(one / (scale * outer), LARGEST_F32) if not np.isnan(scale) else scale, scale, outer


@np.errstate(all="ignore")
def quantize(x, kind, dtype, rows, columns, power_of_two=True, outer_amax=None):
    """-> (values of codes float64 [R, K], scales: float64, or bytes for MX, outer or None)."""
    x, dtype = np.asarray(x, np.float32), np.dtype(dtype)
    if kind == "tensor":
        rows, columns = x.shape
    down, across = x.shape[0] // rows, x.shape[1] // columns
    values, stored, outer = np.zeros(x.shape), np.zeros((down, across)), None
    top = np.abs(x).max() if outer_amax is None else np.float32(outer_amax)
    for i in range(down):
        for j in range(across):
            part = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            amax = np.abs(x[part]).max()
            if kind == "mx":
                stored[i, j] = mx_byte(amax, dtype)
                encode = mx_encode(int(stored[i, j]))
            elif kind == "nvfp4":
                encode, stored[i, j], outer = nvfp4_scale(amax, top)
            else:
                encode, stored[i, j] = block_scale(amax, dtype, power_of_two)
            values[part] = x[part] * encode  # in float32
    return nearest(values.astype(np.float32), dtype), stored, outer


def hadamard_matrix(signs) -> np.ndarray:
    """diag(signs) H / 4 with H[i, j] = (-1)^popcount(i & j)."""
    i = np.arange(16)
    parity = np.array([[(a & b).bit_count() % 2 for b in i] for a in i])
    return np.diag(signs) @ (1.0 - 2.0 * parity) / 4
