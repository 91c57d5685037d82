"""Oracle of the sums: one token after the other, one choice after the other.  T tokens, k choices, R rows, D columns."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.vma import axes_of, cast_to


def combine(rows_RD, row_of_pair_Tk):
    """As in the package's `combine`."""
    zero_D = cast_to(axes_of(rows_RD, row_of_pair_Tk), jnp.zeros((rows_RD.shape[1],), jnp.float32))

    def add(total_D, row):
        here = row >= 0
        part_D = lax.dynamic_index_in_dim(rows_RD, jnp.where(here, row, 0), 0, keepdims=False)
        return total_D + jnp.where(here, part_D.astype(jnp.float32), 0), None

    return lax.map(lambda row_k: lax.scan(add, zero_D, row_k)[0], row_of_pair_Tk).astype(rows_RD.dtype)
