"""Attention over a sequence that context parallelism has split, by three ways of bringing queries and keys together.

gather: all-gather keys and values.  ring: pass them round, one block a step, with its own backward pass.  ulysses: trade
the sequence for heads by all-to-all (arXiv 2309.14509).

The sequence is dealt in zig-zag halves: of 2 cp chunks, rank r holds chunk r and chunk 2 cp - 1 - r, so that causality
leaves every rank the same work. `Tokens.index` says where each token stands, so gather and ulysses work with any order.

B rows, S and T this rank's query and key tokens, N query heads, K key-value heads, H head width. All functions run inside
shard_map; `axes` is the view axis cp.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mesh import collectives
from mesh.axes import Axes
from mesh.vma import vary, varying
from moex.layers.attention import attend
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
from moex.memory.residuals import kept, named


def zigzag_order(seq_len: int, cp: int) -> np.ndarray:
    """Places of a sequence in the order in which its zig-zag split lies: rank r gets part r of `x[order]`. int64 [S].

    Raises ValueError when the sequence doesn't cut into 2 cp chunks.
    """
    if seq_len % (2 * cp) and cp > 1:
        raise ValueError(f"a sequence of {seq_len} doesn't cut into 2 x cp={2 * cp} chunks")
    if cp == 1:
        return np.arange(seq_len)
    chunks = np.arange(seq_len).reshape(2 * cp, -1)
    return np.concatenate([chunks[[r, 2 * cp - 1 - r]].reshape(-1) for r in range(cp)])


def mix(
    q_BSNH, k_BTKH, v_BTKH, tokens: Tokens, axes: Axes, *,
    method: str, scale: float, window: int = 0, soft_cap: float = 0.0, sinks_N=None, meter_N=None,
):  # fmt: skip
    """Causal attention within documents of one rank's queries over all ranks' keys: [B, S, N, H] like q.

    Args: q, k, v of this rank's tokens, whose segments and places `tokens` holds.
      method: gather, ring (the split must be zig-zag) or ulysses (K must divide by cp).
      scale, window, soft_cap, sinks_N, meter_N: see `attend`; sinks and meter of this device's heads, equal over cp.
    """
    options = dict(scale=scale, window=window, soft_cap=soft_cap)
    if not axes:
        own = dict(sinks_N=sinks_N, meter_N=meter_N)
        return attend(q_BSNH, k_BTKH, v_BTKH, tokens, tokens, ordered=True, **own, **options)
    if method == "ring":
        return _ring(q_BSNH, k_BTKH, v_BTKH, tokens, sinks_N, meter_N, axes, Rule(**options))
    everyone = kept(Tokens(*(collectives.all_gather(x, axes, dim=1) for x in tokens)))
    if method == "gather":
        k, v = named("context", tuple(collectives.all_gather(x, axes, dim=1) for x in (k_BTKH, v_BTKH)))
        return attend(q_BSNH, k, v, tokens, everyone, sinks_N=sinks_N, meter_N=meter_N, **options)
    to_heads = functools.partial(collectives.all_to_all, axes=axes, split_dim=2, concat_dim=1)
    q, k, v = named("context", tuple(to_heads(x) for x in (q_BSNH, k_BTKH, v_BTKH)))
    own = lambda x_N: lax.dynamic_slice_in_dim(x_N, collectives.axis_index(axes) * q.shape[2], q.shape[2])
    sinks_N, meter_N = jax.tree.map(own, (sinks_N, meter_N))
    mixed = attend(q, k, v, everyone, everyone, sinks_N=sinks_N, meter_N=meter_N, **options)
    return named("context", collectives.all_to_all(mixed, axes, split_dim=1, concat_dim=2))


def _ring(q, k, v, tokens: Tokens, sinks_N, meter_N, axes: Axes, rule: Rule):
    given = q, k, v, tokens.segments, tokens.index, sinks_N, meter_N
    union = varying(*jax.tree.leaves((given, tokens.positions)))
    return _ring_attention(*jax.tree.map(lambda x: vary(x, union), given), axes, rule)


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8))
def _ring_attention(q, k, v, segments, index, sinks_N, meter_N, axes: Axes, rule: Rule):
    return _ring_fwd(q, k, v, segments, index, sinks_N, meter_N, axes, rule)[0]


def _ring_fwd(q, k, v, segments, index, sinks_N, meter_N, axes, rule):
    """Merges one block after the other by their log-sum-exp, float32."""
    rank, ranks = collectives.axis_index(axes), collectives.axis_size(axes)
    (q_lo, q_hi), queries = _halves(q), _halves_of(segments, index)
    part = functools.partial(block, rule=rule)

    (k_lo, k_hi), (v_lo, v_hi), keys = _halves(k), _halves(v), queries
    low = part(q_lo, k_lo, v_lo, queries[0], keys[0])
    high = merge(part(q_hi, k_lo, v_lo, queries[1], keys[0]), part(q_hi, k_hi, v_hi, queries[1], keys[1]))

    def turn(carry, step):
        low, high, travelling = carry
        travelling = _pass_on(travelling, axes, ranks)
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


def _ring_bwd(axes, rule, kept, g):
    """Each block's gradients from the global output and log-sum-exp; dk and dv travel on with their keys and come home."""
    q, k, v, segments, index, sinks_N, read_N, out, lse = kept
    rank, ranks = collectives.axis_index(axes), collectives.axis_size(axes)
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
        k, v, segments, index, dk, dv = _pass_on(travelling, axes, ranks)
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
    dk, dv = _pass_on((dk, dv), axes, ranks)
    dq, dsinks_N = _joined(dq_lo, dq_hi).astype(q.dtype), sink_gradients(sinks_N, lse, delta)
    return dq, dk.astype(k.dtype), dv.astype(v.dtype), None, None, dsinks_N, read_N


_ring_attention.defvjp(_ring_fwd, _ring_bwd)


def _pass_on(tree, axes: Axes, ranks: int):
    """Every rank hands its arrays to the next one."""
    following = [(r, (r + 1) % ranks) for r in range(ranks)]
    return jax.tree.map(lambda x: lax.ppermute(x, axes, following), tree)


def _halves(x):
    return x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]


def _halves_of(segments, index) -> tuple[Places, Places]:
    (early_segments, late_segments), (early, late) = _halves(segments), _halves(index)
    return Places(early_segments, early), Places(late_segments, late)


def _joined(low, high):
    return jnp.concatenate([low, high], axis=1)
