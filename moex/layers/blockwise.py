"""Attention one block at a time: outputs with their log-sum-exp, so that blocks merge; gradients from the global ones.

Never more than one block of scores is held, forward or backward, and of a large block one tile of its queries. Scores,
softmax and sums are float32 (arXiv 2205.14135). B rows, S and T query and key tokens, N query heads, K key-value heads, H
head width, all of one device.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mesh.vma import vary, varying
from moex.memory.residuals import named

_MASKED = -1e30
_MOST_BLOCKS = 16
MOST_SCORES = 2**27
"""Logits of a tile, 0.5 GiB in float32; a block with more is computed by tiles of its queries, one after the other."""


class Places(NamedTuple):
    """segments, index: int32 [B, S], of queries or keys; see `moex.layers.tokens.Tokens`."""

    segments: jax.Array
    index: jax.Array


class Part(NamedTuple):
    """out: float32 [B, S, N, H].  lse, top: float32 [B, S, N], log of the summed exponentials and the largest logit, the
    latter of keys alone; about -1e30 where none was seen.
    """

    out: jax.Array
    lse: jax.Array
    top: jax.Array


class Rule(NamedTuple):
    """What is static of scores: factor on products, keys that a query sees at most (0: all), and the size c that logits x
    are kept below as c tanh(x / c) (0: they are not).
    """

    scale: float
    window: int = 0
    soft_cap: float = 0.0


class QueryRows(NamedTuple):
    """What a query's gradient needs: q, the output's gradient, the global log-sum-exp, sum of gradient times output."""

    q: jax.Array
    g: jax.Array
    lse: jax.Array
    delta: jax.Array


def block(q, k, v, queries: Places, keys: Places, rule: Rule) -> Part:
    """Queries [B, S, N, H] over one block of keys and values [B, T, K, H]; a query that sees none comes out 0."""
    if (tiles := _num_tiles(q, k)) == 1:
        return _tile(q, k, v, queries, keys, rule)
    one = lambda given: _tile(given[0], k, v, given[1], keys, rule)
    return jax.tree.map(_whole, lax.map(one, jax.tree.map(lambda x: _cut(x, tiles), (q, queries))))


def _tile(q, k, v, queries: Places, keys: Places, rule: Rule) -> Part:
    groups = k.shape[2], q.shape[2] // k.shape[2]
    scores = _scores(_by_head(q, groups), _by_head(k), rule)
    seen = _seen(queries, keys, rule.window)
    scores = jnp.where(seen, scores, _MASKED)
    top = scores.max(axis=-1)
    weights = jnp.where(seen, jnp.exp(scores - top[..., None]), 0)
    floor = jnp.maximum(weights.sum(axis=-1), 1e-30)
    mixed = _dot(_flat(weights.astype(v.dtype)), _by_head(v), 1).reshape(*floor.shape, -1) / floor[..., None]
    return Part(_by_token(mixed), _by_token(top + jnp.log(floor)), _by_token(top))


def merge(a: Part, b: Part) -> Part:
    """Joins the parts of the same queries over disjoint keys."""
    lse = jnp.logaddexp(a.lse, b.lse)
    out = a.out * jnp.exp(a.lse - lse)[..., None] + b.out * jnp.exp(b.lse - lse)[..., None]
    return Part(out, lse, jnp.maximum(a.top, b.top))


def with_sinks(part: Part, sinks_N) -> Part:
    """The part with one more key for each head, of this logit and no value; itself when `sinks_N` is None."""
    if sinks_N is None:
        return part
    lse = jnp.logaddexp(part.lse, sinks_N[None, None])
    return Part(part.out * jnp.exp(part.lse - lse)[..., None], lse, part.top)


def largest(top_BSN, segments_BS):
    """Of each head over the queries that are no padding, at least 0: float32 [N]."""
    return jnp.where(segments_BS[..., None] > 0, top_BSN, 0).max(axis=(0, 1), initial=0)


def sink_gradients(sinks_N, lse, delta):
    """Of the logits of sinks, from the global log-sum-exp and sum of gradient times output; None without sinks."""
    return None if sinks_N is None else -(jnp.exp(sinks_N[None, None] - lse) * delta).sum(axis=(0, 1))


def block_gradients(rows: QueryRows, k, v, queries: Places, keys: Places, rule: Rule):
    """(dq, dk, dv) that one block contributes, float32."""
    if (tiles := _num_tiles(rows.q, k)) == 1:
        return _tile_gradients(rows, k, v, queries, keys, rule)

    def add(sums, given):
        dq, *more = _tile_gradients(given[0], k, v, given[1], keys, rule)
        return jax.tree.map(jnp.add, sums, tuple(more)), dq

    zeros = lambda x: vary(jnp.zeros(x.shape, jnp.float32), varying(x))
    cut = jax.tree.map(lambda x: _cut(x, tiles), (rows, queries))
    (dk, dv), dq = lax.scan(add, (zeros(k), zeros(v)), cut)
    return _whole(dq), dk, dv


def _tile_gradients(rows: QueryRows, k, v, queries: Places, keys: Places, rule: Rule):
    groups = k.shape[2], rows.q.shape[2] // k.shape[2]
    q, g, lse, delta = (_by_head(x, groups) for x in rows)
    q, g, k, v = *(x.astype(jnp.float32) for x in (q, g)), *(_by_head(x.astype(jnp.float32)) for x in (k, v))
    scores = _scores(q, k, rule)
    weights = jnp.where(_seen(queries, keys, rule.window), jnp.exp(scores - lse[..., None]), 0)
    dscores = weights * (_dot(_flat(g), v, 2).reshape(weights.shape) - delta[..., None]) * rule.scale
    if rule.soft_cap:
        dscores *= 1 - jnp.square(scores / rule.soft_cap)
    dv, dk = (_dot(_flat(x), _flat(y), 1, over_rows=True) for x, y in ((g, weights), (q, dscores)))  # [B, K, H, T]
    dq = _dot(_flat(dscores), k, 1).reshape(q.shape)
    return _by_token(dq), *(x.transpose(0, 3, 1, 2) for x in (dk, dv))


def _num_tiles(q, k) -> int:
    """The least number of equal tiles of queries with no more logits than `MOST_SCORES` each."""
    num_rows, num_queries, num_heads = q.shape[:3]
    need = -(-num_rows * num_heads * num_queries * k.shape[1] // MOST_SCORES)
    return next(n for n in range(min(max(need, 1), num_queries), num_queries + 1) if num_queries % n == 0)


def _cut(x, tiles: int):
    """[B, S, ...] -> [tiles, B, S / tiles, ...]."""
    return jnp.moveaxis(x.reshape(x.shape[0], tiles, -1, *x.shape[2:]), 1, 0)


def _whole(x):
    """The way back."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _by_head(x, groups: tuple[int, int] | None = None):
    """[B, S, N, ...] -> [B, K, N / K, S, ...], or [B, T, K, H] -> [B, K, T, H]: a matmul a head on every back end."""
    if groups is None:
        return x.transpose(0, 2, 1, 3)
    return jnp.moveaxis(x.reshape(*x.shape[:2], *groups, *x.shape[3:]), 1, 3)


