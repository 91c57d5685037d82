"""Dropping by capacity: an expert takes so many rows of a sequence and no more.

T tokens of one group (a sequence), E experts, k experts a token, C rows an expert takes. A choice that is dropped becomes
expert E, which is nobody, with weight 0; the others keep their weights (no renormalisation), as in Megatron-Core.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from mesh import collectives
from mesh.axes import Axes
from moex.balance.scores import Routing, is_expert, places_among_equals
from moex.config import RouterConfig


def capacity_of(num_tokens: int, config: RouterConfig) -> int:
    """Rows that an expert takes of `num_tokens`: ceil(T k / E x factor), at most T."""
    rows = num_tokens * config.top_k / config.num_experts * config.capacity_factor
    return math.ceil(rows) if rows < num_tokens else num_tokens


def apply_capacity(experts_Tk, weights_Tk, counts_E, capacity: int, policy: str, *, order_T=None) -> Routing:
    """Keeps at most `capacity` tokens of each expert (arXiv 2006.16668 for the position rule).

    Args:
      experts_Tk: int32 choices of one group; a number outside [0, E) is no choice.
      weights_Tk: float32, decide by policy `probability`; equal ones keep the earlier token.
      counts_E: int32, how many tokens chose each expert.
      policy: `probability` keeps the highest weights, `position` the first tokens.
      order_T: int32 place of each token in the group; their order in the array otherwise.

    Raises ValueError for another policy.
    """
    num_experts = counts_E.shape[0]
    rank_Tk = _ranks(experts_Tk, weights_Tk, num_experts, policy, order_T)
    kept_Tk = (rank_Tk < capacity) & is_expert(experts_Tk, num_experts)
    return Routing(
        experts_Tk=jnp.where(kept_Tk, experts_Tk, num_experts),
        weights_Tk=jnp.where(kept_Tk, weights_Tk, 0.0),
        counts_E=jnp.minimum(counts_E, capacity),
    )


def capacity_slots(experts_Tk, weights_Tk, num_experts: int, capacity: int, policy: str):
    """The padded form: exactly C slots an expert.

    Returns: (token of each slot int32 [E, C], -1 where no token came; its weight float32 [E, C], 0 there), in the order
    in which the policy ranks tokens.
    """
    rank_Tk = _ranks(experts_Tk, weights_Tk, num_experts, policy, None)
    top_k = experts_Tk.shape[1]
    kept_P = ((rank_Tk < capacity) & is_expert(experts_Tk, num_experts)).reshape(-1)
    slot_P = jnp.where(kept_P, experts_Tk.reshape(-1) * capacity + rank_Tk.reshape(-1), num_experts * capacity)
    place = lambda values_P, empty: jnp.full((num_experts * capacity,), empty).at[slot_P].set(values_P, mode="drop")
    token_P = jnp.arange(experts_Tk.size, dtype=jnp.int32) // top_k
    tokens, weights = place(token_P, jnp.int32(-1)), place(weights_Tk.reshape(-1), jnp.float32(0))
    return tokens.reshape(num_experts, capacity), weights.reshape(num_experts, capacity)


def _ranks(experts_Tk, weights_Tk, num_experts: int, policy: str, order_T):
    """Place of each choice among those of its expert, int32 [T, k]."""
    if policy not in ("probability", "position"):
        raise ValueError(f"capacity policy {policy!r} must be probability or position")
    num_tokens, top_k = experts_Tk.shape
    order_T = jnp.arange(num_tokens, dtype=jnp.int32) if order_T is None else order_T
    expert_P = jnp.where(is_expert(experts_Tk, num_experts), experts_Tk, num_experts).reshape(-1)
    order_P = jnp.repeat(order_T, top_k, total_repeat_length=num_tokens * top_k)
    worth_P = -lax.stop_gradient(weights_Tk).reshape(-1).astype(jnp.float32)
    keys = (worth_P, order_P) if policy == "probability" else (order_P,)
    return places_among_equals(expert_P, num_experts, *keys).reshape(num_tokens, top_k)


def keep_within_rows(experts_BSk, weights_BSk, index_BS, config: RouterConfig, *, axes: Axes = ()):
    """`apply_capacity` of each row of a batch, on this device's part of them.

    Args:
      experts_BSk: int32, `num_experts` where a token is padding.  index_BS: place in the row.
      axes: mesh axes that a row is split over, outer to inner; only choices and weights are gathered over them.

    Returns: (experts_BSk, weights_BSk) after dropping, of this device's part. A row drops the same tokens on every mesh.
    """
    seq_here = experts_BSk.shape[1]
    full = lambda x: collectives.all_gather(x, axes, dim=1)
    all_BSk, worth_BSk, order_BS = full(experts_BSk), full(lax.stop_gradient(weights_BSk)), full(index_BS)
    capacity = capacity_of(all_BSk.shape[1], config)
    none_E = jnp.zeros((config.num_experts,), jnp.int32)
    keep = lambda e, w, o: apply_capacity(e, w, none_E, capacity, config.capacity_policy, order_T=o).experts_Tk
    kept_BSk = jax.vmap(keep)(all_BSk, worth_BSk, order_BS)
    start = collectives.axis_index(axes) * seq_here
    kept_BSk = lax.dynamic_slice_in_dim(kept_BSk, start, seq_here, axis=1)
    return kept_BSk, jnp.where(kept_BSk < config.num_experts, weights_BSk, 0.0)
