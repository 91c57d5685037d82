"""The transport of static cells: one all-to-all there, one back, no size ever read by the host.

Letters and contract: `moex.dispatch.plan`; n ranks, C rows of a cell. Rank s sends rank d the pairs that want d's experts
in a cell of C rows, in the order (token, choice); what doesn't fit overflows. Received cells lie in the order of their
sources, so a stable sort by expert gives the canonical order.
"""

import jax
import jax.numpy as jnp

from mesh import collectives
from mesh.axes import Axes
from moex.dispatch import local
from moex.dispatch.budget import Budget
from moex.dispatch.plan import Routes, Rows


def plan(experts_Tk, num_experts: int, budget: Budget, ep: Axes) -> Routes:
    """Sorts pairs into cells, tells receivers which expert each slot is for, and sorts what arrives."""
    num_ranks = collectives.axis_size(ep)
    num_local = num_experts // num_ranks
    cells, overflow = _into_cells(experts_Tk, num_local, num_ranks, budget.cell_rows)
    arrived = _exchange(local.local_experts(experts_Tk, cells, num_local), ep) - 1  # an empty slot says -1: for nobody
    return Routes(cells, local.plan(arrived, num_local, budget), overflow)


def send(x_TD, plan: Routes, ep: Axes):
    return local.send(_exchange(local.send(x_TD, plan.sent), ep), plan.received)


def send_pairs(weights_Tk, plan: Routes, ep: Axes):
    return local.send_pairs(_exchange(local.send_pairs(weights_Tk, plan.sent)[:, None], ep), plan.received)


def combine(rows_RD, plan: Routes, ep: Axes):
    return local.combine(_exchange(local.combine(rows_RD, plan.received), ep), plan.sent)


def _exchange(x, ep: Axes):
    return collectives.all_to_all(x, ep, split_dim=0, concat_dim=0)


def _into_cells(experts_Tk, num_local: int, num_ranks: int, cell_rows: int) -> tuple[Rows, jax.Array]:
    """Pairs by destination rank, every cell starting at a multiple of `cell_rows`; and how many found no room."""
    num_tokens, top_k = experts_Tk.shape
    sorted_ = local.plan(experts_Tk // num_local, num_ranks, Budget(cell_rows=0, rows=num_tokens * top_k, align=1))
    first_n = jnp.cumsum(sorted_.counts_e) - sorted_.counts_e
    slot = jnp.arange(num_ranks * cell_rows, dtype=jnp.int32)
    place = slot % cell_rows
    rank = slot // cell_rows
    filled = place < sorted_.counts_e[rank]
    at = jnp.minimum(first_n[rank] + place, num_tokens * top_k - 1)
    pair_of_slot = jnp.where(filled, sorted_.pair_of_row_R[at], -1)
    row_Tk = sorted_.row_of_pair_Tk
    dest_Tk = jnp.clip(experts_Tk // num_local, 0, num_ranks - 1)
    place_Tk = row_Tk - first_n[dest_Tk]
    slot_of_pair_Tk = jnp.where((row_Tk >= 0) & (place_Tk < cell_rows), dest_Tk * cell_rows + place_Tk, -1)
    cells = sorted_._replace(
        token_of_row_R=jnp.where(pair_of_slot >= 0, pair_of_slot // top_k, -1),
        pair_of_row_R=pair_of_slot,
        row_of_pair_Tk=slot_of_pair_Tk,
    )
    return cells, jnp.maximum(sorted_.counts_e - cell_rows, 0).sum(dtype=jnp.int32)
