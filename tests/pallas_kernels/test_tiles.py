"""Tile lists for grouped kernels: every row of every group in one tile, nothing read outside the array."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.tiles import (
    BEGIN,
    BLOCKS,
    COUNT,
    ENDS,
    FIRST,
    GROUP,
    LEADS,
    START,
    num_tiles,
    row_blocks,
    row_tiles,
    shared_blocks,
)  # fmt: skip

ROWS, GROUPS, M = 200, 5, 32
SIZES = st.lists(st.integers(0, 70), min_size=GROUPS, max_size=GROUPS)


def fitted(sizes):
    """The sizes, cut where they go past the array."""
    ends = np.minimum(np.cumsum(sizes), ROWS)
    return np.diff(ends, prepend=0).astype(np.int32)


@settings(deadline=None, max_examples=60)
@given(SIZES)
def test_every_row_lies_in_one_tile_of_its_group(sizes):
    sizes = fitted(sizes)
    tiles = np.asarray(row_tiles(jnp.asarray(sizes), ROWS, M))
    assert tiles.shape == (4, num_tiles(ROWS, GROUPS, M))
    found = np.full(ROWS, -1)
    for t in range(tiles.shape[1]):
        start, first, count = (tiles[i, t] for i in (START, FIRST, COUNT))
        if count:
            assert start % 8 == 0
            assert start >= 0
            assert start + M <= ROWS
            assert first + count <= M
            rows = slice(start + first, start + first + count)
            assert (found[rows] == -1).all(), "a row in two tiles"
            found[rows] = tiles[GROUP, t]
    behind = ROWS - sizes.sum()
    np.testing.assert_array_equal(found, np.repeat(np.arange(GROUPS + 1), [*sizes, behind]))


@settings(deadline=None, max_examples=60)
@given(SIZES)
def test_blocks_of_rows_sum_to_the_groups(sizes):
    """As the weight gradients do: whole blocks of the array, and shared ones with the others' rows (NaN here) left out."""
    sizes, m = fitted(sizes), 8
    x = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)
    blocks = np.asarray(row_blocks(jnp.asarray(sizes), m))
    used = sizes.sum()
    poisoned = jnp.asarray(np.where(np.arange(ROWS)[:, None] < used, x, np.nan))
    shared = np.asarray(shared_blocks(poisoned, jnp.asarray(sizes), m, axis=0)).reshape(GROUPS, 2, m, 3)
    across = np.asarray(shared_blocks(poisoned.T, jnp.asarray(sizes), m, axis=1)).T.reshape(GROUPS, 2, m, 3)
    np.testing.assert_array_equal(shared, across)
    ends = np.cumsum(sizes)
    for e in range(GROUPS):
        total, steps = np.zeros(3), blocks[BLOCKS, e]
        for k in range(steps):
            edge = (k == 0 and blocks[LEADS, e]) or (k == steps - 1 and blocks[ENDS, e])
            row = (blocks[BEGIN, e] + k) * m
            total += (shared[e, min(k, 1)] if edge else x[row : row + m]).sum(axis=0)
        np.testing.assert_allclose(total, x[ends[e] - sizes[e] : ends[e]].sum(axis=0), atol=1e-4)


def test_what_a_tile_list_needs_is_asserted():
    with pytest.raises(AssertionError):
        row_tiles(jnp.zeros(3, jnp.int32), 203, 32)
    with pytest.raises(AssertionError):
        row_tiles(jnp.zeros(3, jnp.int32), 24, 32)
