"""Recompute by module name: what the backward pass computes again instead of keeping."""

import functools
from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name

KEPT = "routing"
"""Name of what is always kept: a router's choice of experts, and the whole numbers that say where rows go."""

MODULES = ("layer", "attention", "mlp", "moe", "experts")


def kept(numbers):
    """The arrays of a tree, none of which is computed again: sorting a second time costs more than their few bytes a row."""
    return jax.tree.map(lambda x: checkpoint_name(x, KEPT), numbers)


def recomputed(module: str, recompute: tuple[str, ...]) -> Callable[[Callable], Callable]:
    """A wrapper for the module's function: `jax.checkpoint` when its name is listed, else the function itself.

    A function may close over arrays that need gradients; only its inputs are kept for the backward pass, and the choices
    of experts: made a second time, a near-tie may fall the other way.
    """
    if module not in recompute:
        return lambda function: function
    return functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(KEPT))
