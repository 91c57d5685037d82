"""Varying manual axes: helpers for what `shard_map(check_vma=True)` cannot see by itself.

An array inside shard_map has a type that says over which mesh axes its value may differ (it is varying) or is equal on
all devices (invariant). JAX transposes by these types; where they are lost, a gradient is silently wrong.
"""

import jax
from jax import lax

from mesh.axes import Axes


def varying(*arrays) -> frozenset[str]:
    """The mesh axes over which any of the arrays is typed as varying (empty outside shard_map)."""
    return frozenset().union(*map(_varying_one, arrays))


def _varying_one(array) -> frozenset[str]:
    kind = jax.typeof(array)
    kind = getattr(kind, "mat", kind)  # since JAX 0.12 the manual axes sit one level down
    return frozenset(getattr(kind, "varying", getattr(kind, "vma", ())))


def vary(array, axes: Axes | frozenset[str]):
    """The same values, typed as varying over `axes` too. Its transpose sums the cotangent over what was added."""
    missing = tuple(a for a in axes if a not in _varying_one(array))
    return lax.pcast(array, missing, to="varying") if missing else array


def unvary(cotangent, primal):
    """Ends the backward rule of a custom VJP: sums over the axes that the cotangent varies over and the primal doesn't."""
    extra = tuple(sorted(varying(cotangent) - varying(primal)))
    return lax.psum(cotangent, extra) if extra else cotangent


def typed(kernel):
    """Wraps a kernel whose output type forgets the manual axes (`plgpu.kernel` calls every output invariant).

    Arguments are made varying over the union of their axes first, so the sum that a replicated argument's gradient
    needs is inserted by JAX; outputs are typed as varying over the same axes.
    """

    def call(*arrays):
        axes = varying(*jax.tree.leaves(arrays))
        out = kernel(*jax.tree.map(lambda x: vary(x, axes), arrays))
        return jax.tree.map(lambda x: vary(x, axes), out)

    return call
