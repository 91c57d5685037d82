"""Rows by index, with a transpose that is also rows by index.  N source rows, M result rows, j terms a row."""

import jax.numpy as jnp

from mesh.vma import vary, varying
from pallas_kernels.combine import combine
from pallas_kernels.permute import permute


def move(x_ND, out_from_Mj, in_to_Ni):
    """y[m] = sum over j of x[out_from[m, j]], in the order of j; an index of -1 adds nothing.

    Either a row goes to many places or many rows are summed to one: i or j is 1. Both directions are gathers with a fixed
    order of float32 sums: no atomics, the same bits every time; by kernels where they run.

    Args:
      x_ND: rows, any float dtype; without sums any dtype.
      out_from_Mj: int32, the source rows of each result row.
      in_to_Ni: int32, the inverse map: the result rows that each source row goes to.
    """
    if out_from_Mj.shape[1] == 1:
        return permute(x_ND, in_to_Ni, out_from_Mj[:, 0])
    assert in_to_Ni.shape[1] == 1, "rows that are summed go to one place each"
    return combine(x_ND, out_from_Mj, in_to_Ni[:, 0])


def invert(index_M, size: int):
    """For each of `size` items the slot that holds it, or -1.  index_M: int32, each slot's item or -1, no item twice."""
    slots = jnp.arange(index_M.shape[0], dtype=jnp.int32)
    target = jnp.where(index_M >= 0, index_M, size)
    empty = vary(jnp.full((size,), -1, jnp.int32), varying(index_M))
    return empty.at[target].set(slots, mode="drop", unique_indices=True)
