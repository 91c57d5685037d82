"""The transport of static cells: one all-to-all there, one back, no size ever read by the host; and a spill beside it.

Letters and contract: `moex.dispatch.plan`; n ranks, C rows of a cell, Q of a spill cell. Rank s sends rank d the pairs that
want d's experts in a cell of C rows, in the order (token, choice). What doesn't fit is dealt to all ranks in turn, a spill
cell each, and sent on from there: two more all-to-alls, after which uneven traffic between two ranks no longer matters,
only how much a rank gets in all. Rows carry where they come from, so experts see them in the canonical order however they
travelled, and bits don't depend on C and Q.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mesh import collectives
from mesh.axes import Axes
from moex.dispatch import local
from moex.dispatch.budget import Budget
from moex.dispatch.move import invert, move
from moex.dispatch.plan import Need, Routes, Rows


class Relay(NamedTuple):
    """What a rank does with others' spilled rows: the slot that each of its outgoing ones comes from, and the inverse."""

    from_slot: jax.Array
    to_slot: jax.Array


def plan(experts_Tk, num_experts: int, budget: Budget, ep: Axes) -> Routes:
    """Sorts pairs into cells, tells receivers which expert each slot is for and whence it came, and sorts what arrives."""
    num_ranks, me = collectives.axis_size(ep), collectives.axis_index(ep)
    num_local, num_pairs = num_experts // num_ranks, experts_Tk.size
    spill_cell = -(-budget.spill_rows // num_ranks)
    sent, need = _into_cells(experts_Tk // num_local, num_ranks, budget.cell_rows, spill_cell, me)
    expert_R1 = local.local_experts(experts_Tk, sent, num_local)
    cells = num_ranks * budget.cell_rows
    if not spill_cell:
        arrived = _exchange(expert_R1, ep) - 1  # an empty slot says -1: for nobody
        received = local.plan(arrived, num_local, budget)
        return Routes(sent, received, sent.overflow, need._replace(rows=received.need.rows))
    origin_R1 = jnp.where(expert_R1 > 0, me * num_pairs + sent.pair_of_row_R[:, None], 0)
    rank_R1 = jnp.where(expert_R1 > 0, _ranks_of(experts_Tk, sent, num_local), num_ranks)
    direct = _exchange(jnp.concatenate([expert_R1, origin_R1], axis=1)[:cells], ep)
    spilled = _exchange(jnp.concatenate([expert_R1, origin_R1, rank_R1], axis=1)[cells:], ep)
    relayed, relay_need = _into_cells(spilled[:, 2:], num_ranks, spill_cell, 0, me)
    relay = Relay(relayed.token_of_row_R, relayed.row_of_pair_Tk[:, 0])
    onward = jnp.where(relay.from_slot[:, None] >= 0, spilled[jnp.maximum(relay.from_slot, 0), :2], 0)
    arrived = jnp.concatenate([direct, _exchange(onward, ep)])
    received = local.plan(arrived[:, :1] - 1, num_local, budget, order_P=arrived[:, 1])
    need = Need(need.cell, jnp.maximum(need.spill, relay_need.cell * num_ranks), received.need.rows)
    return Routes(sent, received, sent.overflow + relayed.overflow, need, relay)


def send(x_TD, plan: Routes, ep: Axes):
    return onward(local.send(x_TD, plan.sent), plan, ep)


def onward(rows_SD, plan: Routes, ep: Axes):
    return local.send(there(rows_SD, plan, ep), plan.received)


def send_pairs(weights_Tk, plan: Routes, ep: Axes):
    return local.send_pairs(there(local.send_pairs(weights_Tk, plan.sent)[:, None], plan, ep), plan.received)


def combine(rows_RD, plan: Routes, ep: Axes):
    return local.combine(back(local.combine(rows_RD, plan.received), plan, ep), plan.sent)


def _exchange(x, ep: Axes):
    return collectives.all_to_all(x, ep, split_dim=0, concat_dim=0)


def there(x_RD, plan: Routes, ep: Axes):
    """Slots of this device -> slots that arrive, direct ones first."""
    if not plan.extra:
        return _exchange(x_RD, ep)
    cells, relay = _num_direct(plan), plan.extra
    handed = _exchange(x_RD[cells:], ep)
    onward = _exchange(move(handed, relay.from_slot[:, None], relay.to_slot[:, None]), ep)
    return jnp.concatenate([_exchange(x_RD[:cells], ep), onward])


def back(x_RD, plan: Routes, ep: Axes):
    """The same way back."""
    if not plan.extra:
        return _exchange(x_RD, ep)
    cells, relay = _num_direct(plan), plan.extra
    handed = move(_exchange(x_RD[cells:], ep), relay.to_slot[:, None], relay.from_slot[:, None])
    return jnp.concatenate([_exchange(x_RD[:cells], ep), _exchange(handed, ep)])


def _num_direct(plan: Routes) -> int:
    return plan.sent.pair_of_row_R.shape[0] - plan.extra.to_slot.shape[0]


def _ranks_of(experts_Tk, sent: Rows, num_local: int):
    return experts_Tk.reshape(-1)[jnp.maximum(sent.pair_of_row_R, 0)][:, None] // num_local


def _into_cells(rank_Tk, num_ranks: int, cell_rows: int, spill_cell: int, me) -> tuple[Rows, Need]:
    """Slots of pairs: a cell of `cell_rows` for each rank, then, for what overflows those, a spill cell for each rank.

    rank_Tk: the rank that each pair wants; one outside [0, n) wants none.
    """
    num_tokens, top_k = rank_Tk.shape
    sorted_ = local.plan(rank_Tk, num_ranks, Budget(cell_rows=0, rows=num_tokens * top_k, align=1))
    counts_n = sorted_.counts_e
    row_Tk, wanted_Tk = sorted_.row_of_pair_Tk, sorted_.row_of_pair_Tk >= 0
    rank_Tk = jnp.clip(rank_Tk, 0, num_ranks - 1)
    place_Tk = row_Tk - (jnp.cumsum(counts_n) - counts_n)[rank_Tk]
    excess_n = jnp.maximum(counts_n - cell_rows, 0)
    # What is over is dealt in the order of destinations, starting beside this rank, so that relays share it evenly.
    turn_Tk = (jnp.cumsum(excess_n) - excess_n)[rank_Tk] + place_Tk - cell_rows
    relay_Tk, at_Tk = (turn_Tk + me) % num_ranks, turn_Tk // num_ranks
    spilled_Tk = wanted_Tk & (place_Tk >= cell_rows)
    first = num_ranks * cell_rows
    slot_Tk = jnp.where(spilled_Tk, first + relay_Tk * spill_cell + at_Tk, rank_Tk * cell_rows + place_Tk)
    fits_Tk = wanted_Tk & ~(spilled_Tk & (at_Tk >= spill_cell))
    slot_Tk = jnp.where(fits_Tk, slot_Tk, -1)
    pair_R = invert(slot_Tk.reshape(-1), first + num_ranks * spill_cell)
    rows = Rows(
        token_of_row_R=jnp.where(pair_R >= 0, pair_R // top_k, -1),
        pair_of_row_R=pair_R,
        row_of_pair_Tk=slot_Tk,
        counts_e=counts_n,
        sizes_e=counts_n,
        overflow=(wanted_Tk & ~fits_Tk).sum(dtype=jnp.int32),
        rows_needed=jnp.int32(0),
    )
    return rows, Need(cell=counts_n.max(), spill=excess_n.sum(), rows=jnp.int32(0))
