"""The transport that shows every token to every rank: all-gather, pick what is mine, reduce-scatter the results.

Letters and contract: `moex.dispatch.plan`; n ranks. Wire: n - 1 rows a token each way, whatever k is, so it pays for few
ranks or many experts a token. A token's results are summed by the reduce-scatter, not in the order of its choices.
"""

import jax.numpy as jnp

from mesh import collectives
from mesh.axes import Axes
from moex.dispatch import local
from moex.dispatch.budget import Budget
from moex.dispatch.plan import Rows


def plan(experts_Tk, num_experts: int, budget: Budget, ep: Axes) -> Rows:
    """Rows of all ranks' tokens [n T] that this rank's experts take."""
    num_local = num_experts // collectives.axis_size(ep)
    experts_Tk = jnp.where((experts_Tk >= 0) & (experts_Tk < num_experts), experts_Tk, num_experts)
    everyone = collectives.all_gather(experts_Tk, ep, dim=0)
    return local.plan(everyone - collectives.axis_index(ep) * num_local, num_local, budget)


def send(x_TD, plan: Rows, ep: Axes):
    return local.send(collectives.all_gather(x_TD, ep, dim=0), plan)


def send_pairs(weights_Tk, plan: Rows, ep: Axes):
    return local.send_pairs(collectives.all_gather(weights_Tk, ep, dim=0), plan)


def combine(rows_RD, plan: Rows, ep: Axes):
    return collectives.psum_scatter(local.combine(rows_RD, plan), ep, dim=0)
