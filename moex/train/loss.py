"""Next-token loss over a vocabulary split by tensor parallelism, without ever holding all logits.

B rows of this device, S its context-parallel part of a sequence, D model width, V vocabulary of this device (over tp).
"""

import jax
import jax.numpy as jnp
from jax import lax

from mesh import collectives
from mesh.fold import Fold
from mesh.vma import vary, varying


def logits(x_TD, head_VD, fold: Fold, *, vocab_size: int):
    """x head^T in float32, [T, V]; columns past the true vocabulary are -1e30, so they never win nor learn."""
    out = jnp.einsum("td,vd->tv", x_TD, head_VD.astype(x_TD.dtype), preferred_element_type=jnp.float32)
    first = collectives.axis_index(fold.dense.tp) * head_VD.shape[0]
    return jnp.where((first + jnp.arange(head_VD.shape[0]) < vocab_size)[None], out, -1e30)


def cross_entropy_sum(hidden_BSD, head_VD, labels_BS, mask_BS, fold: Fold, *, vocab_size: int, chunk_tokens: int):
    """Sum over this device's tokens of -log p(label), where the mask is true.

    Args:
      hidden_BSD: [B, S / tp, D], final activations.
      head_VD: float32.
      labels_BS, mask_BS: equal over tp; a label under a false mask may be anything.
      chunk_tokens: logits are held for this many tokens at a time and computed again in the backward pass.

    Returns: float32 scalar, equal over tp, not summed over dp and cp.
    """
    tp = fold.dense.tp
    x_BSD = collectives.all_gather(hidden_BSD, tp, dim=1)
    num_tokens = x_BSD.shape[0] * x_BSD.shape[1]
    chunk = min(chunk_tokens, num_tokens)
    padding = -num_tokens % chunk
    cut = lambda x, *dims: jnp.pad(x.reshape(num_tokens, *dims), ((0, padding),) + ((0, 0),) * len(dims)).reshape(
        -1, chunk, *dims
    )

    @jax.checkpoint
    def chunk_sum(x_TD, labels_T, mask_T):
        logits_TV = logits(x_TD, head_VD, fold, vocab_size=vocab_size)
        top_T = collectives.pmax(lax.stop_gradient(logits_TV.max(axis=-1)), tp)
        total_T = collectives.psum(jnp.exp(logits_TV - top_T[:, None]).sum(axis=-1), tp)
        first = collectives.axis_index(tp) * head_VD.shape[0]
        is_label = labels_T[:, None] == first + jnp.arange(head_VD.shape[0])[None]
        label_T = collectives.psum(jnp.where(is_label, logits_TV, 0).sum(axis=-1), tp)
        return jnp.where(mask_T, jnp.log(total_T) + top_T - label_T, 0).sum()

    chunks = cut(x_BSD, x_BSD.shape[-1]), cut(labels_BS), cut(mask_BS)
    # Sums are equal over tp (the loss of a token is), whatever the type of the gathered activations says.
    start = vary(jnp.float32(0), varying(labels_BS, mask_BS))
    return lax.scan(lambda total, c: (total + chunk_sum(*c), None), start, chunks)[0]
