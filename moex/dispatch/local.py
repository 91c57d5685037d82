"""The transport of one device: all experts are here, so rows are sorted and nothing travels.

Letters and contract: `moex.dispatch.plan`. The other transports end in this one.
"""

import jax.numpy as jnp
from jax import lax

from mesh.axes import Axes
from mesh.vma import vary, varying
from moex.dispatch.budget import Budget
from moex.dispatch.move import invert, move
from moex.dispatch.plan import Rows


def plan(experts_Tk, num_experts: int, budget: Budget, ep: Axes = (), *, order_P=None) -> Rows:
    """Sorts pairs by expert, then by `order_P` (int32 [T k]) or else by token and choice.

    Raises ValueError when experts are split over devices.
    """
    if ep:
        raise ValueError(f"transport local holds all experts on every device, but ep runs over {ep}")
    num_tokens, top_k = experts_Tk.shape
    pairs, rows, align = num_tokens * top_k, budget.rows, budget.align
    expert_P = experts_Tk.reshape(-1)
    expert_P = jnp.where((expert_P >= 0) & (expert_P < num_experts), expert_P, num_experts)
    numbers_P = jnp.arange(pairs, dtype=jnp.int32)
    keys = (expert_P,) if order_P is None else (expert_P, order_P)
    at_P = lax.sort((*keys, vary(numbers_P, varying(*keys))), num_keys=len(keys), is_stable=True)[-1]
    zeros = vary(jnp.zeros((num_experts + 1,), jnp.int32), varying(expert_P))
    counts_e = zeros.at[expert_P].add(1)[:num_experts]
    sizes_e = jnp.full_like(counts_e, budget.expert_rows) if budget.expert_rows else -(-counts_e // align) * align
    sorted_P = expert_P[at_P]
    first_row_e, first_pair_e = jnp.cumsum(sizes_e) - sizes_e, jnp.cumsum(counts_e) - counts_e
    known_P = jnp.minimum(sorted_P, num_experts - 1)
    place_P = numbers_P - first_pair_e[known_P]
    row_P = first_row_e[known_P] + place_P
    wanted_P = sorted_P < num_experts
    fits_P = wanted_P & (row_P < rows) & (place_P < sizes_e[known_P])
    empty = vary(jnp.full((rows,), -1, jnp.int32), varying(expert_P))
    pair_of_row_R = empty.at[jnp.where(fits_P, row_P, rows)].set(at_P, mode="drop", unique_indices=True)
    return Rows(
        token_of_row_R=jnp.where(pair_of_row_R >= 0, pair_of_row_R // top_k, -1),
        pair_of_row_R=pair_of_row_R,
        row_of_pair_Tk=invert(pair_of_row_R, pairs).reshape(num_tokens, top_k),
        counts_e=counts_e,
        sizes_e=jnp.clip(rows - first_row_e, 0, sizes_e),  # what overflows is cut off, so sizes stay inside the buffer
        overflow=(wanted_P & ~fits_P).sum(dtype=jnp.int32),
        rows_needed=(-(-counts_e // align) * align).sum(dtype=jnp.int32),
    )


def send(x_TD, plan: Rows, ep: Axes = ()):
    """[T, D] -> [R, D] rows for the experts."""
    return move(x_TD, plan.token_of_row_R[:, None], plan.row_of_pair_Tk)


def send_pairs(weights_Tk, plan: Rows, ep: Axes = ()):
    """[T, k] -> [R]: each row's own number, zero in pad rows."""
    return move(weights_Tk.reshape(-1, 1), plan.pair_of_row_R[:, None], plan.row_of_pair_Tk.reshape(-1, 1))[:, 0]


def combine(rows_RD, plan: Rows, ep: Axes = ()):
    """[R, D] -> [T, D]: the sum of each token's rows in the order of its choices."""
    return move(rows_RD, plan.row_of_pair_Tk, plan.token_of_row_R[:, None])


def local_experts(experts_Tk, sent: Rows, num_local: int):
    """What tells a receiver whom a row is for: 1 + the expert's number on its own rank, 0 in an empty row.  int32 [R, 1]."""
    pair_R = sent.pair_of_row_R
    number_R = experts_Tk.reshape(-1)[jnp.maximum(pair_R, 0)] % num_local + 1
    return jnp.where(pair_R >= 0, number_R, 0)[:, None]
