"""Activation stash in pages, for schedules that read rows in another order than the reverse of writing (pipelines).

P pages of a pool, p rows of a page, M pages that one buffer may take, R = M p rows of a buffer, D width of a row. Free pages
stand in a ring: `alloc` takes from its head, `free` puts back at its tail, so that any order of reading will do. All sizes
are static and the host is not asked. (Megatron-Core's paged stash, arXiv 2603.07685.)
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mesh.axes import Axes
from mesh.vma import vary


class Pages(NamedTuple):
    """ring: int32 [P], numbers of pages; `num_free` of them from `head` on, cyclically, are free.  overflow: int32, pages
    that there was no room for; above 0, rows were lost and what was computed of them is not to be used.
    """

    ring: jax.Array
    head: jax.Array
    num_free: jax.Array
    overflow: jax.Array


def all_free(num_pages: int, axes: Axes = ()) -> Pages:
    """Pages of an empty pool, typed as varying over `axes`."""
    zero = vary(jnp.int32(0), axes)
    return Pages(vary(jnp.arange(num_pages, dtype=jnp.int32), axes), zero, zero + num_pages, zero)


def alloc(pages: Pages, num_rows, page_rows: int, most: int) -> tuple[Pages, jax.Array]:
    """Takes as many pages as `num_rows` rows (int32 scalar, at most `most` pages' worth) need.

    Returns (pages, numbers [most], -1 behind the last one). Where too few are free, none is taken and `overflow` counts
    what was wanted.
    """
    number = -(-num_rows // page_rows)
    fits = number <= pages.num_free
    taken = jnp.where(fits, number, 0)
    turn = jnp.arange(most, dtype=jnp.int32)
    ids = jnp.where(turn < taken, pages.ring[(pages.head + turn) % pages.ring.shape[0]], -1)
    head = (pages.head + taken) % pages.ring.shape[0]
    return Pages(pages.ring, head, pages.num_free - taken, pages.overflow + jnp.where(fits, 0, number)), ids


def free(pages: Pages, ids) -> Pages:
    """Gives pages back: numbers as `alloc` returned them."""
    size, number = pages.ring.shape[0], (ids >= 0).sum(dtype=jnp.int32)
    turn = jnp.arange(ids.shape[0], dtype=jnp.int32)
    at = jnp.where(ids >= 0, (pages.head + pages.num_free + turn) % size, size)
    ring = pages.ring.at[at].set(ids, mode="drop", unique_indices=True)
    return pages._replace(ring=ring, num_free=pages.num_free + number)


def push(pool_PpD, ids, rows_RD):
    """Writes a buffer's rows to its pages; rows of a page numbered -1 are left out.  Returns the pool."""
    paged = rows_RD.reshape(ids.shape[0], *pool_PpD.shape[1:])
    return pool_PpD.at[jnp.where(ids >= 0, ids, pool_PpD.shape[0])].set(paged, mode="drop", unique_indices=True)


def pop(pool_PpD, ids):
    """A buffer's rows [M p, D] from its pages, zero in a page numbered -1; `free` them afterwards."""
    paged = pool_PpD[jnp.maximum(ids, 0)]
    here = (ids >= 0).reshape(-1, *[1] * (paged.ndim - 1))
    rows = jnp.where(here, paged, jnp.zeros((), pool_PpD.dtype))
    return rows.reshape(-1, *pool_PpD.shape[2:])
