"""A part of a layer whose forward and backward pass run in different ticks, and what it keeps in between.

`jax.vjp` gives a pull-back as a tree of arrays. Those that depend on the activations are kept; the others follow from
weights and tokens, which the backward pass has as well, and are made again there: by XLA's dead-code elimination that costs
what leads to them, and where a part gathers its weights, gathering them again.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mesh.vma import vary, varying

Tree = Any


@dataclasses.dataclass(frozen=True)
class Piece:
    """function(weights, known, x) -> (out, rest): `out` and the float arrays of `x` and `weights` have gradients.

    known: what the backward pass is given again: tokens, routing's bias, quantised weights.  x_like: shapes and manual axes
    of x.  out_like: of out.  places: for each leaf of the pull-back its number among the kept ones, -1 for one that is made
    again.
    """

    function: Callable
    x_like: Tree
    out_like: Tree
    places: tuple[int, ...]

    @classmethod
    def of(cls, function: Callable, weights: Tree, known: Tree, x: Tree) -> "Piece":
        """For arguments like these, whose values aren't used."""
        like = lambda tree: jax.tree.map(_Like.of, tree)
        return cls(
            function,
            like(x),
            like(jax.eval_shape(function, weights, known, x)[0]),
            _places(function, weights, known, x),
        )

    def forward(self, weights: Tree, known: Tree, x: Tree) -> tuple[Tree, Tree, list]:
        """(out, rest, what to keep: each array once)."""
        out, rest, leaves, _ = _pulled(self.function, weights, known, x)
        assert len(leaves) == len(self.places), "the pull-back's leaves are those of other arguments"
        return out, rest, [leaves[self.places.index(i)] for i in range(max(self.places, default=-1) + 1)]

    def backward(self, weights: Tree, known: Tree, kept: list, g: Tree) -> tuple[Tree, Tree]:
        """Cotangents of weights and x.  g: of out; a zero one gives zeros, whatever finite numbers were kept."""
        zeros = jax.tree.map(lambda like: like.zeros(), self.x_like)
        _, _, again, tree = _pulled(self.function, weights, known, zeros)
        leaves = [made if i < 0 else kept[i] for i, made in zip(self.places, again, strict=True)]
        return jax.tree.unflatten(tree, leaves)(g)


@dataclasses.dataclass(frozen=True)
class _Like:
    shape: tuple[int, ...]
    dtype: Any
    axes: frozenset[str]

    @classmethod
    def of(cls, x) -> "_Like":
        return cls(x.shape, x.dtype, varying(x))

    def zeros(self):
        return vary(jnp.zeros(self.shape, self.dtype), self.axes)


def zeros_like(tree: Tree, lead: tuple[int, ...] = ()) -> Tree:
    """Zeros of the shapes, dtypes and manual axes of a tree of arrays or of `jax.eval_shape`, with leading dims."""
    return jax.tree.map(lambda x: vary(jnp.zeros((*lead, *x.shape), x.dtype), varying(x)), tree)


def _pulled(function, weights, known, x):
    out, pull, rest = jax.vjp(lambda w, x: function(w, known, x), weights, x, has_aux=True)
    leaves, tree = jax.tree.flatten(pull)
    return out, rest, leaves, tree


def _places(function, weights, known, x) -> tuple[int, ...]:
    traced = jax.make_jaxpr(lambda *args: _pulled(function, *args)[2])(weights, known, x)
    count = lambda tree: len(jax.tree.leaves(tree))
    given = [False] * (count(weights) + count(known)) + [True] * count(x)
    numbers: dict = {}
    kept = zip(traced.jaxpr.outvars, _depends(traced.jaxpr, given), strict=True)
    return tuple(numbers.setdefault(v, len(numbers)) if depends else -1 for v, depends in kept)


def _depends(jaxpr, given: list[bool]) -> list[bool]:
    """Which results depend on the inputs marked true. Identity of arrays wouldn't do: a slice or a cast is a new one."""
    marked = {v for v, m in zip(jaxpr.invars, given, strict=True) if m}
    is_marked = lambda v: not hasattr(v, "val") and v in marked  # a literal has a value
    for equation in jaxpr.eqns:
        inputs = [is_marked(v) for v in equation.invars]
        inner = equation.params.get("jaxpr") if equation.primitive.name in ("jit", "pjit", "closed_call") else None
        outputs = _depends(inner.jaxpr, inputs) if inner is not None else [any(inputs)] * len(equation.outvars)
        marked |= {v for v, m in zip(equation.outvars, outputs, strict=True) if m}
    return [is_marked(v) for v in jaxpr.outvars]
