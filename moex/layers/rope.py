"""Rotary positions, with YaRN stretching.  B batch, S sequence, N heads, H width of the rotated part (even)."""

import math

import jax.numpy as jnp
import numpy as np

from moex.config import RopeConfig


def frequencies(dim: int, config: RopeConfig) -> np.ndarray:
    """Angle by which one step of position turns each pair of features: float32 [dim / 2], radians.

    Plain: theta^(-2 i / dim) (arXiv 2104.09864). With factor > 1: YaRN's blend of these and the same over the factor,
    by how often a pair turns within the original context (arXiv 2309.00071, section 3.2).
    """
    plain = config.theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if config.factor == 1.0:
        return plain.astype(np.float32)

    def feature_turning(times: float) -> float:
        return dim * math.log(config.original_context / (times * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = feature_turning(config.beta_fast), feature_turning(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    slowed = np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0, 1)
    return (plain * (1 - slowed) + plain / config.factor * slowed).astype(np.float32)


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's growth of attention with the factor: 0.1 mscale ln(factor) + 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def feature_scale(config: RopeConfig) -> float:
    """Factor on rotated features. DeepSeek's two corrections cancel where they are equal (arXiv 2405.04434)."""
    if config.mscale and config.mscale_all_dim:
        return yarn_scale(config.factor, config.mscale) / yarn_scale(config.factor, config.mscale_all_dim)
    return yarn_scale(config.factor)


def softmax_scale(head_dim: int, config: RopeConfig) -> float:
    """Factor on query-key products: 1 / sqrt(head_dim), times DeepSeek's squared correction where it is set."""
    correction = yarn_scale(config.factor, config.mscale_all_dim) if config.mscale_all_dim else 1.0
    return head_dim**-0.5 * correction**2


def rotate(x_BSNH, positions_BS, config: RopeConfig, *, width: int = 0):
    """Turns each pair of features by position times frequency, in float32; the result has x's dtype.

    Args: x_BSNH queries or keys; positions_BS int, of each token in its document; shards split alike.
      width: only the first this many features of a head are rotated; 0 rotates all.
    Interleaved input comes out as two halves: the order of features doesn't matter to query-key products.
    """
    if 0 < width < x_BSNH.shape[-1]:
        turned = rotate(x_BSNH[..., :width], positions_BS, config)
        return jnp.concatenate([turned, x_BSNH[..., width:]], axis=-1)
    dim = x_BSNH.shape[-1]
    angles_BSH = positions_BS[..., None].astype(jnp.float32) * frequencies(dim, config)[None, None]
    scale = feature_scale(config)
    cos, sin = jnp.cos(angles_BSH)[:, :, None] * scale, jnp.sin(angles_BSH)[:, :, None] * scale
    x = x_BSNH.astype(jnp.float32)
    a, b = (x[..., 0::2], x[..., 1::2]) if config.interleaved else (x[..., : dim // 2], x[..., dim // 2 :])
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BSNH.dtype)
