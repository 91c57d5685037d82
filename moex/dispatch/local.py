"""The transport of one device: all experts are here, so rows are sorted and nothing travels.

Letters and contract: `moex.dispatch.plan`. Cannot overflow: the buffer holds every pair plus each expert's padding.
"""

import jax.numpy as jnp

from mesh.vma import vary, varying
from moex.dispatch.move import invert, move
from moex.dispatch.plan import Plan


def num_rows(num_pairs: int, num_experts: int, align: int) -> int:
    """R: rows that hold `num_pairs` pairs whatever the routing, each expert's start a multiple of `align`."""
    padding = min(num_experts, num_pairs) * (align - 1)
    return -(-(num_pairs + padding) // align) * align


def plan(experts_Tk, num_experts: int, *, align: int = 1) -> Plan:
    """Sorts the pairs by expert, token and choice.

    Args: experts_Tk int32; an id outside [0, num_experts) goes nowhere.  align: of each expert's first row.
    """
    num_tokens, top_k = experts_Tk.shape
    pairs = num_tokens * top_k
    rows = num_rows(pairs, num_experts, align)
    expert_P = experts_Tk.reshape(-1)
    expert_P = jnp.where((expert_P >= 0) & (expert_P < num_experts), expert_P, num_experts)
    order_P = jnp.argsort(expert_P, stable=True).astype(jnp.int32)
    zeros = vary(jnp.zeros((num_experts + 1,), jnp.int32), varying(expert_P))
    counts_e = zeros.at[expert_P].add(1)[:num_experts]
    sizes_e = -(-counts_e // align) * align
    sorted_P = expert_P[order_P]
    first_row_e, first_pair_e = jnp.cumsum(sizes_e) - sizes_e, jnp.cumsum(counts_e) - counts_e
    known = jnp.minimum(sorted_P, num_experts - 1)
    row_P = first_row_e[known] + jnp.arange(pairs, dtype=jnp.int32) - first_pair_e[known]
    row_P = jnp.where(sorted_P < num_experts, row_P, -1)
    empty = vary(jnp.full((rows,), -1, jnp.int32), varying(expert_P))
    pair_of_row_R = empty.at[jnp.where(row_P >= 0, row_P, rows)].set(order_P, mode="drop", unique_indices=True)
    return Plan(
        token_of_row_R=jnp.where(pair_of_row_R >= 0, pair_of_row_R // top_k, -1),
        pair_of_row_R=pair_of_row_R,
        row_of_pair_Tk=invert(pair_of_row_R, pairs).reshape(num_tokens, top_k),
        counts_e=counts_e,
        sizes_e=sizes_e,
        overflow=jnp.zeros_like(counts_e[0]),
    )


def send(x_TD, plan: Plan):
    """[T, D] -> [R, D] rows for the experts."""
    return move(x_TD, plan.token_of_row_R[:, None], plan.row_of_pair_Tk)


def send_pairs(weights_Tk, plan: Plan):
    """[T, k] -> [R]: each row's own number, zero in pad rows."""
    return move(weights_Tk.reshape(-1, 1), plan.pair_of_row_R[:, None], plan.row_of_pair_Tk.reshape(-1, 1))[:, 0]


def combine(rows_RD, plan: Plan):
    """[R, D] -> [T, D]: the sum of each token's rows in the order of its choices."""
    return move(rows_RD, plan.row_of_pair_Tk, plan.token_of_row_R[:, None])
