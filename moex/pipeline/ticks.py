"""Runs a pipeline's schedule inside shard_map: ticks of one forward and one backward unit, sums of gradients over them.

B rows of this device, S its part of a sequence, D model width, P ranks, V chunks of a rank, N slots of a chunk.

Activations move one stage a tick, gradients one back, each by one permutation along a closed ring, whose last link carries
what the last rank sends on to the first rank's next chunk. Ranks that have no unit in a tick compute all the same; a
backward unit is masked by a cotangent of zeros, from which all gradients are exact zeros.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mesh import Fold, collectives
from mesh.vma import vary, varying
from moex.layers.moe import MoEStats
from moex.models.pattern import Kind
from moex.pipeline.chains import Chain, Cut, Given, Out, both
from moex.pipeline.layout import Layout
from moex.pipeline.residuals import zeros_like
from moex.pipeline.schedules import Does, Schedule, Units

Tree = Any

MAXIMA = ("load", "need")
"""Those of which micro-batches have the most of any, not the sum."""


class At(NamedTuple):
    """A slot of this rank.  index: in its stack, over all chunks.  layer: its number in the model.  live: there is one."""

    index: Tree
    layer: Tree
    live: Tree


class Work(NamedTuple):
    """The model's parts, on one device's shards; m is the number of a micro-batch.

    ends: weights of embedding, head and further predictions.  stacks: weights [V n, ...] of this rank's slots of each stack.
    embed: (ends, m) -> activations [B, S, D], of use to the first stage.
    head: (ends, activations, m, sums) -> (this rank's share of the loss, sums with those of m); the activations are of use on
      the last rank.  no_sums: what it starts with, typed as varying over the pipeline's axes.
    chain: (kind, weights, known, given) -> a `Chain` for arguments like these.
    known: (kind, slot, m) -> `Known`.
    seeds: by name, weights of these losses in the step's loss.
    """

    ends: Tree
    stacks: Mapping[str, Tree]
    embed: Callable
    head: Callable
    no_sums: Tree
    no_seen: jax.Array
    chain: Callable
    known: Callable
    seeds: Mapping[str, float]


class Totals(NamedTuple):
    """Over all micro-batches, on this rank.  ends, stacks: float32 gradients like the weights.  sums: of the head.  stats:
    `MoEStats` of the slots with experts, [V n, ...], or None without any.
    """

    ends: Tree
    stacks: dict[str, Tree]
    sums: Tree
    stats: MoEStats | None


class _Carry(NamedTuple):
    """x, dx: what arrives from the neighbours.  y: of the tick before.  rings: of each segment and layer of its period, what
    is kept for backward units, [slots, repeats, ...].
    """

    x: jax.Array
    dx: jax.Array
    y: jax.Array
    rings: tuple
    totals: Totals


class _Row(NamedTuple):
    """A tick's entries of the tables."""

    forward: Units
    backward: Units
    embed: Tree
    embed_back: Tree
    head: Tree


def run(schedule: Schedule, layout: Layout, fold: Fold, work: Work, shape_BSD, dtype) -> Totals:
    """Gradients and sums of all micro-batches.  shape_BSD, dtype: of a device's activations between layers."""
    ticks = _Ticks(schedule, layout, fold, work, vary(jnp.zeros(shape_BSD, dtype), fold.names))
    table = _Row(schedule.forward, schedule.backward, schedule.embed_T, schedule.embed_back_T, schedule.head_T)
    carry = ticks.start()

    def through(carry, rows, runs):
        at = 0
        for length, does in runs:
            part = jax.tree.map(lambda t, at=at, length=length: t[at : at + length], rows)
            carry, at = lax.scan(functools.partial(ticks.tick, does), carry, part)[0], at + length
        return carry

    for phase in schedule.phases:
        end = phase.start + phase.repeats * sum(length for length, _ in phase.runs)
        cut = lambda t, a=phase.start, b=end: jnp.asarray(t[a:b], bool if t.dtype == bool else jnp.int32)
        rows = jax.tree.map(cut, table)
        if phase.repeats == 1:
            carry = through(carry, rows, phase.runs)
        else:
            rows = jax.tree.map(lambda t, n=phase.repeats: t.reshape(n, -1, *t.shape[1:]), rows)
            carry = lax.scan(lambda c, r, runs=phase.runs: (through(c, r, runs), None), carry, rows)[0]
    return carry.totals


class _Ticks:
    """What all ticks share."""

    def __init__(self, schedule: Schedule, layout: Layout, fold: Fold, work: Work, zero_BSD):
        self.schedule, self.layout, self.work, self.zero_BSD = schedule, layout, work, zero_BSD
        self.pp = fold.dense.pp
        self.rank, num_ranks = collectives.axis_index(self.pp), collectives.axis_size(self.pp)
        self.last_chunk = layout.layer_PVN.shape[1] - 1
        self.is_first, self.is_last = self.rank == 0, self.rank == num_ranks - 1
        self.steps = [(i, (i + 1) % num_ranks) for i in range(num_ranks)]
        self.layer_VN = jnp.asarray(layout.layer_PVN, jnp.int32)[self.rank]
        kinds = dict.fromkeys(layout.slots)
        self.chains: dict[Kind, Chain] = {kind: work.chain(kind, *self._example(kind)) for kind in kinds}

    def start(self) -> _Carry:
        work, layout = self.work, self.layout
        float32 = lambda tree: jax.tree.map(lambda w: vary(jnp.zeros(w.shape, jnp.float32), varying(w)), tree)
        shapes = {kind: jax.eval_shape(chain.forward, *self._example(kind)) for kind, chain in self.chains.items()}
        rings = tuple(
            tuple(zeros_like(shapes[kind][2], (self.schedule.num_slots, segment.repeats)) for kind in segment.period)
            for segment in layout.segments
        )
        found = next((shapes[kind][1] for kind in shapes if kind.sparse), None)
        size = (self.last_chunk + 1) * layout.size("moe_layers")
        stats = jax.tree.map(lambda x: vary(x, self.pp), zeros_like(found, (size,)))
        totals = Totals(float32(work.ends), {n: float32(w) for n, w in work.stacks.items()}, work.no_sums, stats)
        return _Carry(self.zero_BSD, self.zero_BSD, self.zero_BSD, rings, totals)

    def tick(self, does: Does, carry: _Carry, row: _Row):
        """One tick, as a scan's body."""
        work, pp = self.work, self.pp
        forward, backward = (jax.tree.map(lambda t: t[self.rank], units) for units in (row.forward, row.backward))
        x, dx, y_before, rings, totals = carry
        y = y_before
        if does.embed:
            starts = self.is_first & (forward.chunk == 0)
            x = jnp.where(starts, work.embed(work.ends, row.embed), x)
        overlaps = self.schedule.delay and any(does.forward) and any(does.backward)
        every = range(len(self.layout.segments))
        if any(does.forward) and not overlaps:
            y, rings, stats = self._forward(does.forward, forward, x, rings, totals.stats, every)
            totals = totals._replace(stats=stats)
        if does.head:
            dy, totals = self._head(y_before if self.schedule.delay else y, row.head, totals)
            dx = jnp.where(self.is_last & (backward.chunk == self.last_chunk), dy, dx)
        if any(does.backward):
            dx = jnp.where(backward.on, dx, jnp.zeros_like(dx))
        if overlaps:
            y, dx, rings, totals = self._overlapped(does, forward, backward, x, dx, rings, totals)
        elif any(does.backward):
            dx, stacks = self._backward(does.backward, backward, dx, rings, totals.stacks, every)
            totals = totals._replace(stacks=stacks)
        if does.embed_back:
            ends = self.is_first & backward.on & (backward.chunk == 0)
            totals = self._embed_back(jnp.where(ends, dx, jnp.zeros_like(dx)), row.embed_back, totals)
        if pp:
            x, dx = lax.ppermute(y, pp, self.steps), lax.ppermute(dx, pp, [(b, a) for a, b in self.steps])
        return _Carry(x, dx, y, rings, totals), None

    def _head(self, y, m, totals: Totals):
        """The gradient of the loss by the last rank's activations; everything else is added up."""
        loss = lambda ends, y: self.work.head(ends, y, m, totals.sums)
        share, pull, sums = jax.vjp(loss, self.work.ends, y, has_aux=True)
        ends, dy = pull(jnp.ones_like(share))
        return dy, totals._replace(ends=_added(totals.ends, ends), sums=sums)

    def _embed_back(self, dx, m, totals: Totals) -> Totals:
        (ends,) = jax.vjp(lambda ends: self.work.embed(ends, m), self.work.ends)[1](dx)
        return totals._replace(ends=_added(totals.ends, ends))

    def _forward(self, does, unit: Units, x, rings, stats, segments: range):
        rings = list(rings)
        for number in segments:
            if does[number]:
                repeats = jnp.arange(self.layout.segments[number].repeats, dtype=jnp.int32)
                body = functools.partial(self._forward_repeat, number, unit)
                (x, rings[number], stats), _ = lax.scan(body, (x, rings[number], stats), repeats)
        return x, tuple(rings), stats

    def _forward_repeat(self, number: int, unit: Units, carry, repeat):
        x, ring, stats = carry
        for k, kind in enumerate(self.layout.segments[number].period):
            at = self._at(number, unit, repeat, k)
            found = self.chains[kind].forward(*self._forward_arguments(kind, at, unit, x, stats))
            x, stats, kept = self._after_forward(at, unit, x, stats, found)
            ring = _put(ring, k, _write(ring[k], kept, unit.slot, repeat))
        return (x, ring, stats), None

    def _backward(self, does, unit: Units, dx, rings, stacks, segments: range):
        for number in reversed(segments):
            if does[number]:
                repeats = jnp.arange(self.layout.segments[number].repeats, dtype=jnp.int32)
                body = functools.partial(self._backward_repeat, number, unit, rings[number])
                (dx, stacks), _ = lax.scan(body, (dx, stacks), repeats, reverse=True)
        return dx, stacks

    def _backward_repeat(self, number: int, unit: Units, ring, carry, repeat):
        dx, stacks = carry
        for k, kind in reversed(list(enumerate(self.layout.segments[number].period))):
            at = self._at(number, unit, repeat, k)
            kept = _read(ring[k], unit.slot, repeat)
            found = self.chains[kind].backward(*self._backward_arguments(kind, at, unit, dx, kept))
            dx, stacks = self._after_backward(kind, at, dx, stacks, found)
        return (dx, stacks), None

    def _overlapped(self, does: Does, forward: Units, backward: Units, x, dx, rings, totals: Totals):
        """Both units, layer by layer: a forward pass beside the backward pass that is as far from the other end.

        Scans are of equal segments, so only those of the one with most layers run side by side; layers before it run their
        forward pass first and their backward pass last, and those after it the other way round.
        """
        sizes = [len(s.period) * s.repeats for s in self.layout.segments]
        main, stacks, stats = sizes.index(max(sizes)), totals.stacks, totals.stats
        before, after = range(main), range(main + 1, len(sizes))
        x, rings, stats = self._forward(does.forward, forward, x, rings, stats, before)
        dx, stacks = self._backward(does.backward, backward, dx, rings, stacks, after)
        if does.forward[main] and does.backward[main]:
            repeats = jnp.arange(self.layout.segments[main].repeats, dtype=jnp.int32)
            body = functools.partial(self._overlapped_repeat, main, forward, backward)
            (x, dx, ring, stacks, stats), _ = lax.scan(body, (x, dx, rings[main], stacks, stats), repeats)
            rings = _put(rings, main, ring)
        else:
            here = range(main, main + 1)
            x, rings, stats = self._forward(does.forward, forward, x, rings, stats, here)
            dx, stacks = self._backward(does.backward, backward, dx, rings, stacks, here)
        x, rings, stats = self._forward(does.forward, forward, x, rings, stats, after)
        dx, stacks = self._backward(does.backward, backward, dx, rings, stacks, before)
        return x, dx, rings, totals._replace(stacks=stacks, stats=stats)

    def _overlapped_repeat(self, number: int, forward: Units, backward: Units, carry, repeat):
        x, dx, ring, stacks, stats = carry
        segment = self.layout.segments[number]
        for k, kind in enumerate(segment.period):
            k_back, repeat_back = len(segment.period) - 1 - k, segment.repeats - 1 - repeat
            kind_back = segment.period[k_back]
            at, at_back = self._at(number, forward, repeat, k), self._at(number, backward, repeat_back, k_back)
            kept = _read(ring[k_back], backward.slot, repeat_back)
            ahead = self.chains[kind], self._forward_arguments(kind, at, forward, x, stats)
            behind = self.chains[kind_back], self._backward_arguments(kind_back, at_back, backward, dx, kept)
            if isinstance(ahead[0], Cut) and isinstance(behind[0], Cut):
                ours, theirs = both(ahead[0].forward_parts(*ahead[1]), behind[0].backward_parts(*behind[1]))
            else:
                ours, theirs = ahead[0].forward(*ahead[1]), behind[0].backward(*behind[1])
            # What is written lies in another slot than what was read, which XLA can't know: only where all reading is over
            # before is the ring not copied.
            theirs, ring = lax.optimization_barrier((theirs, ring))
            x, stats, kept = self._after_forward(at, forward, x, stats, ours)
            dx, stacks = self._after_backward(kind_back, at_back, dx, stacks, theirs)
            ring = _put(ring, k, _write(ring[k], kept, forward.slot, repeat))
        return (x, dx, ring, stacks, stats), None

    def _forward_arguments(self, kind: Kind, at: At, unit: Units, x, stats: MoEStats | None):
        seen = stats.plain_E[at.index] if kind.sparse and stats is not None else None
        return self._weights(kind, at), self.work.known(kind, at, unit.micro), Given(x, seen)

    def _after_forward(self, at: At, unit: Units, x, stats, found):
        out, more, kept = found
        stats = stats if more is None else _with(stats, at, more, unit.on)
        return self._where(at, out.x, x), stats, kept

    def _backward_arguments(self, kind: Kind, at: At, unit: Units, dx, kept):
        g = Out(self._where(at, dx, jnp.zeros_like(dx)), self._seeds(kind, unit.on & at.live))
        return self._weights(kind, at), self.work.known(kind, at, unit.micro), kept, g

    def _after_backward(self, kind: Kind, at: At, dx, stacks, found):
        weights, back = found
        stacks = stacks | {kind.stack: _added_at(stacks[kind.stack], at.index, weights)}
        return self._where(at, back, dx), stacks

    def _at(self, number: int, unit: Units, repeat, k: int) -> At:
        before, segment = self.layout.segments[:number], self.layout.segments[number]
        first = sum(len(s.period) * s.repeats for s in before)
        slot, stack = first + repeat * len(segment.period) + k, segment.period[k].stack
        index = unit.chunk * self.layout.size(stack) + jnp.asarray(self.layout.place_N, jnp.int32)[slot]
        layer = self.layer_VN[unit.chunk, slot]
        return At(index, jnp.maximum(layer, 0), layer >= 0)

    def _where(self, at: At, of_layer, otherwise):
        """The first where the slot holds a layer; where all do, no question is asked."""
        return of_layer if self.layout.live_PVN.all() else jnp.where(at.live, of_layer, otherwise)

    def _weights(self, kind: Kind, at: At):
        return pick(self.work.stacks[kind.stack], at.index)

    def _seeds(self, kind: Kind, on) -> dict:
        """Cotangents of a layer's losses; zeros where it has no unit, so that its gradients are."""
        losses = self.chains[kind].out_like.losses
        return {name: vary(jnp.where(on, self.work.seeds[name], 0.0), like.axes) for name, like in losses.items()}

    def _example(self, kind: Kind):
        """Arguments like those of a layer of this kind."""
        zero = vary(jnp.int32(0), self.pp)
        at = At(zero, zero, zero == 0)
        seen = vary(self.work.no_seen, self.pp) if kind.sparse else None
        return self._weights(kind, at), self.work.known(kind, at, zero), Given(self.zero_BSD, seen)


def joined(before: MoEStats, more: MoEStats) -> MoEStats:
    """Of the micro-batches of both."""
    most = {name: jnp.maximum(getattr(before, name), getattr(more, name)) for name in MAXIMA}
    return jax.tree.map(jnp.add, before, more)._replace(**most)


def _with(stats: MoEStats, at: At, found: MoEStats, on) -> MoEStats:
    """With a layer's statistics of one more micro-batch in its place."""
    before = pick(stats, at.index)
    put = lambda total, a, b: lax.dynamic_update_index_in_dim(total, jnp.where(on & at.live, a, b), at.index, 0)
    return jax.tree.map(put, stats, joined(before, found), before)


def _added(total: Tree, more: Tree) -> Tree:
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, more)


def _added_at(stack: Tree, index, more: Tree) -> Tree:
    def add(total, one):
        here = lax.dynamic_index_in_dim(total, index, 0, keepdims=False)
        return lax.dynamic_update_index_in_dim(total, here + one.astype(total.dtype), index, 0)

    return jax.tree.map(add, stack, more)


def _put(items: tuple, at: int, item) -> tuple:
    return (*items[:at], item, *items[at + 1 :])


def pick(stack: Tree, index) -> Tree:
    """One of the slots of a stack."""
    return jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, index, 0, keepdims=False), stack)


def _write(ring: list, kept: list, slot, repeat) -> list:
    put = lambda a, x: lax.dynamic_update_slice(a, x[None, None], (slot, repeat, *[jnp.int32(0)] * x.ndim))
    return jax.tree.map(put, ring, kept)


def _read(ring: list, slot, repeat) -> list:
    take = lambda a: lax.dynamic_slice(a, (slot, repeat, *[jnp.int32(0)] * (a.ndim - 2)), (1, 1, *a.shape[2:]))[0, 0]
    return jax.tree.map(take, ring)
