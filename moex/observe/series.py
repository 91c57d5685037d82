"""Long runs made short enough to draw: values by step, binned over steps.

N steps, K bins; a bin holds the same number of steps, the last one perhaps fewer.
"""

from typing import NamedTuple

import numpy as np


class Binned(NamedTuple):
    """A series in bins."""

    steps: np.ndarray  # float64 [K], mean step of the bin
    mean: np.ndarray  # [K, ...], NaN where a bin has no finite value
    low: np.ndarray
    high: np.ndarray
    width: int  # steps in a bin


def bin_steps(steps: np.ndarray, values: np.ndarray, max_bins: int) -> Binned:
    """Mean, smallest and largest finite value in each of at most `max_bins` bins of `values` [N, ...]."""
    width = max(1, -(-len(steps) // max_bins))
    num_bins = -(-len(steps) // width)
    missing = num_bins * width - len(steps)
    rest = values.shape[1:]
    finite = np.where(np.isfinite(values), values, np.nan)
    padded = np.concatenate([finite, np.full((missing, *rest), np.nan, finite.dtype)])
    padded = padded.reshape(num_bins, width, *rest)
    edges = np.arange(0, len(steps), width)
    return Binned(
        steps=np.add.reduceat(steps.astype(np.float64), edges) / np.diff([*edges, len(steps)]),
        mean=_nan_mean(padded),
        low=np.fmin.reduce(padded, axis=1),
        high=np.fmax.reduce(padded, axis=1),
        width=width,
    )


def _nan_mean(padded: np.ndarray) -> np.ndarray:
    """Mean over dim 1 of what is not NaN, without NumPy's warning about empty slices."""
    seen = ~np.isnan(padded)
    number = seen.sum(1)
    total = np.where(seen, padded, 0).sum(1, dtype=np.float64)
    return np.divide(total, number, out=np.full(total.shape, np.nan), where=number > 0)
