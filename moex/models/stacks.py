"""Layers' parameters, stacked along a leading dim, dealt to the scans that run them."""

from collections import Counter
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from moex.layers.moe import Steering
from moex.models.pattern import Kind, Segment


class Stacks:
    """The stacks of a model and what steers their routers, handed out in the order of its layers.

    params: a model's, whole or shards, as they are stored or `parted`.  steering: stacked over MoE layers and perhaps
    more.  layers: of the model.
    """

    def __init__(self, params: Mapping, steering: Steering, layers: Sequence[Kind]):
        stacks = {name: params[name] for name in params if "_layers" in name}
        self._parted = any(name.endswith("_high") for name in stacks)
        own = jax.tree.map(lambda x: x[: sum(kind.sparse for kind in layers)], steering)
        steered = parted(dict(moe_layers=own), layers) if self._parted else dict(moe_layers=own)
        self._stacks = stacks | {name: (stacks[name], part) for name, part in steered.items() if name in stacks}
        self._done: Counter[str] = Counter()

    def _name(self, kind: Kind) -> str:
        return kind.own_stack if self._parted else kind.stack

    def of(self, segment: Segment) -> dict:
        """What a segment's scan runs over: of each stack that it needs [repeats, layers of a period, ...]."""
        found = {}
        for name, size in Counter(map(self._name, segment.period)).items():
            first = self._done[name]
            self._done[name] += size * segment.repeats
            part = lambda x, a=first, b=self._done[name], n=size: x[a:b].reshape(segment.repeats, n, *x.shape[1:])
            found[name] = jax.tree.map(part, self._stacks[name])
        return found

    def each(self, period: Sequence[Kind], given: Mapping):
        """Yields (kind, parameters, steering) of the layers of one period.  given: one repeat of `of`."""
        at: Counter[str] = Counter()
        for kind in period:
            name = self._name(kind)
            mine = jax.tree.map(lambda x, i=at[name]: x[i], given[name])
            at[name] += 1
            yield (kind, *mine) if kind.sparse else (kind, mine, Steering())


def parted(stacks: Mapping, layers: Sequence[Kind]) -> dict:
    """Stacks of parameters with the layers that compute high in stacks of their own: what enters compute at once enters in
    one way.
    """
    found = {}
    for name, stack in stacks.items():
        first, last, size = _high_ends(name, layers)
        if first + last < size:
            found[name] = jax.tree.map(lambda x, a=first, b=size - last: x[a:b], stack)
        if first + last:
            ends = lambda x, a=first, b=size - last: jnp.concatenate([x[:a], x[b:]])
            found[f"{name}_high"] = jax.tree.map(ends, stack)
        if not size:
            found[name] = stack
    return found


def joined(stacks: Mapping, layers: Sequence[Kind]) -> dict:
    """The inverse of `parted`."""
    found = {}
    for name in dict.fromkeys(name.removesuffix("_high") for name in stacks):
        first = _high_ends(name, layers)[0]
        middle, high = stacks.get(name), stacks.get(f"{name}_high")
        if middle is None or high is None:
            found[name] = middle if high is None else high
        else:
            found[name] = jax.tree.map(lambda m, h, a=first: jnp.concatenate([h[:a], m, h[a:]]), middle, high)
    return found


def _high_ends(stack: str, layers: Sequence[Kind]) -> tuple[int, int, int]:
    """How many of a stack's layers compute high at its beginning and at its end, and all of them; 0 of what is no stack."""
    high = [kind.high for kind in layers if kind.stack == stack]
    if all(high):
        return len(high), 0, len(high)
    return high.index(False), high[::-1].index(False), len(high)
