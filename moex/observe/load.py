"""How evenly the experts are loaded.

N steps, L MoE layers, E experts. NaN marks an expert that a layer does not have (layers may differ in E).
"""

from collections.abc import Sequence

import numpy as np


def counts_array(expert_counts: Sequence[Sequence[int]] | np.ndarray | None) -> np.ndarray:
    """Tokens by layer and expert, float64 [L, E], rows filled up with NaN; [0, 0] when there is no MoE layer."""
    if expert_counts is None or isinstance(expert_counts, np.ndarray):
        return np.zeros((0, 0)) if expert_counts is None else expert_counts.astype(np.float64)
    widest = max((len(row) for row in expert_counts), default=0)
    if not widest:
        return np.zeros((0, 0))
    if all(len(row) == widest for row in expert_counts):
        return np.asarray(expert_counts, np.float64)
    return np.asarray([[*row, *[np.nan] * (widest - len(row))] for row in expert_counts], np.float64)


def relative_load(counts: np.ndarray) -> np.ndarray:
    """Each expert's tokens over the mean of its layer, shape of `counts` [..., E]: 1 is uniform, NaN without tokens."""
    present = np.isfinite(counts)
    experts = present.sum(-1, keepdims=True)
    tokens = np.where(present, counts, 0).sum(-1, keepdims=True)
    mean = tokens / np.maximum(experts, 1)
    return np.divide(counts, mean, out=np.full(counts.shape, np.nan), where=present & (mean > 0))


def max_over_mean(counts: np.ndarray) -> np.ndarray:
    """The busiest expert over the mean, [..., E] -> [...]: 1 is uniform, E is everything to one, NaN without tokens."""
    relative = relative_load(counts)
    if not relative.shape[-1]:
        return np.full(relative.shape[:-1], np.nan)
    return np.fmax.reduce(relative, axis=-1)


def worst_load(expert_counts: Sequence[Sequence[int]] | np.ndarray | None) -> float | None:
    """The largest max/mean over the layers of one step; None when no layer has tokens."""
    ratios = max_over_mean(counts_array(expert_counts))
    ratios = ratios[np.isfinite(ratios)]
    return float(ratios.max()) if ratios.size else None


def load_entropy(counts: np.ndarray) -> np.ndarray:
    """Entropy of each layer's shares over the most it could be, [..., E] -> [...]: 1 is uniform, 0 is all to one expert,
    NaN without tokens.
    """
    present = np.isfinite(counts)
    filled = np.where(present, counts, 0)
    total = filled.sum(-1, keepdims=True)
    share = np.divide(filled, total, out=np.zeros(counts.shape), where=total > 0)
    nats = -(share * np.log(np.where(share > 0, share, 1))).sum(-1)
    most = np.log(np.maximum(present.sum(-1), 2))
    return np.where(total[..., 0] > 0, nats / most, np.nan)
