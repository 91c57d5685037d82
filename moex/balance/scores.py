"""Scores of experts, and counts and places of choices: what routing and balancing both start from.

T tokens, E experts, k experts a token, P = T k pairs.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mesh.vma import vary, varying
from moex.config import RouterConfig

TINY = 1e-20
"""Keeps a quotient of two vanishing numbers from dividing by zero."""


class Routing(NamedTuple):
    """experts_Tk int32, best first, distinct in a row, E where a choice was dropped; weights_Tk float32, 0 there;
    counts_E int32, this device's real pairs.
    """

    experts_Tk: jax.Array
    weights_Tk: jax.Array
    counts_E: jax.Array


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


def is_expert(experts, num_experts: int):
    """Whether a number names an expert; any outside [0, E) is no choice."""
    return (experts >= 0) & (experts < num_experts)


def expert_counts(experts_Tk, real_T, num_experts: int):
    """Tokens of `real_T` that chose each expert: int32 [E]."""
    valid_Tk = real_T[:, None] & is_expert(experts_Tk, num_experts)
    at_P = jnp.where(valid_Tk, experts_Tk, num_experts).reshape(-1)
    return jnp.zeros((num_experts + 1,), jnp.int32).at[at_P].add(1)[:num_experts]


def places_among_equals(number_P, most: int, *keys_P):
    """How many pairs of the same number (0 to `most`) come before each one, int32: by the keys, then in array order."""
    pair_P = vary(jnp.arange(number_P.shape[0], dtype=jnp.int32), varying(number_P, *keys_P))
    sorted_P = lax.sort((number_P, *keys_P, pair_P), num_keys=len(keys_P) + 2)
    counts = vary(jnp.zeros((most + 1,), jnp.int32), varying(number_P)).at[number_P].add(1)
    places_P = jnp.arange(number_P.shape[0], dtype=jnp.int32) - (jnp.cumsum(counts) - counts)[sorted_P[0]]
    return jnp.zeros_like(places_P).at[sorted_P[-1]].set(places_P, unique_indices=True)
