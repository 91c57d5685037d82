"""Random numbers for routing: a token draws the same ones on every mesh.  T tokens, D model width, E experts."""

import jax
import jax.numpy as jnp
from jax import lax

from mesh import collectives
from mesh.fold import Fold
from moex.config import RouterConfig


def token_numbers(index_BS, fold: Fold):
    """A number of its own for each token of a micro-batch, int32 [B, S]: row of the whole micro-batch and place in it."""
    num_rows, seq_here = index_BS.shape
    seq_len = seq_here * fold.size(fold.dense.sequence)
    row_B = collectives.axis_index(fold.dense.dp) * num_rows + jnp.arange(num_rows, dtype=jnp.int32)
    return row_B[:, None] * seq_len + index_BS


def jitter(x_TD, key, number_T, size: float):
    """Router inputs times U(1 - size, 1 + size), each element its own (arXiv 2101.03961, section 2.4)."""
    draw = lambda n: jax.random.uniform(jax.random.fold_in(key, n), x_TD.shape[1:], minval=1 - size, maxval=1 + size)
    return x_TD * jax.vmap(draw)(number_T).astype(x_TD.dtype)


def forced_logits(logits_TE, key, number_T, config: RouterConfig):
    """Random logits N(0, 1) in place of the router's; gradients pass to the router's as if they were its own.

    With `forced=skew` the same N(0, forced_skew) draw over experts is added in every layer and step, so that the same
    experts are hot throughout.
    """
    num_experts = logits_TE.shape[1]
    draw = lambda n: jax.random.normal(jax.random.fold_in(key, n), (num_experts,))
    random_TE = jax.vmap(draw)(number_T)
    if config.forced == "skew":
        random_TE += config.forced_skew * jax.random.normal(jax.random.key(0), (1, num_experts))
    return random_TE + (logits_TE - lax.stop_gradient(logits_TE))
