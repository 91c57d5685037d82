"""Token routing: which experts a token goes to, with what weight, and how evenly experts are used.

T tokens of this device, D model width, E experts, k experts a token, G groups. Everything is float32 whatever comes in,
counts are int32. `axes` are the mesh axes that the tokens of a micro-batch are split over (dp, cp, tp); a result that
was summed over them is equal on their devices.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from mesh import collectives
from mesh.axes import Axes
from moex.config import RouterConfig
from moex.layers.param import declare

_TINY = 1e-20  # keeps a row of sigmoid scores that are all zero from dividing by zero (as in Megatron-Core)


class Routing(NamedTuple):
    """experts_Tk int32, distinct in a row, best first; weights_Tk float32; counts_E int32, this device's real pairs."""

    experts_Tk: jax.Array
    weights_Tk: jax.Array
    counts_E: jax.Array


def route(logits_TE, bias_E, config: RouterConfig, *, mask_T=None, key=None, replay_Tk=None) -> Routing:
    """Picks experts by biased score and weighs them by the unbiased one (DeepSeek-V3, arXiv 2412.19437 eq. 16).

    Args:
      logits_TE: router outputs, any float dtype.
      bias_E: float32 added to the scores for picking only, without gradient; None for no bias.
      mask_T: True for real tokens; others still get experts and weights, but aren't counted.
      key: reserved for routing noise; no rule here draws any, so passing one is an error.
      replay_Tk: experts to use in place of picking (a recorded choice); weights are computed for them.

    Ties go to the lower expert number. Raises ValueError when the numbers of experts, groups and k don't fit.
    """
    num_tokens, num_experts = logits_TE.shape
    check_router(config)
    if num_experts != config.num_experts:
        raise ValueError(
            f"logits are of {num_experts} experts, the configuration says num_experts={config.num_experts}"
        )
    if key is not None:
        raise ValueError("route was given a key, but this router draws no noise")
    logits_TE = logits_TE.astype(jnp.float32)
    scores_TE = scores(logits_TE, config)
    if replay_Tk is None:
        choice_TE = lax.stop_gradient(scores_TE)
        if bias_E is not None:
            choice_TE += lax.stop_gradient(bias_E.astype(jnp.float32))[None]
        experts_Tk = lax.top_k(_within_groups(choice_TE, config), config.top_k)[1]
    else:
        experts_Tk = replay_Tk
    weights_Tk = _weights(logits_TE, scores_TE, experts_Tk, config) * config.scaling_factor
    real_T = jnp.ones((num_tokens,), bool) if mask_T is None else mask_T
    return Routing(experts_Tk.astype(jnp.int32), weights_Tk, expert_counts(experts_Tk, real_T, num_experts))


def scores(logits_TE, config: RouterConfig):
    """Each expert's score for each token, float32."""
    if config.score_function == "softmax":
        return jax.nn.softmax(logits_TE.astype(jnp.float32), axis=-1)
    return jax.nn.sigmoid(logits_TE.astype(jnp.float32))


def expert_counts(experts_Tk, real_T, num_experts: int):
    """Tokens of `real_T` that chose each expert: int32 [E]."""
    ones = jnp.broadcast_to(real_T[:, None], experts_Tk.shape).astype(jnp.int32)
    return jnp.zeros((num_experts,), jnp.int32).at[experts_Tk.reshape(-1)].add(ones.reshape(-1))


def _within_groups(choice_TE, config: RouterConfig):
    """Scores with the experts of groups that a token may not choose from set to -inf (arXiv 2412.19437, section 2.1.2)."""
    if config.num_groups == 1:
        return choice_TE
    num_tokens = choice_TE.shape[0]
    grouped = choice_TE.reshape(num_tokens, config.num_groups, -1)
    group_scores = lax.top_k(grouped, config.group_score_top)[0].sum(axis=-1)
    chosen = lax.top_k(group_scores, config.top_groups)[1]
    allowed = (chosen[:, :, None] == jnp.arange(config.num_groups)[None, None]).any(axis=1)
    return jnp.where(allowed[:, :, None], grouped, -jnp.inf).reshape(num_tokens, -1)


def _weights(logits_TE, scores_TE, experts_Tk, config: RouterConfig):
    if config.score_function == "softmax" and config.renormalize:  # the same number, better conditioned
        return jax.nn.softmax(jnp.take_along_axis(logits_TE, experts_Tk, axis=-1), axis=-1)
    chosen_Tk = jnp.take_along_axis(scores_TE, experts_Tk, axis=-1)
    if config.renormalize and config.top_k > 1:
        chosen_Tk /= chosen_Tk.sum(axis=-1, keepdims=True) + _TINY
    return chosen_Tk


