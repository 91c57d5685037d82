"""Ways for rows to reach their experts and come back: one contract (`plan.py`), several transports.

The functions here are what a layer calls. They also own expert tensor parallelism: tokens of an etp group are gathered
before they are dispatched, each rank computes its part of the experts' width, and the parts are summed and scattered back.
"""

import dataclasses
from types import ModuleType

import jax.numpy as jnp

from mesh import collectives
from mesh.fold import Fold
from moex.dispatch import allgather, alltoall, local, ragged
from moex.dispatch.budget import Budget, budget, within_capacity, worst_case
from moex.dispatch.plan import Need, Plan, Routes, Rows

__all__ = [
    "TRANSPORTS",
    "Budget",
    "Need",
    "Plan",
    "budget",
    "combine",
    "first_hop",
    "onward",
    "plan",
    "relative_need",
    "send",
    "send_pairs",
    "sizes",
    "unavailable",
    "within_capacity",
    "worst_case",
]

TRANSPORTS: dict[str, ModuleType] = {"local": local, "allgather": allgather, "alltoall": alltoall, "ragged": ragged}

_ROW_MULTIPLE, _MANY_ROWS = 128, 1024
"""Buffers with so many rows have a multiple of what GPU kernels read at a time, so that none need copy them to pad them."""


def unavailable(transport: str, platform: str) -> str:
    """Why a transport doesn't run on a platform (cpu, gpu); "" where it does."""
    if transport == "ragged" and platform == "cpu":
        return "XLA has no ragged all-to-all on CPUs"
    return ""


def sizes(
    num_tokens: int, top_k: int, num_experts: int, fold: Fold, *,
    cell_factor: float = 0.0, spill_factor: float = 0.0, row_factor: float = 0.0, align: int = 1,
    capacity: int = 0, pad: bool = False,
) -> Budget:  # fmt: skip
    """Buffer sizes for this device's tokens.

    cell_factor, spill_factor, row_factor, align: see `moex.dispatch.budget.budget`.  capacity: most rows that an expert
    gets from the rows of a batch that one data-parallel rank has; 0 when there is no such limit.  pad: give it that many.
    """
    if capacity < 0 or (pad and not capacity):
        raise ValueError(f"capacity={capacity} must be above 0 to pad to it, and not negative")
    ep, etp = fold.expert.ep, fold.expert.etp
    ranks = fold.size(ep)
    found = budget(
        num_tokens * fold.size(etp), top_k, ranks, num_experts // ranks,
        cell_factor=cell_factor, spill_factor=spill_factor, row_factor=row_factor, align=align,
    )  # fmt: skip
    if found.rows >= _MANY_ROWS and not pad:
        found = dataclasses.replace(found, rows=-(-found.rows // _ROW_MULTIPLE) * _ROW_MULTIPLE)
    if not capacity:
        return found
    # Ranks of the context and tensor axes hold parts of the same rows, which have one capacity together.
    row_sets = lambda axes: fold.size(tuple(a for a in axes if a in fold.dense.dp))
    cell, whole = capacity * row_sets(etp), capacity * row_sets(ep + etp)
    return within_capacity(found, num_experts // ranks, cell, whole, pad=pad)


def plan(transport: str, experts_Tk, num_experts: int, fold: Fold, **options) -> Plan:
    """Plans one dispatch: chosen experts of this device's tokens (int32 [T, k]) -> index maps.  options: see `sizes`."""
    if transport not in TRANSPORTS:
        raise ValueError(f"transport={transport!r} must be one of {tuple(TRANSPORTS)}")
    num_tokens, top_k = experts_Tk.shape
    found = sizes(num_tokens, top_k, num_experts, fold, **options)
    experts_Tk = collectives.all_gather(experts_Tk, fold.expert.etp, dim=0)
    return TRANSPORTS[transport].plan(experts_Tk, num_experts, found, fold.expert.ep)


def relative_need(plan: Plan, num_pairs: int, fold: Fold):
    """`Need` of this device in the units of the factors of `plan`, float32 [3]: so many times those of balanced routing.

    num_pairs: this device's (token, choice) pairs, before expert tensor parallelism gathers them.
    """
    pairs = num_pairs * fold.size(fold.expert.etp)
    units = jnp.array([pairs / fold.size(fold.expert.ep), pairs, pairs], jnp.float32)
    return jnp.stack(plan.need).astype(jnp.float32) / units


def send(transport: str, x_TD, plan: Plan, fold: Fold):
    """Token rows [T, D] -> rows [R, D] of this device's experts."""
    x_TD = collectives.all_gather(x_TD, fold.expert.etp, dim=0)
    return TRANSPORTS[transport].send(x_TD, plan, fold.expert.ep)


def first_hop(transport: str, plan: Plan, fold: Fold) -> Rows | None:
    """Where `send` copies this device's rows to before any of them travels; None where whole tokens travel first."""
    if fold.size(fold.expert.etp) > 1 or transport == "allgather":
        return None
    return plan.sent if isinstance(plan, Routes) else plan if isinstance(plan, Rows) else None


def onward(transport: str, rows, plan: Plan, fold: Fold):
    """The rest of `send`, for rows that stand as `first_hop` says."""
    return rows if transport == "local" else TRANSPORTS[transport].onward(rows, plan, fold.expert.ep)


def send_pairs(transport: str, weights_Tk, plan: Plan, fold: Fold):
    """Router weights [T, k] -> one number [R] a row."""
    weights_Tk = collectives.all_gather(weights_Tk, fold.expert.etp, dim=0)
    return TRANSPORTS[transport].send_pairs(weights_Tk, plan, fold.expert.ep)


def combine(transport: str, rows_RD, plan: Plan, fold: Fold):
    """Results [R, D], of this device's part of the experts' width -> sums [T, D] of each token's k results."""
    y_TD = TRANSPORTS[transport].combine(rows_RD, plan, fold.expert.ep)
    return collectives.psum_scatter(y_TD, fold.expert.etp, dim=0)
