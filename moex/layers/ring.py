"""Ring attention: keys and values pass round a circle of devices, one block a step, with its own backward pass.

The sequence lies in zig-zag halves: each member holds an early and a late chunk, where early chunks follow the members'
order and late ones reverse it. So every step has the same work for all: two blocks of half a part each.

B rows, S and T query and key tokens of a member, N query heads, K key-value heads, H head width. All of it runs inside
shard_map.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mesh import collectives
from mesh.axes import Axes
from mesh.vma import vary, varying
from moex.layers.blockwise import (
    Places,
    QueryRows,
    Rule,
    block,
    block_gradients,
    largest,
    merge,
    sink_gradients,
    with_sinks,
)  # fmt: skip
from moex.layers.tokens import Tokens
from moex.memory.residuals import named


class Circle(NamedTuple):
    """Who passes on to whom: of each `span` neighbours along `axes` (0: of all), those `stride` apart."""

    axes: Axes
    stride: int = 1
    span: int = 0

    @property
    def size(self) -> int:
        """Members of a circle."""
        return self._span // self.stride

    @property
    def place(self):
        """int32, this device's place in its circle."""
        return collectives.axis_index(self.axes) % self._span // self.stride

    @property
    def _span(self) -> int:
        return self.span or collectives.axis_size(self.axes)

    def pass_on(self, tree):
        """Every member hands its arrays to the next one."""
        span, devices = self._span, range(collectives.axis_size(self.axes))
        following = [(r, r // span * span + (r + self.stride) % span) for r in devices]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axes, following), tree)


def ring(q, k, v, tokens: Tokens, circle: Circle, rule: Rule, *, sinks_N=None, meter_N=None):
    """Attention of this member's queries over the keys of all; see `moex.layers.context.mix`."""
    given = q, k, v, tokens.segments, tokens.index, sinks_N, meter_N
    union = varying(*jax.tree.leaves((given, tokens.positions)))
    return _ring_attention(*jax.tree.map(lambda x: vary(x, union), given), circle, rule)


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8))
def _ring_attention(q, k, v, segments, index, sinks_N, meter_N, circle: Circle, rule: Rule):
    return _ring_fwd(q, k, v, segments, index, sinks_N, meter_N, circle, rule)[0]


def _ring_fwd(q, k, v, segments, index, sinks_N, meter_N, circle, rule):
    """Merges one block after the other by their log-sum-exp, float32."""
    rank, ranks = circle.place, circle.size
    (q_lo, q_hi), queries = _halves(q), _halves_of(segments, index)
    part = functools.partial(block, rule=rule)

    (k_lo, k_hi), (v_lo, v_hi), keys = _halves(k), _halves(v), queries
    low = part(q_lo, k_lo, v_lo, queries[0], keys[0])
    high = merge(part(q_hi, k_lo, v_lo, queries[1], keys[0]), part(q_hi, k_hi, v_hi, queries[1], keys[1]))

    def turn(carry, step):
        low, high, travelling = carry
        travelling = circle.pass_on(travelling)
        (k_lo, k_hi), (v_lo, v_hi), keys = *map(_halves, travelling[:2]), _halves_of(*travelling[2:])
        earlier = (rank - step) % ranks < rank  # these keys come from a lower rank: its low chunk is seen by mine
        high = merge(high, part(q_hi, k_lo, v_lo, queries[1], keys[0]))
        pick = lambda a, b: jax.tree.map(lambda x, y: jnp.where(earlier, x, y), a, b)
        more = part(
            pick(q_lo, q_hi), pick(k_lo, k_hi), pick(v_lo, v_hi), pick(queries[0], queries[1]), pick(keys[0], keys[1])
        )
        return (pick(merge(low, more), low), pick(high, merge(high, more)), travelling), None

    steps = jnp.arange(1, ranks, dtype=jnp.int32)
    (low, high, _), _ = lax.scan(turn, (low, high, (k, v, segments, index)), steps)
    low, high = with_sinks(low, sinks_N), with_sinks(high, sinks_N)
    out, lse = named("core_attn", _joined(low.out, high.out)), _joined(low.lse, high.lse)
    lse = named("core_attn", lse, small=True)
    read_N = None
    if meter_N is not None:
        read_N = named("core_attn", largest(_joined(low.top, high.top), segments), small=True)
    return out.astype(q.dtype), (q, k, v, segments, index, sinks_N, read_N, out, lse)


