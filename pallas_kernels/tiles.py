"""Lists of row tiles for grouped kernels, made by XLA with static shapes and read by kernels from device memory.

R rows, E groups, t tiles, m rows of a tile.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

GROUP, START, FIRST, COUNT = range(4)
"""Rows of a tile list: the tile's group, the row it is read from, its first row that belongs to the group, how many do."""


ALIGN = 8
"""Rows that a tile's first row is a multiple of: shared memory is swizzled in units of eight rows."""


def num_tiles(num_rows: int, num_groups: int, m: int) -> int:
    """Tiles that any sizes need at most: every group's last one and that of the rows behind all may be partly filled."""
    return (num_rows + (ALIGN - 1) * (num_groups + 1)) // m + num_groups + 1


def row_tiles(sizes_E, num_rows: int, m: int):
    """int32 [4, t]: tiles cut from just before the groups' starts, then those of the rows past the last group (group E).

    A tile reads rows [START, START + m), always inside the array, so R and m must be multiples of 8 and R at least m;
    FIRST counts from START. Tiles past the last one have COUNT 0.
    """
    assert num_rows % ALIGN == 0 and m % ALIGN == 0 and num_rows >= m, (num_rows, m)
    num_groups = sizes_E.shape[0]
    used = jnp.sum(sizes_E, dtype=jnp.int32)
    sizes_e = jnp.concatenate([sizes_E.astype(jnp.int32), (num_rows - used)[None]])
    ends_e = jnp.cumsum(sizes_e)
    starts_e = ends_e - sizes_e
    lows_e = starts_e // ALIGN * ALIGN
    tiles_e = jnp.where(sizes_e > 0, -(-(ends_e - lows_e) // m), 0)
    last_e = jnp.cumsum(tiles_e)
    t = jnp.arange(num_tiles(num_rows, num_groups, m), dtype=jnp.int32)
    group_t = jnp.minimum((t[:, None] >= last_e[None]).sum(axis=1, dtype=jnp.int32), num_groups)
    cut_t = lows_e[group_t] + (t - (last_e - tiles_e)[group_t]) * m
    begin_t, end_t = jnp.maximum(cut_t, starts_e[group_t]), jnp.minimum(cut_t + m, ends_e[group_t])
    count_t = jnp.where(t < last_e[-1], end_t - begin_t, 0)
    read_t = jnp.clip(cut_t, 0, num_rows - m)
    return jnp.stack([group_t, read_t, jnp.where(count_t > 0, begin_t - read_t, 0), count_t])


def walk(num_row_tiles: int, num_column_tiles: int, width: int, step0, visit):
    """Calls `visit(row tile, column tile, step) -> step` for the output tiles of this block, from inside a kernel.

    Blocks of the grid axis `sm` take turns on a path that runs down `width` column tiles and up the next ones, so that
    blocks side by side in time share operands in the L2 cache.
    """

    @plgpu.nd_loop((num_row_tiles * num_column_tiles,), collective_axes="sm", init_carry=step0)
    def last(info, carry):
        row, column = plgpu.planar_snake(info.index[0], (num_row_tiles, num_column_tiles), 1, width)
        return visit(row, column, carry)

    return last


def store_rows(staged, out, row, column, first, count) -> None:
    """Copies rows [first, first + count) of a shared-memory tile to rows `row + first ...` of `out`, columns `column ...`.

    A bulk copy has a static size, so a count is put together from powers of two, each copied or not. No row of a
    neighbour is touched. The copies make one group; `staged` must be committed, its rows each a tile of its own.
    """
    rows, width = staged.shape
    size = 1 << (rows.bit_length() - 1)
    while size:
        part = lax.bitwise_and(count, jnp.int32(size))

        @pl.when(part != 0)
        def _(first=first, size=size):
            target = out.at[pl.ds(row + first, size), pl.ds(column, width)]
            plgpu.copy_smem_to_gmem(staged.at[pl.ds(first, size)], target, commit_group=False)

        first, size = first + part, size // 2
    plgpu.commit_smem_to_gmem_group()


LEADS, ENDS, BLOCKS, BEGIN = range(4)
"""Rows of a block list, by group: its first and its last block are shared with others (0 or 1), its blocks, the first."""


def row_blocks(sizes_E, m: int):
    """int32 [4, E]: the blocks of m rows, cut at multiples of m, that hold a group's rows; for sums over rows."""
    ends_E = jnp.cumsum(sizes_E.astype(jnp.int32))
    starts_E = ends_E - sizes_E
    begin_E = starts_E // m
    blocks_E = jnp.where(sizes_E > 0, -(-ends_E // m) - begin_E, 0)
    return jnp.stack([(starts_E % m > 0).astype(jnp.int32), (ends_E % m > 0).astype(jnp.int32), blocks_E, begin_E])


def shared_blocks(x, sizes_E, m: int, *, axis: int):
    """Every group's first and last block of m rows, with zeros for the rows of others, whatever those hold.

    A sum over rows takes these in place of blocks that a group doesn't fill: a bulk copy cannot mask.

    Args: x [R, C] with axis 0 or [C, R] with axis 1; R a multiple of m.  Returns: the same with 2 E m rows.
    """
    num_rows = x.shape[axis]
    ends_E = jnp.cumsum(sizes_E.astype(jnp.int32))
    starts_E = ends_E - sizes_E
    both_E2 = jnp.stack([starts_E, jnp.maximum(ends_E - 1, 0)], axis=1) // m
    block_e = jnp.clip(both_E2.reshape(-1), 0, num_rows // m - 1)
    rows_r = (block_e[:, None] * m + jnp.arange(m, dtype=jnp.int32)[None]).reshape(-1)
    low_r, high_r = (jnp.repeat(bound_E, 2 * m) for bound_E in (starts_E, ends_E))
    inside_r = (rows_r >= low_r) & (rows_r < high_r)
    inside = inside_r[:, None] if axis == 0 else inside_r[None]
    return jnp.where(inside, jnp.take(x, rows_r, axis=axis), jnp.zeros((), x.dtype))