def _by_token(x):
    """The way back: [B, K, N / K, S, ...] -> [B, S, N, ...]."""
    x = jnp.moveaxis(x, 3, 1)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def _flat(x):
    """[B, K, N / K, S, ...] -> [B, K, (N / K) S, ...]: the rows that share a key-value head."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _dot(a, b, dim: int, *, over_rows: bool = False):
    """Products of each head, float32: a's last dim (or its rows) with `dim` of the b's two."""
    dims = ((2 if over_rows else 3,), (dim + 1,))
    return lax.dot_general(a, b, (dims, ((0, 1), (0, 1))), preferred_element_type=jnp.float32)


def _scores(q, k, rule: Rule):
    """Logits [B, K, N / K, S, T]."""
    scaled = _dot(_flat(q), k, 2).reshape(*q.shape[:4], k.shape[2]) * rule.scale
    return rule.soft_cap * jnp.tanh(scaled / rule.soft_cap) if rule.soft_cap else scaled


def _seen(queries: Places, keys: Places, window: int):
    """Which keys a query sees, broadcastable to its scores."""
    distance = queries.index[:, :, None] - keys.index[:, None, :]
    seen = (distance >= 0) & (queries.segments[:, :, None] == keys.segments[:, None, :])
    if window:
        seen &= distance < window
    return seen[:, None, None]


def attention(
    q, k, v, queries: Places, keys: Places, rule: Rule, *, sinks_N=None, meter_N=None, ordered: bool = False,
    block_size: int,
):  # fmt: skip
    """Attention of all queries over all keys, block by block of queries; keeps output and log-sum-exp only.

    sinks_N: float32 logit of each head's sink, or None.  meter_N: see `moex.layers.attention.attend`.
    ordered: queries and keys are the same tokens in the order of their index, so that a block of queries needs no later
    keys and those are left out.
    """
    given = q, k, v, queries, keys, sinks_N, meter_N
    axes = varying(*jax.tree.leaves(given))
    return _attention(*jax.tree.map(lambda x: vary(x, axes), given), rule, ordered, block_size)


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8, 9))
def _attention(q, k, v, queries, keys, sinks_N, meter_N, rule: Rule, ordered, block_size):
    return _fwd(q, k, v, queries, keys, sinks_N, meter_N, rule, ordered, block_size)[0]


def _fwd(q, k, v, queries, keys, sinks_N, meter_N, rule: Rule, ordered, block_size):
    def forward(q, k, v, queries, keys):
        parts = [
            with_sinks(block(q[:, rows], k[:, seen], v[:, seen], _at(queries, rows), _at(keys, seen), rule), sinks_N)
            for rows, seen in _blocks(q.shape[1], k.shape[1], rule.window, ordered, block_size)
        ]
        out, lse, top = (jnp.concatenate(x, axis=1) for x in zip(*parts, strict=True))
        return out.astype(q.dtype), lse, *([] if meter_N is None else [top])

    out, lse, *top = _row_by_row(forward, q, k, v, queries, keys)
    out, lse = named("core_attn", out), named("core_attn", lse, small=True)
    read_N = named("core_attn", largest(top[0], queries.segments), small=True) if top else None
    return out, (q, k, v, queries, keys, out, lse, sinks_N, read_N)


def _bwd(rule: Rule, ordered, block_size, kept, g):
    *kept, sinks_N, read_N = kept

    def backward(q, k, v, queries, keys, out, lse, g):
        delta = (g.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=-1)
        dk, dv = (jnp.zeros_like(x, jnp.float32) for x in (k, v))
        dqs = []
        for rows, seen in _blocks(q.shape[1], k.shape[1], rule.window, ordered, block_size):
            taken = QueryRows(q[:, rows], g[:, rows], lse[:, rows], delta[:, rows])
            where = _at(queries, rows), _at(keys, seen)
            dq, dk_part, dv_part = block_gradients(taken, k[:, seen], v[:, seen], *where, rule)
            dk, dv = dk.at[:, seen].add(dk_part), dv.at[:, seen].add(dv_part)
            dk, dv, dq = lax.optimization_barrier((dk, dv, dq))  # one block of scores at a time, on every back end
            dqs.append(dq)
        return jnp.concatenate(dqs, axis=1).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)

    out, lse = kept[-2:]
    delta = (g.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=-1)
    return *_row_by_row(backward, *kept, g), None, None, sink_gradients(sinks_N, lse, delta), read_N


def _row_by_row(function, *arrays):
    """On CPUs one row after the other, whose blocks then stay in the cache; elsewhere all rows at once."""

    def rows(*arrays):
        # A barrier, since XLA:CPU vectorises no exp whose fusion also reads a row through the loop's index.
        one = lambda row: jax.tree.map(
            lambda x: x[0], function(*jax.tree.map(lambda x: x[None], lax.optimization_barrier(row)))
        )
        return lax.map(one, arrays)

    return lax.platform_dependent(*arrays, cpu=rows, default=function)


_attention.defvjp(_fwd, _bwd)


def _blocks(num_queries: int, num_keys: int, window: int, ordered: bool, size: int) -> list[tuple[slice, slice]]:
    """Slices of queries, and of the keys that they may see: at most 16 blocks, so that the program stays small."""
    size = max(size, -(-num_queries // _MOST_BLOCKS))
    cuts = [slice(at, min(at + size, num_queries)) for at in range(0, num_queries, size)]
    if not ordered:
        return [(rows, slice(0, num_keys)) for rows in cuts]
    return [(rows, slice(max(0, rows.start - window + 1) if window else 0, rows.stop)) for rows in cuts]


def _at(places: Places, rows: slice) -> Places:
    return Places(places.segments[:, rows], places.index[:, rows])
