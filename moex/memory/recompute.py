"""Recompute by module name: what the backward pass computes again instead of keeping."""

from collections.abc import Callable

import jax

MODULES = ("layer", "attention", "mlp", "moe", "experts")


def recomputed(module: str, recompute: tuple[str, ...]) -> Callable[[Callable], Callable]:
    """A wrapper for the module's function: `jax.checkpoint` when its name is listed, else the function itself.

    A function may close over arrays that need gradients; only its inputs are kept for the backward pass.
    """
    return jax.checkpoint if module in recompute else lambda function: function
