"""What quantising does to the operands of a product, counted from the numbers before they are quantised.

A measurement is a float32 vector that adds up over layers' micro-batches and devices: counts, then a histogram of scales. It
leaves the backward pass as the cotangent of a meter that stands beside a weight's port.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from mesh.vma import vary, varying
from moex.precision.matrix import whole_tiles
from pallas_kernels.quantize import Format, Quantised, dequantize, quantize
from pallas_kernels.quantize.formats import LARGEST
from pallas_kernels.quantize.scales import magnitude_bits

OPERANDS = ("x", "dy")
"""What a meter measures, in this order: of the forward product, and of the gradient in x."""
COUNTS = ("numbers", "not_finite", "saturated", "vanished")
LOWEST, NUM_BINS = -96, 160
"""Powers of two of scales: the histogram's first bin, and their number; what lies outside falls into the first or last."""
SIZE = len(COUNTS) + NUM_BINS


class Summary(NamedTuple):
    """numbers: that aren't zero.  not_finite: infinite or NaN.  saturated, vanished: shares of the numbers whose magnitude
    was cut down to the largest code, or which became zero.  scale_low, scale_high: least and greatest power of two of a
    tile's scale, None where there is none.
    """

    numbers: float
    not_finite: float
    saturated: float
    vanished: float
    scale_low: int | None
    scale_high: int | None


def measure(x_RK, format: Format):
    """float32 [SIZE] of one operand, quantised along K; R and K are filled up with zeros, which count nothing."""
    tile = 1 if format.kind == "tensor" else format.columns
    x_RK = whole_tiles(x_RK.astype(jnp.float32), tile)
    middle = jnp.full(x_RK.shape, 127, jnp.uint8) if format.stochastic else None
    written = quantize(x_RK, format, implementation="xla", random_bytes=middle)
    finite, there = jnp.isfinite(x_RK), x_RK != 0
    top = dequantize(Quantised(jnp.full_like(written.codes, LARGEST[format.dtype]), written.scales, written.outer))
    counts = there, ~finite, finite & (jnp.abs(x_RK) > top), there & finite & (dequantize(written) == 0)
    scale = written.scales.astype(jnp.float32) * (1.0 if written.outer is None else written.outer)
    exponent = (magnitude_bits(scale) >> 23) - 127 - LOWEST
    used = _tiles_in_use(there, written.scales.shape) & jnp.isfinite(scale)
    which = jnp.where(used, jnp.clip(exponent, 0, NUM_BINS - 1), NUM_BINS).reshape(-1)
    bins = vary(jnp.zeros((NUM_BINS + 1,), jnp.float32), varying(x_RK)).at[which].add(1.0)[:NUM_BINS]
    return jnp.concatenate([jnp.stack([c.sum(dtype=jnp.float32) for c in counts]), bins])


def _tiles_in_use(there_RK, shape):
    """Tiles with a number that isn't zero: the scale of the others says nothing."""
    rows, columns = (n // tiles for n, tiles in zip(there_RK.shape, shape, strict=True))
    return there_RK.reshape(shape[0], rows, shape[1], columns).any(axis=(1, 3))


def summary(measured) -> Summary:
    """Of a vector, or several summed."""
    measured = np.asarray(measured, np.float64)
    numbers, not_finite, saturated, vanished = measured[: len(COUNTS)]
    bins = np.flatnonzero(measured[len(COUNTS) :])
    share = lambda count: float(count / max(numbers, 1))
    low, high = (int(bins[i]) + LOWEST if len(bins) else None for i in (0, -1))
    return Summary(float(numbers), float(not_finite), share(saturated), share(vanished), low, high)