def _ring_bwd(circle: Circle, rule: Rule, kept, g):
    """Each block's gradients from the global output and log-sum-exp; dk and dv travel on with their keys and come home."""
    q, k, v, segments, index, sinks_N, read_N, out, lse = kept
    rank, ranks = circle.place, circle.size
    g = g.astype(jnp.float32)
    delta = (g * out).sum(axis=-1)
    rows = [_halves(x) for x in (q, g, lse, delta)]
    low, high = (QueryRows(*(pair[i] for pair in rows)) for i in (0, 1))
    queries = _halves_of(segments, index)
    gradients = functools.partial(block_gradients, rule=rule)
    add = lambda a, b: jax.tree.map(jnp.add, a, b)

    (k_lo, k_hi), (v_lo, v_hi), keys = _halves(k), _halves(v), queries
    dq_lo, dk_lo, dv_lo = gradients(low, k_lo, v_lo, queries[0], keys[0])
    dq_hi, *d_lo = gradients(high, k_lo, v_lo, queries[1], keys[0])
    dq_more, dk_hi, dv_hi = gradients(high, k_hi, v_hi, queries[1], keys[1])
    dq_hi += dq_more
    dk, dv = _joined(dk_lo + d_lo[0], dk_hi), _joined(dv_lo + d_lo[1], dv_hi)

    def turn(carry, step):
        dq_lo, dq_hi, travelling = carry
        k, v, segments, index, dk, dv = circle.pass_on(travelling)
        (k_lo, k_hi), (v_lo, v_hi), keys = _halves(k), _halves(v), _halves_of(segments, index)
        earlier = (rank - step) % ranks < rank
        pick = lambda a, b: jax.tree.map(lambda x, y: jnp.where(earlier, x, y), a, b)
        dq_more, dk_lo, dv_lo = gradients(high, k_lo, v_lo, queries[1], keys[0])
        dq_hi += dq_more
        dq_more, dk_more, dv_more = gradients(
            pick(low, high), pick(k_lo, k_hi), pick(v_lo, v_hi), pick(queries[0], queries[1]), pick(keys[0], keys[1])
        )
        none = jnp.zeros_like
        dq_lo, dq_hi = pick((dq_lo + dq_more, dq_hi), (dq_lo, dq_hi + dq_more))
        dk = add(dk, pick(_joined(dk_lo + dk_more, none(dk_more)), _joined(dk_lo, dk_more)))
        dv = add(dv, pick(_joined(dv_lo + dv_more, none(dv_more)), _joined(dv_lo, dv_more)))
        return (dq_lo, dq_hi, (k, v, segments, index, dk, dv)), None

    start = (dq_lo, dq_hi, (k, v, segments, index, dk, dv))
    (dq_lo, dq_hi, (*_, dk, dv)), _ = lax.scan(turn, start, jnp.arange(1, ranks, dtype=jnp.int32))
    dk, dv = circle.pass_on((dk, dv))
    dq, dsinks_N = _joined(dq_lo, dq_hi).astype(q.dtype), sink_gradients(sinks_N, lse, delta)
    return dq, dk.astype(k.dtype), dv.astype(v.dtype), None, None, dsinks_N, read_N


_ring_attention.defvjp(_ring_fwd, _ring_bwd)


def _halves(x):
    return x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]


def _halves_of(segments, index) -> tuple[Places, Places]:
    (early_segments, late_segments), (early, late) = _halves(segments), _halves(index)
    return Places(early_segments, early), Places(late_segments, late)


def _joined(low, high):
    return jnp.concatenate([low, high], axis=1)
