"""ECHO: spare slots on cool ranks hold clones of hot experts for one layer and step, so that no rank gets far more rows.

n ranks of the ep view, E experts, e of a rank, S clone slots of a rank, H experts that a rank may have cloned. Everything
is computed alike on all ranks from counts that all of them know; sizes are static and the host is not asked. The planner
is that of Megatron-Core's elastic cloning (arXiv 2603.07685, section on load imbalance), made of whole-array operations.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mesh import collectives
from mesh.axes import Axes
from mesh.vma import vary, varying
from moex.balance.scores import is_expert, places_among_equals
from pallas_kernels.quantize import Quantised, dequantize, quantize


class Clones(NamedTuple):
    """moved_En: int32, rows of expert E that rank n takes.  slot_nS: int32, the expert that a slot holds, or -1."""

    moved_En: jax.Array
    slot_nS: jax.Array

    def loads(self, tokens_E):
        """Rows of each rank after cloning, int32 [n]."""
        num_ranks = self.slot_nS.shape[0]
        home_n = (tokens_E - self.moved_En.sum(axis=1)).reshape(num_ranks, -1).sum(axis=1)
        return home_n + self.moved_En.sum(axis=0)


def spill_and_room(tokens_E, num_ranks: int, hot_per_home: int, cap):
    """Rows that each expert should give away, taken from a rank's largest ones, and the room that the other ranks have.

    Args: tokens_E int32 rows of each expert; cap int32, rows that a rank may keep.
    Returns: (int32 [E], int32 [n]).
    """
    tokens_ne = tokens_E.reshape(num_ranks, -1)
    num_local = tokens_ne.shape[1]
    rising = jnp.argsort(tokens_ne, axis=1, stable=True)
    over = jnp.maximum(jnp.cumsum(jnp.take_along_axis(tokens_ne, rising, axis=1), axis=1) - cap, 0)
    spill = jnp.diff(over, axis=1, prepend=0)
    hottest = jnp.arange(num_local) >= num_local - hot_per_home
    spill = jnp.where(hottest[None], spill, 0)
    back = jnp.argsort(rising, axis=1)
    return jnp.take_along_axis(spill, back, axis=1).reshape(-1), jnp.maximum(cap - tokens_ne.sum(axis=1), 0)


def plan_clones(tokens_E, num_ranks: int, *, slots: int, hot_per_home: int, cap: float) -> Clones:
    """Who takes how much of whom: after it no rank has many more than `cap` times the mean, if slots and room allow.

    Spills, largest first, are laid end to end along the ranks' room, roomiest first, and a rank that lies within one
    expert's spill is filled by it; the same again with what is left. Then, S + 1 times, the i-th largest rest goes to the
    i-th roomiest rank.

    Args: tokens_E int32, rows of each expert from all sources of an ep group.
    """
    num_experts = tokens_E.shape[0]
    # In float32, since int32 products overflow; the same number on every rank, which is all that matters.
    most = jnp.minimum((tokens_E.sum() // num_ranks).astype(jnp.float32) * cap, 2.0**30).astype(jnp.int32)
    spill_E, room_n = spill_and_room(tokens_E, num_ranks, hot_per_home, most)
    zeros = lambda *shape: vary(jnp.zeros(shape, jnp.int32), varying(tokens_E))
    moved_En, slot_nS, used_n = zeros(num_experts, num_ranks), zeros(num_ranks, slots) - 1, zeros(num_ranks)
    for part in (_fill_whole, _fill_whole, *[_match] * (slots + 1)):
        free_n = jnp.where(used_n < slots, room_n, 0)
        rank = jnp.argsort(-free_n, stable=True)
        expert, rows = part(spill_E, free_n[rank])
        spill_E, room_n = spill_E.at[expert].add(-rows), room_n.at[rank].add(-rows)
        at = jnp.where(rows > 0, used_n[rank], slots)
        slot_nS = slot_nS.at[rank, at].set(expert, mode="drop")
        moved_En = moved_En.at[expert, rank].add(rows)
        used_n = used_n.at[rank].add((rows > 0).astype(jnp.int32))
    return Clones(moved_En, slot_nS)


def _fill_whole(spill_E, free_n):
    """Each rank's expert and rows, where the expert's spill fills the rank's whole room; free_n falls."""
    order_E = jnp.argsort(-spill_E, stable=True).astype(jnp.int32)
    ends_E, ends_n = jnp.cumsum(spill_E[order_E]), jnp.cumsum(free_n)
    starts_n = ends_n - free_n
    nth_n = jnp.minimum((ends_E[None] <= starts_n[:, None]).sum(axis=1), spill_E.shape[0] - 1)
    return order_E[nth_n], jnp.where(ends_n <= ends_E[nth_n], free_n, 0)


