"""Normalisation. D is the normalised width; any dims may stand before it."""

import jax.numpy as jnp
from flax import nnx
from jax import lax

from mesh import collectives
from mesh.axes import Axes
from moex.layers.param import declare


def rms_norm(x, weight_D, eps: float, *, axes: Axes = ()):
    """x / sqrt(mean(x^2) + eps) * weight over the last dim; statistics in float32, result in x's dtype (arXiv 1910.07467).

    Args: x [..., D] any float; weight_D float32; eps added to the mean square; axes: mesh axes that D is split over.
    """
    x32 = x.astype(jnp.float32)
    mean = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    scale = lax.rsqrt(collectives.psum(mean, axes) / collectives.axis_size(axes) + eps)
    return (x32 * scale * weight_D.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


class RMSNorm(nnx.Module):
    """Owns the weight of one `rms_norm`; equal on all devices."""

    def __init__(self, width: int, eps: float):
        self.eps = eps
        self.weight = declare(width, axes=(None,), init="ones", float32=True, decays=False)

    def __call__(self, x):
        return rms_norm(x, self.weight[...], self.eps)
