"""Balancing without a loss: a bias on the choice, moved once a step.  L layers, E experts, k experts a token.

The bias is float32 state beside the parameters: no gradient, no weight decay, not in the optimizer.
"""

import jax
import jax.numpy as jnp
from jax import lax

from mesh import collectives
from mesh.axes import Axes
from moex.config import RouterConfig


def update_bias(bias_E, counts_E, rate: float):
    """Raises the bias of under-loaded experts by `rate`, lowers that of over-loaded ones (arXiv 2408.15664).

    bias + rate sign(mean(counts) - counts), in float32; counts are of a whole step over all devices, integers compared
    exactly. Leading dims (layers) are allowed. Raises ValueError unless counts are integers.
    """
    if not jnp.issubdtype(counts_E.dtype, jnp.integer):
        raise ValueError(f"update_bias needs integer counts, got {counts_E.dtype}: floats stop counting at 2^24")
    if counts_E.dtype.itemsize > 4 and not jax.config.jax_enable_x64:
        raise ValueError(f"update_bias needs int32 counts, got {counts_E.dtype}, which JAX would cut to 32 bits")
    whole, part = jnp.divmod(counts_E, counts_E.shape[-1])  # divided before summing: a step's pairs may pass 2^31
    carry, rest = jnp.divmod(part.sum(axis=-1, keepdims=True), counts_E.shape[-1])
    floor = whole.sum(axis=-1, keepdims=True) + carry  # mean = floor + rest / E
    at_mean = (counts_E == floor) & (rest == 0)
    direction = jnp.where(counts_E > floor, -1.0, jnp.where(at_mean, 0.0, 1.0))
    return bias_E + jnp.float32(rate) * direction.astype(jnp.float32)


def centred(bias_E):
    """The bias less its mean over experts. No choice changes by it."""
    return bias_E - bias_E.mean(axis=-1, keepdims=True)


def quantile_offsets(logits_BSE, bias_E, real_BS, config: RouterConfig, *, axes: Axes = (), row_axes: Axes = ()):
    """Each expert's threshold by quantile balancing (Megatron-Core's rule): what to take off its logits.

    Of each row, with l the logits and alpha a token's (k+1)-th best l + bias: beta is the (n k / E + 1)-th largest of
    the expert's column l - alpha over the row's n real tokens, rounded down where it doesn't divide. With beta off the
    logits, n k / E tokens of the column lie above alpha. Mean over rows.

    Args:
      logits_BSE: this device's part of each row; real_BS True for tokens that count.
      axes: mesh axes that a row is split over.  row_axes: those that whole rows are split over.

    Returns: float32 [E], equal over all of them, without gradient; 0 when no token is real.
    """
    logits_BSE = lax.stop_gradient(logits_BSE.astype(jnp.float32))
    logits_BSE, real_BS = (collectives.all_gather(x, axes, dim=1) for x in (logits_BSE, real_BS))
    bias_E = jnp.broadcast_to(bias_E, (config.num_experts,))
    alpha_BS = lax.top_k(logits_BSE + bias_E[None, None], config.top_k + 1)[0][..., -1]
    above_BSE = jnp.where(real_BS[..., None], logits_BSE - alpha_BS[..., None], -jnp.inf)
    tokens_B = real_BS.sum(axis=1, dtype=jnp.int32)
    rank_B = jnp.minimum(tokens_B * config.top_k // config.num_experts, jnp.maximum(tokens_B - 1, 0))
    sorted_BSE = -jnp.sort(-above_BSE, axis=1)
    beta_BE = jnp.take_along_axis(sorted_BSE, rank_B[:, None, None], axis=1)[:, 0]
    filled_B = tokens_B > 0
    # The gathered rows are equal over `axes`; pmax lets the type say so.
    total_E = collectives.pmax(jnp.where(filled_B[:, None], beta_BE, 0.0).sum(axis=0), axes)
    rows = collectives.pmax(filled_B.sum(dtype=jnp.int32), axes)
    return collectives.psum(total_E, row_axes) / jnp.maximum(collectives.psum(rows, row_axes), 1)


def update_quantile_bias(bias_E, offsets_E, decay: float):
    """The bias of quantile balancing after a step: a moving average of minus the thresholds, centred."""
    return centred(decay * bias_E - (1 - decay) * offsets_E)
