"""Multi-token prediction: from a token's activation and the embedding of one further on, an input for one more layer.

B rows of this device, S its part of a sequence, D model width. Depth k looks k tokens further than the model's own loss.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mesh import collectives
from mesh.fold import Fold
from moex.layers.norm import RMSNorm
from moex.layers.param import declare
from moex.layers.tokens import Tokens


class Further(NamedTuple):
    """What depth k knows, int32 [B, S] equal over tp.  ids: the tokens k further on.  labels: the tokens after those.

    mask: bool, the label counts.  tokens: segments are 0 where the document ends before, so that such a token is padding
    to the layer.
    """

    ids: jax.Array
    labels: jax.Array
    mask: jax.Array
    tokens: Tokens


def further(ids_BS, labels_BS, mask_BS, tokens: Tokens, depth: int, fold: Fold) -> Further:
    """Ids, labels and mask moved left by `depth` places within each document, and zero where it ends.

    All are of this device's context-parallel part, in whatever order its `tokens.index` says; whole rows of whole numbers
    are gathered over cp to find what lies on other devices.
    """
    rows = [
        collectives.all_gather(x, fold.dense.cp, dim=1)
        for x in (tokens.index, tokens.segments, ids_BS, labels_BS, mask_BS)
    ]
    order = jnp.argsort(rows[0], axis=1)  # places of a row in their own order, whatever the split
    at = tokens.index + depth
    pick = lambda x: jnp.take_along_axis(
        jnp.take_along_axis(x, order, axis=1), jnp.minimum(at, order.shape[1] - 1), axis=1
    )
    segments, ids, labels, mask = (pick(x) for x in rows[1:])
    real = (at < order.shape[1]) & (segments == tokens.segments) & (segments > 0)
    zero = lambda x: jnp.where(real, x, jnp.zeros((), x.dtype))
    return Further(zero(ids), zero(labels), zero(mask), tokens._replace(segments=zero(segments)))


class Ahead(nnx.Module):
    """W [norm(embedding); norm(hidden)] (DeepSeek-V3, arXiv 2412.19437 eq. 21, in the order of its weights).

    Activations and embeddings [B, S, D] of this device; weights are equal on all devices. `norm` follows the layer.
    """

    def __init__(self, d_model: int, norm_eps: float):
        self.embedding_norm = RMSNorm(d_model, norm_eps)
        self.hidden_norm = RMSNorm(d_model, norm_eps)
        self.project = declare(2 * d_model, d_model, axes=(None, None))
        self.norm = RMSNorm(d_model, norm_eps)

    def __call__(self, hidden_BSD, embedded_BSD):
        both = jnp.concatenate([self.embedding_norm(embedded_BSD), self.hidden_norm(hidden_BSD)], axis=-1)
        return both @ self.project[...]
