"""How evenly experts are used: losses, biases, quantiles, Sinkhorn's iteration, capacities, forced loads.

Everything is float32 whatever comes in, counts are int32. A result that was summed over mesh axes is equal on their
devices, and all of them are the same on every mesh.
"""

from moex.balance.bias import centred, quantile_offsets, update_bias, update_quantile_bias
from moex.balance.capacity import apply_capacity, capacity_of, capacity_slots, keep_within_rows
from moex.balance.losses import balance_loss, plain_counts, sequence_balance_loss, z_loss
from moex.balance.noise import forced_logits, jitter, token_numbers
from moex.balance.scores import Routing, expert_counts, is_expert, normalised, places_among_equals, scores
from moex.balance.sinkhorn import sinkhorn

__all__ = [
    "Routing",
    "apply_capacity",
    "balance_loss",
    "capacity_of",
    "capacity_slots",
    "centred",
    "expert_counts",
    "forced_logits",
    "is_expert",
    "jitter",
    "keep_within_rows",
    "normalised",
    "places_among_equals",
    "plain_counts",
    "quantile_offsets",
    "scores",
    "sequence_balance_loss",
    "sinkhorn",
    "token_numbers",
    "update_bias",
    "update_quantile_bias",
    "z_loss",
]
