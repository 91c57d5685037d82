"""The transport of exact sizes: `lax.ragged_all_to_all` there and back. GPUs only.

Letters and contract: `moex.dispatch.plan`; n ranks, P = T k pairs of this device, Q slots of its receive buffer. Received
rows lie in the order of their sources, so a stable sort by expert gives the canonical order. XLA runs it synchronously,
and on several hosts it may read the sizes on the host: `alltoall` is the transport of record, this one a convenience.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mesh import collectives
from mesh.axes import Axes
from mesh.vma import vary, varying
from moex.dispatch import local
from moex.dispatch.budget import Budget
from moex.dispatch.plan import Routes


class Sizes(NamedTuple):
    """Of one exchange, int32 [n] each: where my rows for a peer start and how many they are; where they start in the
    peer's buffer; how many come from it; and, for the way back, where its rows start here and started there.
    """

    send_from: jax.Array
    send_rows: jax.Array
    to_peer_at: jax.Array
    receive_rows: jax.Array
    received_at: jax.Array
    peer_sent_from: jax.Array


def plan(experts_Tk, num_experts: int, budget: Budget, ep: Axes) -> Routes:
    """Sizes of every pair of ranks, known to all; rows past a peer's buffer aren't sent and count as overflow."""
    num_ranks, me = collectives.axis_size(ep), collectives.axis_index(ep)
    num_local, num_pairs = num_experts // num_ranks, experts_Tk.size
    pairs = local.plan(experts_Tk // num_local, num_ranks, Budget(cell_rows=0, rows=num_pairs, align=1))
    wanted_nn = collectives.all_gather(pairs.counts_e[None], ep, dim=0)
    ends_nn = jnp.minimum(jnp.cumsum(wanted_nn, axis=0), budget.rows)
    at_nn = jnp.minimum(jnp.cumsum(wanted_nn, axis=0) - wanted_nn, budget.rows)
    rows_nn = ends_nn - at_nn
    from_nn = jnp.cumsum(wanted_nn, axis=1) - wanted_nn
    sizes = Sizes(from_nn[me], rows_nn[me], at_nn[me], rows_nn[:, me], at_nn[:, me], from_nn[:, me])
    arrived = _there(local.local_experts(experts_Tk, pairs, num_local), sizes, budget.rows, ep) - 1
    overflow = (wanted_nn - rows_nn)[me].sum(dtype=jnp.int32)
    received = local.plan(arrived, num_local, budget)
    return Routes(pairs, received, overflow, received.need, sizes)


def send(x_TD, plan: Routes, ep: Axes):
    return onward(local.send(x_TD, plan.sent), plan, ep)


def onward(rows_SD, plan: Routes, ep: Axes):
    return local.send(_exchange(rows_SD, plan.extra, _slots(plan), ep), plan.received)


def send_pairs(weights_Tk, plan: Routes, ep: Axes):
    rows_P1 = local.send_pairs(weights_Tk, plan.sent)[:, None]
    return local.send_pairs(_exchange(rows_P1, plan.extra, _slots(plan), ep), plan.received)


def combine(rows_RD, plan: Routes, ep: Axes):
    num_pairs = plan.sent.pair_of_row_R.shape[0]
    back = _exchange(local.combine(rows_RD, plan.received), _reverse(plan.extra), num_pairs, ep)
    return local.combine(back, plan.sent)


def _slots(plan: Routes) -> int:
    return plan.received.row_of_pair_Tk.shape[0]


def _reverse(sizes: Sizes) -> Sizes:
    return Sizes(
        send_from=sizes.received_at,
        send_rows=sizes.receive_rows,
        to_peer_at=sizes.peer_sent_from,
        receive_rows=sizes.send_rows,
        received_at=sizes.send_from,
        peer_sent_from=sizes.to_peer_at,
    )


def _exchange(x, sizes: Sizes, num_slots: int, ep: Axes):
    """Rows to their peers; the transpose is the same exchange with the two ends swapped."""
    axes = varying(x, *sizes)
    return _both_ways(vary(x, axes), Sizes(*(vary(s, axes) for s in sizes)), num_slots, ep)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _both_ways(x, sizes: Sizes, num_slots: int, ep: Axes):
    return _there(x, sizes, num_slots, ep)


def _fwd(x, sizes, num_slots, ep):
    return _there(x, sizes, num_slots, ep), (sizes, jnp.zeros((x.shape[0], 0)))


def _bwd(num_slots, ep, kept, g):
    sizes, like = kept
    return _there(g, _reverse(sizes), like.shape[0], ep), None


_both_ways.defvjp(_fwd, _bwd)


def _there(x, sizes: Sizes, num_slots: int, ep: Axes):
    out = vary(jnp.zeros((num_slots, *x.shape[1:]), x.dtype), varying(x, *sizes))
    return lax.ragged_all_to_all(
        x, out, sizes.send_from, sizes.send_rows, sizes.to_peer_at, sizes.receive_rows, axis_name=ep
    )
