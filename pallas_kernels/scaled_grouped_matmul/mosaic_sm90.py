"""Grouped matmul of block-scaled float8 numbers for Hopper GPUs: rows by the transpose of their group's matrix.

R rows, E groups, K the summed dim, N output columns, B = K / 128 blocks, C = N / 128.

Tensor cores add float8 products with about 14 bits, so a product over 128 of K goes into a fresh accumulator and is then
added, scaled, in float32 (as DeepSeek-V3 does, arXiv 2412.19437 section 3.3.2). While one of the two multiplying
warpgroups adds, the other's products run.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import warpgroups
from pallas_kernels.ring import Ring
from pallas_kernels.scaled_grouped_matmul.config import BLOCK, Config
from pallas_kernels.tiles import ALIGN, COUNT, FIRST, GROUP, START, row_tiles, walk
from pallas_kernels.warpgroups import HALF, ROWS


def row_scales(ref):
    """64 scales, one a row of an accumulator, from device memory into registers."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)


def scaled(partial, scales, dim: int):
    """The partial sum times scales of its rows (dim 0) or columns (dim 1)."""
    return partial * lax.broadcast_in_dim(scales, partial.shape, (dim,))


@dataclasses.dataclass(frozen=True)
class _Block:
    """What a block works with: operands, the tile list and the result in device memory, the ring in shared memory."""

    lhs: Any
    lhs_scales: Any
    rhs: Any
    rhs_scales: Any
    tiles: Any
    out: Any
    lhs_smem: Any
    rhs_smem: Any
    staged: Any
    ring: Ring
    config: Config

    @property
    def num_blocks(self) -> int:
        return self.lhs.shape[1] // BLOCK

    def steps_of(self, tile):
        """Steps of the summed dim; none for rows past the last group, which become zero, and past the last tile."""
        real = (self.tiles[COUNT, tile] > 0) & (self.tiles[GROUP, tile] < self.rhs.shape[0])
        return jnp.where(real, self.num_blocks, 0)

    def walk(self, visit):
        columns = self.out.shape[1] // self.config.columns
        return walk(self.tiles.shape[1], columns, self.config.width, jnp.int32(0), visit)

    def copy_in(self):
        def visit(tile, column, step):
            group, start = self.tiles[GROUP, tile], pl.multiple_of(self.tiles[START, tile], ALIGN)
            some, steps = pl.ds(column * self.config.columns, self.config.columns), self.steps_of(tile)

            def one(k, _):
                slot, barrier = self.ring.next_free(step + k)
                inside = pl.ds(k * BLOCK, BLOCK)
                plgpu.copy_gmem_to_smem(self.lhs.at[pl.ds(start, ROWS), inside], self.lhs_smem.at[slot], barrier)
                plgpu.copy_gmem_to_smem(self.rhs.at[group, some, inside], self.rhs_smem.at[slot], barrier)

            lax.fori_loop(0, steps, one, None)
            return step + steps

        self.ring.drain(self.walk(visit))

    def multiply(self):
        self.ring.open()

        def visit(tile, column, step):
            steps = self.steps_of(tile)
            place = self.tiles[START, tile], column * self.config.columns
            totals = self.totals(tile, column, step, steps)
            rows = self.tiles[FIRST, tile], self.tiles[COUNT, tile]
            warpgroups.store_tile(totals, self.staged, self.out, *place, *rows)
            return step + steps

        self.walk(visit)

    def totals(self, tile, column, step, steps):
        """This warpgroup's 64 rows of the tile, by 128 columns."""
        parts = self.config.columns // BLOCK
        group = jnp.minimum(self.tiles[GROUP, tile], self.rhs.shape[0] - 1)
        row = self.tiles[START, tile] + warpgroups.me() * HALF

        def scales_of(k):
            weights = tuple(self.rhs_scales[group, column * parts + part, k] for part in range(parts))
            return row_scales(self.lhs_scales.at[k, pl.ds(row, HALF)]), weights

        def one(k, carry):
            sums, (rows, weights) = carry
            # A step ahead and straight into registers: no product waits for device memory, and nothing that a bulk copy
            # wrote is read but by tensor cores, so that no fence stands between steps.
            ahead = scales_of(jnp.minimum(k + 1, self.num_blocks - 1))
            slot = self.ring.next_full(step + k)
            added = []
            for part in range(parts):

                def multiply(partial, part=part):
                    matrix = self.rhs_smem.at[slot, pl.ds(part * BLOCK, BLOCK)].transpose((1, 0))
                    plgpu.wgmma(partial, self.lhs_smem.at[slot, warpgroups.own_rows()], matrix)
                    return partial[...]

                partial = pl.run_scoped(multiply, plgpu.ACC((HALF, BLOCK), jnp.float32))
                if part == parts - 1:
                    self.ring.release(slot)
                added.append(sums[part] + scaled(partial, rows * weights[part], 0))
            return tuple(added), ahead

        start = tuple(warpgroups.zeros(HALF, BLOCK) for _ in range(parts)), scales_of(0)
        return lax.fori_loop(0, steps, one, start)[0]


def grouped_matmul(lhs_RK, lhs_scales_BR, rhs_ENK, rhs_scales_ECB, sizes_E, out_dtype, config: Config):
    """As in the package's `scaled_grouped_matmul`, with the rows' scales transposed. R at least 128 and divisible by 8."""
    smem = lambda rows, dtype: plgpu.SMEM((config.stages, rows, BLOCK), dtype, transforms=warpgroups.tiled(dtype))

    def kernel(lhs, lhs_scales, rhs, rhs_scales, tiles, out, lhs_smem, rhs_smem, staged, full, empty):
        memory = lhs, lhs_scales, rhs, rhs_scales, tiles, out, lhs_smem, rhs_smem, staged
        block = _Block(*memory, Ring(full, empty, config.stages), config)
        warpgroups.copy_or_multiply(block.copy_in, block.multiply)

    return warpgroups.launch(
        kernel,
        name="scaled_grouped_matmul",
        out_type=jax.ShapeDtypeStruct((lhs_RK.shape[0], rhs_ENK.shape[1]), out_dtype),
        scratch_types=[
            smem(ROWS, lhs_RK.dtype),
            smem(config.columns, rhs_ENK.dtype),
            warpgroups.staging(out_dtype),
            *Ring.scratch(config.stages, copies=2, readers=2),
        ],
        num_sms=config.num_sms,
    )(lhs_RK, lhs_scales_BR, rhs_ENK, rhs_scales_ECB, row_tiles(sizes_E, lhs_RK.shape[0], ROWS))
