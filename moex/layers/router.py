"""Token routing: which experts a token goes to and with what weight.

T tokens of this device, D model width, E experts, k experts a token, G groups. Everything is float32 whatever comes in,
counts are int32. `axes` are the mesh axes that the tokens of a micro-batch are split over (dp, cp, tp). How evenly
experts are used is the matter of `moex.balance`, whose functions can be had from here too.
"""

import typing

import jax.numpy as jnp
from flax import nnx
from jax import lax

from mesh.axes import Axes
from moex.balance import (
    Routing,
    apply_capacity,
    balance_loss,
    expert_counts,
    forced_logits,
    is_expert,
    normalised,
    scores,
    sequence_balance_loss,
    sinkhorn,
    update_bias,
    z_loss,
)
from moex.config import RouterConfig
from moex.layers.param import declare
from moex.memory.residuals import kept

__all__ = [
    "Router",
    "Routing",
    "apply_capacity",
    "balance_loss",
    "check_router",
    "expert_counts",
    "route",
    "scores",
    "sequence_balance_loss",
    "update_bias",
    "z_loss",
]


_NEVER = -1e30
"""A logit whose score is nothing beside any other."""


def route(
    logits_TE, bias_E, config: RouterConfig, *,
    mask_T=None, key=None, replay_Tk=None, number_T=None, axes: Axes = (), training: bool = False,
) -> Routing:  # fmt: skip
    """Picks experts by biased score and weighs them by the unbiased one (DeepSeek-V3, arXiv 2412.19437 eq. 16).

    Args:
      logits_TE: router outputs, any float dtype.
      bias_E: float32 added for picking only, without gradient, to the scores, or to the logits with selection
        `quantile`; None for no bias.
      mask_T: True for real tokens; others still get experts and weights, but aren't counted.
      key: of random numbers, needed with `forced` logits; an error where none are drawn.
      replay_Tk: experts to use in place of picking (a recorded choice), different ones for a token; weights are computed
        for them, 0 for a number outside [0, E).
      number_T: int32 number of each token, by which it draws; its place in the array otherwise.
      axes: what tokens are split over, for Sinkhorn's sums over all of them.
      training: with selection `sinkhorn`; elsewhere, and for `forced`, experts are picked by the best scores, so that a
        token's experts don't depend on other tokens.

    Ties go to the lower expert number. Logits that aren't finite give valid distinct experts; their weights may not be
    finite. Raises ValueError when the numbers of experts, groups and k don't fit.
    """
    num_tokens, num_experts = logits_TE.shape
    check_router(config)
    if num_experts != config.num_experts:
        raise ValueError(
            f"logits are of {num_experts} experts, the configuration says num_experts={config.num_experts}"
        )
    if (key is not None) != bool(config.forced and training):
        raise ValueError(
            f"route draws random numbers in training with forced set, and then needs a key: forced={config.forced!r}, "
            f"training={training}, key {'given' if key is not None else 'missing'}"
        )
    logits_TE = logits_TE.astype(jnp.float32)
    real_T = jnp.ones((num_tokens,), bool) if mask_T is None else mask_T
    if key is not None:
        number_T = jnp.arange(num_tokens, dtype=jnp.int32) if number_T is None else number_T
        logits_TE = forced_logits(logits_TE, key, number_T, config)
    scores_TE = scores(logits_TE, config)
    if replay_Tk is not None and (
        replay_Tk.shape != (num_tokens, config.top_k) or not jnp.issubdtype(replay_Tk.dtype, jnp.integer)
    ):
        raise ValueError(
            f"replayed choices must be integers of shape {(num_tokens, config.top_k)}, got {replay_Tk.dtype} "
            f"{replay_Tk.shape}"
        )
    if replay_Tk is None:
        experts_Tk = _pick(logits_TE, scores_TE, bias_E, real_T, config, axes, training)
    else:
        experts_Tk = replay_Tk
    experts_Tk = kept(experts_Tk.astype(jnp.int32))
    weights_Tk = _weights(logits_TE, scores_TE, experts_Tk, config) * config.scaling_factor
    return Routing(experts_Tk, weights_Tk, expert_counts(experts_Tk, real_T, num_experts))


def _pick(logits_TE, scores_TE, bias_E, real_T, config: RouterConfig, axes: Axes, training: bool):
    if config.selection == "sinkhorn" and training:
        choice_TE = sinkhorn(logits_TE, real_T, axes=axes)
    else:
        choice_TE = lax.stop_gradient(logits_TE if config.selection == "quantile" else scores_TE)
        if bias_E is not None:
            choice_TE += lax.stop_gradient(bias_E.astype(jnp.float32))[None]
        choice_TE = _within_groups(choice_TE, config)
    return lax.top_k(choice_TE, config.top_k)[1]


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
    """Of the chosen experts; a number outside [0, E), which only a replayed choice can be, weighs 0."""
    valid_Tk = is_expert(experts_Tk, config.num_experts)
    at_Tk = jnp.where(valid_Tk, experts_Tk, 0)
    if config.renormalize and (config.score_function == "softmax" or config.top_k > 1):
        chosen_Tk = jnp.where(valid_Tk, jnp.take_along_axis(logits_TE, at_Tk, axis=-1), _NEVER)
        weights_Tk = normalised(chosen_Tk, config)
    else:
        weights_Tk = jnp.take_along_axis(scores_TE, at_Tk, axis=-1)
    return jnp.where(valid_Tk, weights_Tk, 0.0)


def check_router(config: RouterConfig) -> None:
    """Raises ValueError, with fields and numbers, when the router's settings don't fit each other."""
    c = config
    for name in ("score_function", "selection", "capacity_policy", "forced"):
        known = typing.get_args(typing.get_type_hints(RouterConfig)[name])
        if getattr(c, name) not in known:
            raise ValueError(f"{name}={getattr(c, name)!r} must be one of {known}")
    if c.num_experts < 1:
        raise ValueError(f"num_experts={c.num_experts} must be at least 1")
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
    if c.selection != "top_k" and c.num_groups > 1:
        raise ValueError(f"num_groups={c.num_groups} has no effect with selection={c.selection}: set it to 1")
    if c.selection == "quantile" and c.top_k == c.num_experts:
        raise ValueError(
            f"selection=quantile needs top_k below num_experts={c.num_experts}: with all chosen none is next best"
        )


class Router(nnx.Module):
    """Owns the router's weight, and bias where it has one: float32, equal on all devices.  x_TD -> logits_TE, float32."""

    def __init__(self, d_model: int, config: RouterConfig):
        self.config = config
        self.weight = declare(d_model, config.num_experts, axes=(None, None), float32=True)
        if config.logit_bias:
            self.bias = declare(config.num_experts, axes=(None,), init="zeros", float32=True, decays=False)

    def __call__(self, x_TD):
        logits_TE = jnp.dot(x_TD.astype(jnp.float32), self.weight[...], precision=lax.Precision.HIGHEST)
        return logits_TE + self.bias[...][None] if self.config.logit_bias else logits_TE
