"""Next-token loss over a vocabulary split by tensor parallelism, without ever holding all logits.

B rows of this device, S its context-parallel part of a sequence, D model width, V vocabulary of this device (over tp), C
chunks of T tokens.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from mesh import collectives
from mesh.axes import Axes
from mesh.fold import Fold
from mesh.vma import vary, varying


def logits(x_TD, head_VD, fold: Fold, *, vocab_size: int, over: Axes = ()):
    """x head^T in float32, [T, V]; columns past the true vocabulary are -1e30, so they never win nor learn.

    over: axes that split tp's rows of the head further.
    """
    split = fold.dense.tp + over
    out = jnp.einsum("td,vd->tv", x_TD, head_VD.astype(x_TD.dtype), preferred_element_type=jnp.float32)
    if head_VD.shape[0] * fold.size(split) == vocab_size:
        return out
    first = collectives.axis_index(split) * head_VD.shape[0]
    return jnp.where((first + jnp.arange(head_VD.shape[0]) < vocab_size)[None], out, -1e30)


def cross_entropy_sum(
    hidden_BSD, head_VD, labels_BS, mask_BS, fold: Fold, *, vocab_size: int, chunk_tokens: int, over: Axes = ()
):
    """Sum over this device's tokens of -log p(label), where the mask is true.

    Args:
      hidden_BSD: [B, S / tp, D], final activations.
      head_VD: float32.
      labels_BS, mask_BS: equal over tp; a label under a false mask may be anything.
      chunk_tokens: logits are held for this many tokens at a time. Where gradients are wanted they are computed there and
        then, so that no logits are computed twice.
      over: axes that split tp's rows of the head further; the other arrays are equal over them.

    Returns: float32 scalar, equal over tp and `over`, not summed over dp and cp.
    """
    tp = fold.dense.tp
    x_BSD = collectives.all_gather(hidden_BSD, tp, dim=1)
    num_tokens = x_BSD.shape[0] * x_BSD.shape[1]
    chunk = min(chunk_tokens, num_tokens)
    padding = -num_tokens % chunk
    cut = lambda x, *dims: jnp.pad(x.reshape(num_tokens, *dims), ((0, padding),) + ((0, 0),) * len(dims)).reshape(
        -1, chunk, *dims
    )

    arrays = cut(x_BSD, x_BSD.shape[-1]), head_VD, cut(labels_BS), cut(mask_BS)
    axes = varying(*arrays)
    return _chunks_sum(*(vary(x, axes) for x in arrays[:2]), *arrays[2:], fold, vocab_size, over)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _chunks_sum(x_CTD, head_VD, labels_CT, mask_CT, fold: Fold, vocab_size: int, over: Axes):
    add = lambda total, c: (total + _chunk(c, head_VD, fold, vocab_size, over)[0], None)
    return lax.scan(add, _zero(labels_CT, mask_CT), (x_CTD, labels_CT, mask_CT))[0]


def _chunks_fwd(x_CTD, head_VD, labels_CT, mask_CT, fold, vocab_size, over):
    """Keeps the gradients of the sum: in float32, since they are still to be multiplied by that of the loss."""

    def add(carry, chunk):
        total, dhead_VD = carry
        nll, error_TV = _chunk(chunk, head_VD, fold, vocab_size, over)
        x_TD = chunk[0]
        dx_TD = jnp.einsum("tv,vd->td", error_TV, head_VD.astype(x_TD.dtype), preferred_element_type=jnp.float32)
        dhead_VD += jnp.einsum("tv,td->vd", error_TV, x_TD, preferred_element_type=jnp.float32)
        return (total + nll, dhead_VD), dx_TD

    start = _zero(labels_CT, mask_CT), vary(jnp.zeros(head_VD.shape, jnp.float32), varying(head_VD))
    (total, dhead_VD), dx_CTD = lax.scan(add, start, (x_CTD, labels_CT, mask_CT))
    return total, (dx_CTD, dhead_VD, jnp.zeros((0,), x_CTD.dtype))


def _chunks_bwd(fold, vocab_size, over, kept, g):
    dx_CTD, dhead_VD, like = kept
    return (g * dx_CTD).astype(like.dtype), g * dhead_VD, None, None


_chunks_sum.defvjp(_chunks_fwd, _chunks_bwd)


def _zero(labels, mask):
    """The sum's start: equal over tp (the loss of a token is), whatever the type of the gathered activations says."""
    return vary(jnp.float32(0), varying(labels, mask))


def _chunk(chunk, head_VD, fold: Fold, vocab_size: int, over: Axes):
    """One chunk's sum, and its gradient by the logits: softmax less one at the label, [T, V]."""
    x_TD, labels_T, mask_T = chunk
    split, rows = fold.dense.tp + over, head_VD.shape[0]
    logits_TV = logits(x_TD, head_VD, fold, vocab_size=vocab_size, over=over)
    top_T = collectives.pmax(logits_TV.max(axis=-1), split)
    exp_TV = jnp.exp(logits_TV - top_T[:, None])
    total_T = collectives.psum(exp_TV.sum(axis=-1), split)
    own_T = labels_T - collectives.axis_index(split) * rows  # the label's row on this device, if it is there
    at_label_T = jnp.take_along_axis(logits_TV, jnp.clip(own_T, 0, rows - 1)[:, None], axis=-1)[:, 0]
    label_T = collectives.psum(jnp.where((own_T >= 0) & (own_T < rows), at_label_T, 0), split)
    nll = jnp.where(mask_T, jnp.log(total_T) + top_T - label_T, 0).sum()
    share_TV = exp_TV / total_T[:, None] - (own_T[:, None] == jnp.arange(rows)[None])
    return nll, jnp.where(mask_T[:, None], share_TV, 0)
