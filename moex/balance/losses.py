"""Losses that pull the router towards even use of experts, without coefficients.

T tokens of this device, E experts, k experts a token. `axes` are the mesh axes that tokens are split over; results are
equal on their devices.
"""

import jax
import jax.numpy as jnp
from jax import lax

from mesh import collectives
from mesh.axes import Axes
from moex.balance.scores import expert_counts, normalised
from moex.config import RouterConfig


def balance_loss(logits_TE, mask_T, config: RouterConfig, *, axes: Axes = (), counts_E=None):
    """How unevenly a micro-batch uses the experts: E sum_e f_e P_e, 1.0 at perfect balance (arXiv 2101.03961 eq. 4).

    f_e is the share of (token, choice) pairs on expert e by plain top-k of the scores, without bias or groups, as in
    Megatron-Core; P_e the mean score of e, scores scaled to sum 1. Gradient flows through P only.

    Args:
      mask_T: True for real tokens, or None for all.
      counts_E: choices to take f from in place of this micro-batch's own, int32, equal over `axes`: with those of the
        step's earlier micro-batches counted in it is the global-batch loss (arXiv 2501.11873).

    Returns: float32 scalar; 0 when no token is real.
    """
    real_T = _real(logits_TE, mask_T)
    scores_TE = _probabilities(logits_TE, real_T, config)
    if counts_E is None:
        counts_E = plain_counts(logits_TE, mask_T, config, axes=axes)
    mass_E = collectives.psum(jnp.where(real_T[:, None], scores_TE, 0).sum(axis=0), axes)
    num_tokens = jnp.maximum(collectives.psum(real_T.sum(dtype=jnp.int32), axes), 1).astype(jnp.float32)
    tokens_counted = jnp.maximum(_tokens(counts_E, config.top_k), 1).astype(jnp.float32)
    return (mass_E / num_tokens * (counts_E / tokens_counted)).sum() * (config.num_experts / config.top_k)


def plain_counts(logits_TE, mask_T, config: RouterConfig, *, axes: Axes = ()):
    """Tokens that each expert is among the k best scores of, without bias or groups: int32 [E], equal over `axes`."""
    real_T = _real(logits_TE, mask_T)
    picked_Tk = _plain_choices(_probabilities(logits_TE, real_T, config), config)
    return collectives.psum(expert_counts(picked_Tk, real_T, config.num_experts), axes)


def sequence_balance_loss(
    logits_TE, segments_T, config: RouterConfig, *, num_segments: int, axes: Axes = (), sample_axes: Axes = ()
):
    """The balance loss of each logical sample by itself, averaged over samples (arXiv 2412.19437 eq. 17-20).

    Args:
      segments_T: int32 number of the sample that a token belongs to, 1 to `num_segments`; 0 is padding. Packed documents
        are samples of their own. A number above `num_segments` counts nowhere.
      axes: mesh axes that the tokens of one sample are split over.
      sample_axes: mesh axes that whole samples are split over.

    Returns: float32 scalar, equal over both; 0 when no token is real.
    """
    real_T = (segments_T > 0) & (segments_T <= num_segments)
    scores_TE = _probabilities(logits_TE, real_T, config)
    picked_Tk = _plain_choices(scores_TE, config)
    at_T = jnp.where(real_T, segments_T - 1, num_segments)
    zeros = jnp.zeros((num_segments + 1, config.num_experts), jnp.float32)
    mass_GE = collectives.psum(zeros.at[at_T].add(scores_TE)[:-1], axes)
    counts_GE = zeros.astype(jnp.int32).at[at_T[:, None], picked_Tk].add(1)[:-1]
    counts_GE = collectives.psum(counts_GE, axes)
    tokens_G = _tokens(counts_GE, config.top_k)
    per_token = lambda x_GE: x_GE / jnp.maximum(tokens_G, 1)[:, None].astype(jnp.float32)
    losses_G = (per_token(mass_GE) * per_token(counts_GE)).sum(axis=-1) * (config.num_experts / config.top_k)
    num_samples = collectives.psum((tokens_G > 0).sum(dtype=jnp.int32), sample_axes)
    return collectives.psum(losses_G.sum(), sample_axes) / jnp.maximum(num_samples, 1)


def z_loss(logits_TE, mask_T, *, axes: Axes = ()):
    """Mean over real tokens of logsumexp(logits)^2, which keeps logits small (arXiv 2202.08906 eq. 5).

    Returns: float32 scalar without coefficient, equal over `axes`; 0 when no token is real.
    """
    real_T = _real(logits_TE, mask_T)
    logits_TE = jnp.where(real_T[:, None], logits_TE.astype(jnp.float32), 0)
    squares_T = jnp.square(jax.nn.logsumexp(logits_TE, axis=-1)) * real_T
    num_tokens = jnp.maximum(collectives.psum(real_T.sum(dtype=jnp.int32), axes), 1)
    return collectives.psum(squares_T.sum(), axes) / num_tokens


def _real(logits_TE, mask_T):
    return jnp.ones(logits_TE.shape[:1], bool) if mask_T is None else mask_T


def _probabilities(logits_TE, real_T, config: RouterConfig):
    """Scores scaled to sum 1 over all experts. Padding may hold anything, and spoils nothing."""
    return normalised(jnp.where(real_T[:, None], logits_TE, 0), config)


def _plain_choices(scores_TE, config: RouterConfig):
    """The k best of the scores as the losses have them: a tie that scaling makes must fall the same way."""
    return lax.top_k(lax.stop_gradient(scores_TE), config.top_k)[1]


def _tokens(counts_E, top_k: int):
    """Tokens behind counts over the last dim; each made `top_k` choices. Divided before summing: pairs may pass 2^31."""
    whole, part = jnp.divmod(counts_E, top_k)
    return whole.sum(axis=-1) + part.sum(axis=-1) // top_k