def _match(spill_E, free_n):
    """Each rank's expert and rows: the largest spill to the roomiest rank, and so on; free_n falls."""
    largest_n = jnp.argsort(-spill_E, stable=True).astype(jnp.int32)[: free_n.shape[0]]
    return largest_n, jnp.minimum(spill_E[largest_n], free_n)


def split_pairs(experts_Tk, counts_nE, clones: Clones, me):
    """Sends this source's share of each cloned expert's pairs to the clones: physical numbers, rank (e + S) + place.

    Shares are proportional to what a source has of the expert and sum up exactly; of a source's pairs in their order, the
    first go to clones, rank by rank. A pair whose expert lies outside [0, E) gets n (e + S), nobody.

    Args: counts_nE int32, pairs of every source; me, this source's row of it.
    """
    num_ranks, num_experts = counts_nE.shape
    num_local, slots = num_experts // num_ranks, clones.slot_nS.shape[1]
    flat_P = experts_Tk.reshape(-1)
    real_P = is_expert(flat_P, num_experts)
    expert_P = jnp.where(real_P, flat_P, 0)
    ends_En = jnp.cumsum(shares(counts_nE, clones, me), axis=1)[:, :num_ranks]
    place_P = places_among_equals(jnp.where(real_P, flat_P, num_experts), num_experts)
    rank_P = (place_P[:, None] >= ends_En[expert_P]).sum(axis=1)  # n: stays at home
    at_P = num_local + jnp.argmax(clones.slot_nS[jnp.minimum(rank_P, num_ranks - 1)] == expert_P[:, None], axis=1)
    home_P = expert_P // num_local * (num_local + slots) + expert_P % num_local
    physical_P = jnp.where(rank_P < num_ranks, rank_P * (num_local + slots) + at_P, home_P)
    physical_P = jnp.where(real_P, physical_P, num_ranks * (num_local + slots))
    return physical_P.astype(jnp.int32).reshape(experts_Tk.shape)


def shares(counts_nE, clones: Clones, me):
    """Pairs that source `me` sends to each clone and home: int32 [E, n + 1], home last."""
    tokens_E = counts_nE.sum(axis=0)
    parts_Em = jnp.concatenate([clones.moved_En, (tokens_E - clones.moved_En.sum(axis=1))[:, None]], axis=1)
    # Proportional in float32, rounded down by a little, since int32 products overflow; the rest is dealt in order.
    factor_Em = parts_Em / jnp.maximum(tokens_E, 1)[:, None] * (1 - 2.0**-20)
    base_nEm = jnp.floor(counts_nE[:, :, None] * factor_Em[None]).astype(jnp.int32)
    left_nE, left_Em = counts_nE - base_nEm.sum(axis=2), parts_Em - base_nEm.sum(axis=0)
    source_end, part_end = jnp.cumsum(left_nE, axis=0), jnp.cumsum(left_Em, axis=1)
    overlap = jnp.minimum(source_end[me][:, None], part_end) - jnp.maximum(
        (source_end - left_nE)[me][:, None], part_end - left_Em
    )
    return base_nEm[me] + jnp.maximum(overlap, 0)


def fold_back(physical_Tk, slot_nS, num_local: int):
    """The experts behind physical numbers; E for nobody."""
    num_ranks, slots = slot_nS.shape
    rank_Tk, at_Tk = jnp.divmod(physical_Tk, num_local + slots)
    nobody = rank_Tk >= num_ranks
    rank_Tk = jnp.minimum(rank_Tk, num_ranks - 1)
    cloned_Tk = slot_nS[rank_Tk, jnp.clip(at_Tk - num_local, 0, slots - 1)]
    expert_Tk = jnp.where(at_Tk < num_local, rank_Tk * num_local + at_Tk, cloned_Tk)
    return jnp.where(nobody, num_ranks * num_local, expert_Tk)


