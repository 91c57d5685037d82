"""Linear experts for tests of dispatch: what goes through them and back can be computed by hand."""

import jax.numpy as jnp

from mesh import Fold, collectives
from moex import dispatch


def through_linear_experts(transport: str, plan, num_experts: int, folded: Fold, x_TD, w_Tk, *, identity: bool = False):
    """Rows to their experts and back: (y, (rows, weights)).  Expert e multiplies by e + 1, or, as identity, by one.

    All results that stand in pad rows are NaN: what a kernel leaves there is nobody's business.
    """
    rows = dispatch.send(transport, x_TD, plan, folded)
    weights = dispatch.send_pairs(transport, w_Tk, plan, folded)
    num_local = num_experts // folded.size("ep")
    ends = jnp.cumsum(plan.sizes_e)
    row = jnp.arange(rows.shape[0])
    expert = (row[:, None] >= ends[None]).sum(axis=1)
    known = jnp.minimum(expert, num_local - 1)
    real = (expert < num_local) & (row - (ends - plan.sizes_e)[known] < plan.counts_e[known])
    factor = 1 if identity else collectives.axis_index(folded.expert.ep) * num_local + known + 1
    # Every etp rank computes a part of the experts' width, so the parts of a linear expert sum to the whole.
    out = rows * (weights * factor / folded.size("etp"))[:, None]
    return dispatch.combine(transport, jnp.where(real[:, None], out, jnp.nan), plan, folded), (rows, weights)
