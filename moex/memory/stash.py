"""Activation stash: what all layers' experts keep for the backward pass, in pools of as many rows as are in use.

R rows of a layer's buffer, n of them in use, C rows that a pool holds over all layers.

A layer's buffers have room for the worst routing that its budget allows, and without a stash each layer keeps its own. Here
a layer writes them at a running offset, which moves on by the n rows that are real, so that the next layer writes over the
rest. The pool is a carry of the scan over layers; in the backward pass it travels as its own cotangent: `sink`, after the
last layer, gives the filled pool back as the gradient of the pool, and each layer hands it on to the one before. So no
layer keeps a copy of it, and rows are read in the reverse order of writing by themselves. This is the purpose of
Megatron-Core's paged stash (arXiv 2603.07685) with autodiff's own order in place of a page table; schedules that have
another order use `moex.memory.pages`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mesh.axes import Axes
from mesh.vma import vary, varying

Key = tuple[str, tuple[int, ...]]
"""dtype and shape of a row: what a pool is for."""


class Stash(NamedTuple):
    """pool: arrays by `Key`.  at: int32, rows of each that are in use."""

    pool: dict[Key, jax.Array]
    at: jax.Array


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class _Form:
    """How a pull-back is put together again: its tree, for each leaf ("rows" | "small" | "given", its number), and R."""

    tree: Any
    places: tuple[tuple[str, int], ...]
    keys: tuple[Key, ...]
    num_rows: int

    def starts(self, capacity: int) -> list[int]:
        """Where each array of rows begins in its pool: one below the other, each with room for a whole buffer at its end."""
        return [(capacity + self.num_rows) * self.keys[:i].count(key) for i, key in enumerate(self.keys)]


class _Kept(NamedTuple):
    """What a function's backward pass needs: rows to stash, other arrays, and how they belong together."""

    rows: list[jax.Array]
    small: list[jax.Array]
    form: _Form


def empty(function: Callable, capacity: int, ints, rows, others, axes: Axes) -> Stash:
    """Pools for `stashed(function, capacity)`, zero, and typed as varying over `axes`.

    Args: ints, rows, others: the function's arguments, or their shapes and dtypes.
    """
    kept = jax.eval_shape(lambda: _run(function, *_zeros((ints, rows, others), axes))[1])
    height = capacity + kept.form.num_rows
    zeros = lambda shape, dtype: vary(jnp.zeros(shape, dtype), axes)
    pool = {key: zeros((kept.form.keys.count(key) * height, *key[1]), key[0]) for key in kept.form.keys}
    return Stash(pool, zeros((), jnp.int32))


def stashed(function: Callable, capacity: int) -> Callable:
    """function(ints, rows, others) -> out, with what its backward pass needs of the rows put into a stash.

    The result is f(stash, used, ints, rows, others) -> (out, stash). It may stand in a scan and under `jax.checkpoint`;
    gradients have the bits of the function's own. `sink` must follow, or the backward pass finds zeros.

    Args:
      function: `rows` is a tuple of float arrays [R, ...]; `others` are float arrays with gradients of their own, `ints`
        arrays without. Its gradients, but for those of rows past the first `used`, may depend on no such row, as those of
        `grouped_matmul` don't: the backward pass finds other layers' rows there, and gives anything back for them.
      capacity: C. When `stash.at` ends above it, rows were overwritten: the gradients are wrong, and their user must
        see to it that they are not applied.
    """

    @jax.custom_vjp
    def run(stash, used, ints, rows, others):
        return forward(stash, used, ints, rows, others)[0]

    def forward(stash, used, ints, rows, others):
        out, kept = _run(function, ints, rows, others)
        pool, form = dict(stash.pool), kept.form
        for key, first, x in zip(form.keys, form.starts(capacity), kept.rows, strict=True):
            pool[key] = lax.dynamic_update_slice_in_dim(pool[key], x, stash.at + first, axis=0)
        return (out, Stash(pool, stash.at + used)), (stash.at, kept.small, ints, others, form)

    def backward(kept, cotangents):
        at, small, ints, others, form = kept
        g, stash = cotangents
        rows = [
            lax.dynamic_slice_in_dim(stash.pool[key], at + first, form.num_rows, axis=0)
            for key, first in zip(form.keys, form.starts(capacity), strict=True)
        ]
        found = dict(rows=rows, small=small, given=jax.tree.leaves((ints, others)))
        pull = jax.tree.unflatten(form.tree, [found[kind][i] for kind, i in form.places])
        return (stash, None, None, *pull(g))

    run.defvjp(forward, backward)

    def typed(stash, used, ints, rows, others):
        given = (stash, used, ints, rows, others)
        axes = varying(*jax.tree.leaves(given))
        return run(*jax.tree.map(lambda x: vary(x, axes), given))

    return typed


@jax.custom_vjp
def sink(x, stash: Stash):
    """x as it is. In the backward pass the stash comes back filled."""
    return x


sink.defvjp(lambda x, stash: (x, stash), lambda stash, g: (g, stash._replace(at=None)))


def _run(function, ints, rows, others):
    """The function's result and `_Kept`. An array that the backward pass needs twice is kept once, an argument not at all."""
    out, leaves, tree = _pulled(function, ints, rows, others)
    num_rows = jax.tree.leaves(rows)[0].shape[0]
    axes = varying(*jax.tree.leaves((ints, rows, others)))
    as_long = lambda n: jax.eval_shape(
        lambda: _pulled(function, _zeros(ints, axes), _zeros(rows, axes, n), _zeros(others, axes))[1]
    )
    # A function may pad few rows to a tile, or take another implementation for numbers that aren't a multiple of one, and
    # keep other arrays then: any other number of rows will do with which it keeps as many.
    others_long = (as_long(n) for n in (2 * num_rows, num_rows + 1, num_rows - 1) if n > 0)
    longer = next((x for x in others_long if len(x) == len(leaves)), None)
    if longer is None:
        raise ValueError(
            f"what the function keeps for its backward pass differs for {num_rows} rows from any other number"
        )
    places = {id(x): ("given", i) for i, x in enumerate(jax.tree.leaves((ints, others)))}
    found = dict(rows=[], small=[])
    for x, long in zip(leaves, longer, strict=True):
        if id(x) not in places:
            kind = "rows" if _holds_rows(x, long, num_rows) else "small"
            places[id(x)] = (kind, len(found[kind]))
            found[kind].append(x)
    keys = tuple((str(x.dtype), x.shape[1:]) for x in found["rows"])
    return out, _Kept(**found, form=_Form(tree, tuple(places[id(x)] for x in leaves), keys, num_rows))


def _zeros(tree, axes, num_rows: int | None = None):
    """Arrays like those of the tree, or with other numbers of rows; what autodiff keeps may depend on the axes, too."""
    shape = lambda x: x.shape if num_rows is None else (num_rows, *x.shape[1:])
    return jax.tree.map(lambda x: vary(jnp.zeros(shape(x), x.dtype), axes), tree)


def _pulled(function, ints, rows, others):
    out, pull = jax.vjp(lambda rows, others: function(ints, rows, others), rows, others)
    return out, *jax.tree.flatten(pull)


def _holds_rows(x, other, num_rows: int) -> bool:
    """Whether an array grows with the number of rows: the same size by chance doesn't make rows of a matrix."""
    alike = x.ndim > 0 and x.shape[0] == num_rows != other.shape[0] and x.shape[1:] == other.shape[1:]
    return alike and jnp.issubdtype(x.dtype, jnp.floating)
