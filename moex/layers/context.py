"""Attention over a sequence that context parallelism has split, by four ways of bringing queries and keys together.

gather: all-gather keys and values.  ring: pass them round, one block a step (`moex.layers.ring`).  ulysses: trade the
sequence for heads by all-to-all (arXiv 2309.14509).  hierarchical: trade within groups of neighbours, a ring over groups
(arXiv 2405.07719; Megatron-Core's a2a+p2p).

The sequence is dealt in zig-zag halves: of 2 cp chunks, rank r holds chunk r and chunk 2 cp - 1 - r, so that causality
leaves every rank the same work. `Tokens.index` says where each token stands, so gather and ulysses work with any order.

B rows, S and T this rank's query and key tokens, N query heads, K key-value heads, H head width. All functions run inside
shard_map; `axes` is the view axis cp.
"""

import functools
from typing import NamedTuple

import jax
import numpy as np
from jax import lax

from mesh import collectives
from mesh.axes import Axes
from moex.layers.attention import attend
from moex.layers.blockwise import Rule
from moex.layers.ring import Circle, ring
from moex.layers.tokens import Tokens
from moex.memory.residuals import kept, named


class Exchange(NamedTuple):
    """How the ranks of cp bring queries and keys together: `mix` says what each field means."""

    method: str = "gather"
    ulysses: int = 1
    group: int = 0


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


def dealt(segments: np.ndarray, cp: int, deal: str = "row", lanes: int = 1) -> np.ndarray:
    """The order of `zigzag_order` for each row, int64 like segments [..., S].

    lanes: equal parts of a row that no document crosses; each is dealt over its own cp / lanes neighbouring ranks.

    deal: row cuts the whole row into 2 cp chunks. document cuts each document so (and the padding), with lengths that
    differ by one token at most: what is left over goes to the chunks in turn, from one document to the next, so that
    every rank gets as many tokens. Then each rank has its part of every document's work; no document needs padding.
    Raises ValueError when the row doesn't cut into 2 cp chunks.
    """
    if lanes > 1:
        own = dealt(segments.reshape(*segments.shape[:-1], lanes, -1), cp // lanes, deal)
        return (own + np.arange(lanes)[:, None] * own.shape[-1]).reshape(segments.shape)
    order = zigzag_order(segments.shape[-1], cp)
    if deal == "row" or cp == 1:
        return np.broadcast_to(order, segments.shape)
    flat = segments.reshape(-1, segments.shape[-1])
    return np.stack([np.argsort(_parts_of(row, cp), kind="stable") for row in flat]).reshape(segments.shape)


def _parts_of(segments_S: np.ndarray, cp: int) -> np.ndarray:
    """For each token the half that it goes to, 2 rank or 2 rank + 1, by documents."""
    chunks = 2 * cp
    begins = np.flatnonzero(np.diff(segments_S, prepend=segments_S[0] - 1))
    lengths = np.diff(begins, append=len(segments_S))
    turn = np.concatenate([[0], np.cumsum(lengths % chunks)[:-1]])  # the chunk that takes the first token left over
    more = (np.arange(chunks) - turn[:, None]) % chunks < (lengths % chunks)[:, None]
    chunk_S = np.repeat(np.tile(np.arange(chunks), len(lengths)), ((lengths // chunks)[:, None] + more).reshape(-1))
    return np.where(chunk_S < cp, 2 * chunk_S, 2 * (chunks - 1 - chunk_S) + 1)


def mix(
    q_BSNH, k_BTKH, v_BTKH, tokens: Tokens, axes: Axes, *,
    method: str, scale: float, ulysses: int = 1, group: int = 0, window: int = 0, soft_cap: float = 0.0, sinks_N=None,
    meter_N=None,
):  # fmt: skip
    """Causal attention within documents of one rank's queries over all ranks' keys: [B, S, N, H] like q.

    Args: q, k, v of this rank's tokens, whose segments and places `tokens` holds.
      method: gather, ring (the split must be zig-zag), ulysses (K must divide by cp) or hierarchical (K must divide by
        `ulysses`, neighbours that trade heads, and that by cp; the split must be zig-zag over all ranks).
      group: ring: no document lies over more than each this many neighbours, and keys pass round among them; 0: all.
      scale, window, soft_cap, sinks_N, meter_N: see `attend`; sinks and meter of this device's heads, equal over cp.
    """
    options = dict(scale=scale, window=window, soft_cap=soft_cap)
    if not axes or group == 1:
        own = dict(sinks_N=sinks_N, meter_N=meter_N)
        return attend(q_BSNH, k_BTKH, v_BTKH, tokens, tokens, ordered=True, **own, **options)
    if method == "ring":
        return ring(
            q_BSNH, k_BTKH, v_BTKH, tokens, Circle(axes, span=group), Rule(**options), sinks_N=sinks_N, meter_N=meter_N
        )
    everyone = kept(Tokens(*(collectives.all_gather(x, axes, dim=1) for x in tokens)))
    if method == "gather":
        k, v = named("context", tuple(collectives.all_gather(x, axes, dim=1) for x in (k_BTKH, v_BTKH)))
        return attend(q_BSNH, k, v, tokens, everyone, sinks_N=sinks_N, meter_N=meter_N, **options)
    group = ulysses if method == "hierarchical" else collectives.axis_size(axes)
    to_heads = functools.partial(collectives.all_to_all, axes=axes, split_dim=2, concat_dim=1, group=group)
    q, k, v = named("context", tuple(to_heads(x) for x in (q_BSNH, k_BTKH, v_BTKH)))
    place = collectives.axis_index(axes)
    own = lambda x_N: lax.dynamic_slice_in_dim(x_N, place % group * q.shape[2], q.shape[2])
    sinks_N, meter_N = jax.tree.map(own, (sinks_N, meter_N))
    if method == "hierarchical":
        size = q.shape[1]
        together = Tokens(*(lax.dynamic_slice_in_dim(x, place // group * size, size, axis=1) for x in everyone))
        q, k, v, together = jax.tree.map(lambda x: _swapped(x, group, 2), (q, k, v, together))
        mixed = ring(q, k, v, together, Circle(axes, group), Rule(**options), sinks_N=sinks_N, meter_N=meter_N)
        mixed = _swapped(mixed, 2, group)
    else:
        mixed = attend(q, k, v, everyone, everyone, sinks_N=sinks_N, meter_N=meter_N, **options)
    return named("context", collectives.all_to_all(mixed, axes, split_dim=1, concat_dim=2, group=group))


def _swapped(x, outer: int, inner: int):
    """Dim 1 is [outer, inner, tokens] and becomes [inner, outer, tokens]: early chunks of all ranks before late ones."""
    return x.reshape(x.shape[0], outer, inner, -1, *x.shape[2:]).swapaxes(1, 2).reshape(x.shape)
