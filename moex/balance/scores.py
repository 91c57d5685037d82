"""Scores of experts and counts of choices: what routing and balancing both start from.  T tokens, E experts, k a token."""

import jax
import jax.numpy as jnp

from moex.config import RouterConfig

TINY = 1e-20
"""Keeps a quotient of two vanishing numbers from dividing by zero."""


def scores(logits_TE, config: RouterConfig):
    """Each expert's score for each token, float32: softmax over experts, sigmoid, or sqrt(softplus)."""
    logits_TE = logits_TE.astype(jnp.float32)
    if config.score_function == "softmax":
        return jax.nn.softmax(logits_TE, axis=-1)
    if config.score_function == "sigmoid":
        return jax.nn.sigmoid(logits_TE)
    return _sqrt_softplus(logits_TE)


@jax.custom_jvp
def _sqrt_softplus(x):
    return jnp.sqrt(jax.nn.softplus(x))


@_sqrt_softplus.defjvp
def _sqrt_softplus_jvp(primals, tangents):
    # sigmoid / (2 sqrt(softplus)) is 0 / 0 where softplus has gone to zero; there it equals exp(x / 2) / 2.
    (x,), (dx,) = primals, tangents
    y = _sqrt_softplus(x)
    slope = jnp.where(x < -20, jnp.exp(x / 2) / 2, jax.nn.sigmoid(x) / (2 * jnp.maximum(y, TINY)))
    return y, slope * dx


def normalised(logits, config: RouterConfig):
    """Scores of the last dim's experts scaled to sum 1, float32: s / sum(s), by the softmax of their logarithms.

    However small all scores are, neither the result nor its gradient divides zero by zero.
    """
    logits = logits.astype(jnp.float32)
    if config.score_function == "sigmoid":
        logits = jax.nn.log_sigmoid(logits)
    elif config.score_function == "sqrtsoftplus":
        small = logits < -20  # ln(softplus(x)) is x there
        logits = jnp.where(small, logits, jnp.log(jax.nn.softplus(jnp.where(small, 0.0, logits)))) / 2
    return jax.nn.softmax(logits, axis=-1)


def full_scores(logits_TE, config: RouterConfig):
    """Scores scaled to sum 1 over all experts: the probabilities of the balance losses."""
    return normalised(logits_TE, config)


def expert_counts(experts_Tk, real_T, num_experts: int):
    """Tokens of `real_T` that chose each expert: int32 [E]. A number outside [0, E) is no choice."""
    valid_Tk = real_T[:, None] & (experts_Tk >= 0) & (experts_Tk < num_experts)
    at_P = jnp.where(valid_Tk, experts_Tk, num_experts).reshape(-1)
    return jnp.zeros((num_experts + 1,), jnp.int32).at[at_P].add(1)[:num_experts]