def fetch_weights(weights_eX, slot_nS, hot_per_home: int, ep: Axes):
    """Weights of the experts in this rank's slots, [S, ...]; zero in an empty slot.

    Two static all-to-alls: rank j first gets chunk j of every rank's hot experts, then hands chunks on to those that hold
    clones. No rank sends more than another, however many clones an expert has; the transpose brings the clones' gradients
    home and sums them on the way. An expert's number of weights must divide by the number of ranks.
    """
    num_local, num_ranks, slots = weights_eX.shape[0], *slot_nS.shape
    size, me = weights_eX[0].size, collectives.axis_index(ep)
    if size % num_ranks:
        raise ValueError(f"an expert's {size} weights don't divide into chunks for {num_ranks} ranks")
    number_S = jnp.where(slot_nS >= 0, slot_nS, num_ranks * num_local).reshape(-1)
    zeros = vary(jnp.zeros((num_ranks * num_local + 1,), jnp.int32), varying(slot_nS))
    cloned_ne = zeros.at[number_S].set(1)[:-1].reshape(num_ranks, num_local)
    nth_ne = jnp.cumsum(cloned_ne, axis=1) - 1  # an expert's place among the cloned ones of its rank
    wanted = (cloned_ne[me] > 0)[None] & (nth_ne[me][None] == jnp.arange(hot_per_home)[:, None])
    hot_H = jnp.where(wanted.any(axis=1), jnp.argmax(wanted, axis=1), -1)
    chunks = pick(weights_eX.reshape(num_local, size), hot_H).reshape(hot_per_home, num_ranks, -1)
    exchange = lambda x: collectives.all_to_all(x, ep, split_dim=0, concat_dim=0)
    chunks = exchange(chunks.swapaxes(0, 1)).reshape(num_ranks * hot_per_home, -1)  # chunk `me` of all hot experts
    place_nS = slot_nS // num_local * hot_per_home + nth_ne.reshape(-1)[jnp.maximum(slot_nS, 0)]
    handed = pick(chunks, jnp.where(slot_nS >= 0, place_nS, -1).reshape(-1)).reshape(num_ranks, slots, -1)
    return exchange(handed).swapaxes(0, 1).reshape(slots, *weights_eX.shape[1:])


def fetch_in_float8(weights_eKN, slot_nS, hot_per_home: int, ep: Axes):
    """`fetch_weights` with half the bytes: codes (E4M3) with a scale for each 128 x 128 block, values rounded to them.

    Gradients come home as they are, as if nothing had been rounded. K and N must be multiples of 128.
    """
    axes = varying(weights_eKN, slot_nS)
    return _fetched_in_float8(vary(weights_eKN, axes), vary(slot_nS, axes), hot_per_home, ep)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _fetched_in_float8(weights_eKN, slot_nS, hot_per_home, ep):
    codes, scales, _ = quantize(weights_eKN, "e4m3_128x128")
    bits = jax.lax.bitcast_convert_type(codes, jnp.uint8)
    codes = jax.lax.bitcast_convert_type(fetch_weights(bits, slot_nS, hot_per_home, ep), codes.dtype)
    shape, missing = scales.shape[1:], -scales[0].size % slot_nS.shape[0]  # chunks are equal for all ranks
    flat = jnp.pad(scales.reshape(scales.shape[0], -1), ((0, 0), (0, missing)))
    scales = fetch_weights(flat, slot_nS, hot_per_home, ep)[:, : flat.shape[1] - missing].reshape(-1, *shape)
    return dequantize(Quantised(codes, scales), weights_eKN.dtype)


def _float8_fwd(weights_eKN, slot_nS, hot_per_home, ep):
    return _fetched_in_float8(weights_eKN, slot_nS, hot_per_home, ep), (jnp.zeros_like(weights_eKN), slot_nS)


def _float8_bwd(hot_per_home, ep, kept, g_SKN):
    like_eKN, slot_nS = kept
    _, home = jax.vjp(lambda w: fetch_weights(w, slot_nS, hot_per_home, ep), like_eKN)
    return home(g_SKN)[0], None


_fetched_in_float8.defvjp(_float8_fwd, _float8_bwd)


def pick(x_ND, index_M):
    """Rows by index, zero for -1. The transpose is a product with ones and zeros: a fixed order of sums, no atomics."""
    axes = varying(x_ND, index_M)
    return _pick(vary(x_ND, axes), vary(index_M, axes))


@jax.custom_vjp
def _pick(x_ND, index_M):
    return jnp.where((index_M >= 0)[:, None], x_ND[jnp.maximum(index_M, 0)], 0)


def _pick_fwd(x_ND, index_M):
    return _pick(x_ND, index_M), (index_M, jnp.zeros((x_ND.shape[0], 0)))


def _pick_bwd(kept, g_MD):
    index_M, like = kept
    ones_NM = (jnp.arange(like.shape[0])[:, None] == index_M[None]).astype(g_MD.dtype)
    return jnp.dot(ones_NM, g_MD, preferred_element_type=jnp.float32).astype(g_MD.dtype), None


_pick.defvjp(_pick_fwd, _pick_bwd)
