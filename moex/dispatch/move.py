"""Rows by index, with a transpose that is also rows by index.  N source rows, M result rows, j terms a row."""

import jax
import jax.numpy as jnp

from mesh.vma import vary, varying


def move(x_ND, out_from_Mj, in_to_Ni):
    """y[m] = sum over j of x[out_from[m, j]], in the order of j; an index of -1 adds nothing.

    Both directions are gathers with a fixed order of sums: no atomics, the same bits every time.

    Args:
      x_ND: rows, any float dtype.
      out_from_Mj: int32, the source rows of each result row.
      in_to_Ni: int32, the inverse map: the result rows that each source row goes to.
    """
    axes = varying(x_ND, out_from_Mj, in_to_Ni)
    return _move(*(vary(a, axes) for a in (x_ND, out_from_Mj, in_to_Ni)))


@jax.custom_vjp
def _move(x_ND, out_from_Mj, in_to_Ni):
    rows = [jnp.where((i >= 0)[:, None], x_ND[jnp.maximum(i, 0)], 0) for i in out_from_Mj.T]
    total = rows[0]
    for row in rows[1:]:
        total += row
    return total


def _move_fwd(x_ND, out_from_Mj, in_to_Ni):
    return _move(x_ND, out_from_Mj, in_to_Ni), (out_from_Mj, in_to_Ni)


def _move_bwd(maps, g_MD):
    out_from_Mj, in_to_Ni = maps
    return _move(g_MD, in_to_Ni, out_from_Mj), None, None


_move.defvjp(_move_fwd, _move_bwd)


def invert(index_M, size: int):
    """For each of `size` items the slot that holds it, or -1.  index_M: int32, each slot's item or -1, no item twice."""
    slots = jnp.arange(index_M.shape[0], dtype=jnp.int32)
    target = jnp.where(index_M >= 0, index_M, size)
    empty = vary(jnp.full((size,), -1, jnp.int32), varying(index_M))
    return empty.at[target].set(slots, mode="drop", unique_indices=True)