def balance_loss(logits_TE, mask_T, config: RouterConfig, *, axes: Axes = ()):
    """How unevenly a micro-batch uses the experts: E sum_e f_e P_e, 1.0 at perfect balance (arXiv 2101.03961 eq. 4).

    f_e is the share of (token, choice) pairs on expert e by plain top-k of the scores, without bias or groups, as in
    Megatron-Core; P_e the mean score of e, scores scaled to sum 1. Gradient flows through P only.

    Args: logits_TE; mask_T True for real tokens, or None; axes that tokens are split over.
    Returns: float32 scalar without coefficient, equal over `axes`; 0 when no token is real.
    """
    scores_TE = scores(logits_TE, config)
    if config.score_function != "softmax":
        scores_TE /= scores_TE.sum(axis=-1, keepdims=True) + _TINY
    real_T = jnp.ones(logits_TE.shape[:1], bool) if mask_T is None else mask_T
    picked_Tk = lax.top_k(lax.stop_gradient(scores_TE), config.top_k)[1]
    counts_E = collectives.psum(expert_counts(picked_Tk, real_T, config.num_experts), axes)
    mass_E = collectives.psum((scores_TE * real_T[:, None]).sum(axis=0), axes)
    num_tokens = jnp.maximum(collectives.psum(real_T.sum(dtype=jnp.int32), axes), 1).astype(jnp.float32)
    return (mass_E / num_tokens * (counts_E / num_tokens)).sum() * (config.num_experts / config.top_k)


def z_loss(logits_TE, mask_T, *, axes: Axes = ()):
    """Mean over real tokens of logsumexp(logits)^2, which keeps logits small (arXiv 2202.08906 eq. 5).

    Returns: float32 scalar without coefficient, equal over `axes`; 0 when no token is real.
    """
    real_T = jnp.ones(logits_TE.shape[:1], bool) if mask_T is None else mask_T
    squares_T = jnp.square(jax.nn.logsumexp(logits_TE.astype(jnp.float32), axis=-1)) * real_T
    num_tokens = jnp.maximum(collectives.psum(real_T.sum(dtype=jnp.int32), axes), 1)
    return collectives.psum(squares_T.sum(), axes) / num_tokens


def update_bias(bias_E, counts_E, rate: float):
    """Balancing without a loss: raises the bias of under-loaded experts by `rate`, lowers that of over-loaded ones.

    bias + rate sign(mean(counts) - counts), in float32; counts are of a whole step over all devices, integers compared
    exactly (arXiv 2408.15664). Leading dims (layers) are allowed. Raises ValueError unless counts are integers.
    """
    if not jnp.issubdtype(counts_E.dtype, jnp.integer):
        raise ValueError(f"update_bias needs integer counts, got {counts_E.dtype}: floats stop counting at 2^24")
    whole, part = jnp.divmod(counts_E, counts_E.shape[-1])  # divided before summing: a step's pairs may pass 2^31
    carry, rest = jnp.divmod(part.sum(axis=-1, keepdims=True), counts_E.shape[-1])
    floor = whole.sum(axis=-1, keepdims=True) + carry  # mean = floor + rest / E
    at_mean = (counts_E == floor) & (rest == 0)
    direction = jnp.where(counts_E > floor, -1.0, jnp.where(at_mean, 0.0, 1.0))
    return bias_E + jnp.float32(rate) * direction.astype(jnp.float32)


def check_router(config: RouterConfig) -> None:
    """Raises ValueError, with fields and numbers, when the router's settings don't fit each other."""
    c = config
    if not 1 <= c.top_k <= c.num_experts:
        raise ValueError(f"top_k={c.top_k} must lie between 1 and num_experts={c.num_experts}")
    if c.num_groups < 1 or c.num_experts % c.num_groups:
        raise ValueError(f"num_experts={c.num_experts} doesn't divide into num_groups={c.num_groups} equal groups")
    if not 1 <= c.top_groups <= c.num_groups:
        raise ValueError(f"top_groups={c.top_groups} must lie between 1 and num_groups={c.num_groups}")
    size = c.num_experts // c.num_groups
    if c.num_groups > 1 and c.top_groups * size < c.top_k:
        raise ValueError(f"top_groups={c.top_groups} groups of {size} experts hold fewer than top_k={c.top_k}")
    if c.num_groups > 1 and not 1 <= c.group_score_top <= size:
        raise ValueError(f"group_score_top={c.group_score_top} must lie between 1 and a group's size {size}")


class Router(nnx.Module):
    """Owns the router's weight: float32, equal on all devices.  x_TD -> logits_TE, float32."""

    def __init__(self, d_model: int, config: RouterConfig):
        self.config = config
        self.weight = declare(d_model, config.num_experts, axes=(None, None), float32=True)

    def __call__(self, x_TD):
        return jnp.dot(x_TD.astype(jnp.float32), self.weight[...], precision=lax.Precision.HIGHEST)
