"""Arguments of the table's cases: drawn numbers, and blocks of rows of which each device has its own."""

import jax.numpy as jnp
import numpy as np


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def whole(seed, *shape):
    """Small whole numbers: float32 sums of their products are exact in any order."""
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32)


def signs(seed, *shape):
    """Plus and minus one: products with them are exact in every format."""
    return np.random.default_rng(seed).choice([-1.0, 1.0], shape).astype(np.float32)


def on_each_device(function, inputs):
    """One device holds the blocks of both, so that an expert's rows are sorted within each block."""
    return jnp.stack([function({name: x[i] for name, x in inputs.items()}) for i in range(len(inputs["sizes"]))])
