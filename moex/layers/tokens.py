"""What layers know of the tokens they work on, beside activations.  B rows of this device, S its part of a sequence."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mesh import collectives
from mesh.fold import Fold


class Tokens(NamedTuple):
    """int32 arrays [B, S] of a context-parallel part of the rows, equal over tp.

    segments: number of the document within its row, 0 for padding.  positions: offset within the document.
    index: place in the row, which orders tokens for causality.
    """

    segments: jax.Array
    positions: jax.Array
    index: jax.Array


def unpacked(num_rows: int, seq_len: int) -> Tokens:
    """Rows that each hold one document from start to end."""
    index = jnp.tile(jnp.arange(seq_len, dtype=jnp.int32), (num_rows, 1))
    return Tokens(jnp.ones_like(index), index, index)


def own_part(x_BS, fold: Fold):
    """The part of dim 1 that this device owns between layers: tensor parallelism cuts a context-parallel part further."""
    tp = fold.dense.tp
    size = x_BS.shape[1] // collectives.axis_size(tp)
    start = collectives.axis_index(tp) * size
    return jax.lax.dynamic_slice_in_dim(x_BS, start, size, axis=1) if tp else x_BS
