"""`send` and `combine` in parts, cut where rows travel, so that something else can run beside the journey.

    send = arrive . travel . depart        combine = land . travel_home . leave

bit for bit; only `travel` and `travel_home` communicate (and `depart` and `land` over etp). Letters: `moex.dispatch.plan`.
"""

from mesh import collectives
from mesh.fold import Fold
from moex.dispatch import alltoall, local
from moex.dispatch.plan import Plan, Routes, Rows

IN_LEGS = ("allgather", "alltoall")
"""Transports that have these parts: those that communicate, in sizes that the host needn't know."""


def depart(x_TD, plan: Plan, fold: Fold):
    """Token rows [T, D] -> what this device sends."""
    x_TD = collectives.all_gather(x_TD, fold.expert.etp, dim=0)
    return local.send(x_TD, plan.sent) if isinstance(plan, Routes) else x_TD


def travel(rows, plan: Plan, fold: Fold):
    """What this device sends -> what it gets."""
    if isinstance(plan, Routes):
        return alltoall.there(rows, plan, fold.expert.ep)
    return collectives.all_gather(rows, fold.expert.ep, dim=0)


def arrive(rows, plan: Plan):
    """What this device got -> rows [R, D] of its experts."""
    return local.send(rows, _received(plan))


def leave(rows_RD, plan: Plan):
    """Results [R, D] -> what goes back."""
    return local.combine(rows_RD, _received(plan))


def travel_home(rows, plan: Plan, fold: Fold):
    """The way back."""
    if isinstance(plan, Routes):
        return alltoall.back(rows, plan, fold.expert.ep)
    return collectives.psum_scatter(rows, fold.expert.ep, dim=0)


def land(rows, plan: Plan, fold: Fold):
    """What came back -> sums [T, D] of each token's k results."""
    y_TD = local.combine(rows, plan.sent) if isinstance(plan, Routes) else rows
    return collectives.psum_scatter(y_TD, fold.expert.etp, dim=0)


def _received(plan: Plan) -> Rows:
    received = plan.received if isinstance(plan, Routes) else plan
    assert isinstance(received, Rows), "a plan of one of IN_LEGS"
    return received
