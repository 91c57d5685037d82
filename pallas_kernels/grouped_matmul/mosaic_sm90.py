"""Grouped matmul of bfloat16 numbers for Hopper GPUs: rows by their group's matrix, or by its transpose.

R rows, E groups, K the summed dim, N output columns; k = 64 numbers of the summed dim are a step.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import warpgroups
from pallas_kernels.grouped_matmul.config import STEP, HopperConfig
from pallas_kernels.ring import Ring
from pallas_kernels.tiles import ALIGN, COUNT, FIRST, GROUP, START, row_tiles, walk
from pallas_kernels.warpgroups import HALF, ROWS


@dataclasses.dataclass(frozen=True)
class _Block:
    """What a block works with: operands, the tile list and the result in device memory, the ring in shared memory."""

    lhs: Any
    rhs: Any
    tiles: Any
    out: Any
    lhs_smem: Any
    rhs_smem: Any
    staged: Any
    ring: Ring
    transposed: bool
    config: HopperConfig

    def steps_of(self, tile):
        """Steps of the summed dim; none for rows past the last group, which become zero, and past the last tile."""
        real = (self.tiles[COUNT, tile] > 0) & (self.tiles[GROUP, tile] < self.rhs.shape[0])
        return jnp.where(real, self.lhs.shape[1] // STEP, 0)

    def walk(self, visit):
        columns = self.out.shape[1] // self.config.columns
        return walk(self.tiles.shape[1], columns, self.config.width, jnp.int32(0), visit)

    def copy_in(self):
        def visit(tile, column, step):
            group, start = self.tiles[GROUP, tile], pl.multiple_of(self.tiles[START, tile], ALIGN)
            some, steps = pl.ds(column * self.config.columns, self.config.columns), self.steps_of(tile)

            def one(k, _):
                slot, barrier = self.ring.next_free(step + k)
                inside = pl.ds(k * STEP, STEP)
                plgpu.copy_gmem_to_smem(self.lhs.at[pl.ds(start, ROWS), inside], self.lhs_smem.at[slot], barrier)
                matrix = self.rhs.at[group, some, inside] if self.transposed else self.rhs.at[group, inside, some]
                plgpu.copy_gmem_to_smem(matrix, self.rhs_smem.at[slot], barrier)

            lax.fori_loop(0, steps, one, None)
            return step + steps

        self.ring.drain(self.walk(visit))

    def multiply(self):
        self.ring.open()

        def visit(tile, column, step):
            steps = self.steps_of(tile)

            def one_tile(total):
                def one(k, _):
                    slot = self.ring.next_full(step + k)
                    matrix = self.rhs_smem.at[slot]
                    matrix = matrix.transpose((1, 0)) if self.transposed else matrix
                    plgpu.wgmma(total, self.lhs_smem.at[slot, warpgroups.own_rows()], matrix)
                    plgpu.wgmma_wait(1)  # the one before has read its slot

                    @pl.when(k > 0)
                    def _():
                        self.ring.release(self.ring.slot(step + k - 1))

                lax.fori_loop(0, steps, one, None)
                return total[...]

            total = pl.run_scoped(one_tile, plgpu.ACC((HALF, self.config.columns), jnp.float32))

            @pl.when(steps > 0)
            def _():
                self.ring.release(self.ring.slot(step + steps - 1))

            place = self.tiles[START, tile], column * self.config.columns
            rows = self.tiles[FIRST, tile], self.tiles[COUNT, tile]
            warpgroups.store_tile((total,), self.staged, self.out, *place, *rows)
            return step + steps

        self.walk(visit)


def grouped_matmul(lhs_RK, rhs, sizes_E, out_dtype, config: HopperConfig, *, transposed: bool = False):
    """Rows times their group's matrix [E, K, N], or the transpose of [E, N, K]. R at least 128 and divisible by 8."""
    outer = rhs.shape[1 if transposed else 2]
    matrix = (config.columns, STEP) if transposed else (STEP, config.columns)
    smem = lambda *shape: plgpu.SMEM((config.stages, *shape), jnp.bfloat16, transforms=warpgroups.tiled(jnp.bfloat16))

    def kernel(lhs, rhs, tiles, out, lhs_smem, rhs_smem, staged, full, empty):
        ring = Ring(full, empty, config.stages)
        block = _Block(lhs, rhs, tiles, out, lhs_smem, rhs_smem, staged, ring, transposed, config)
        warpgroups.copy_or_multiply(block.copy_in, block.multiply)

    return warpgroups.launch(
        kernel,
        name="grouped_matmul_transposed" if transposed else "grouped_matmul",
        out_type=jax.ShapeDtypeStruct((lhs_RK.shape[0], outer), out_dtype),
        scratch_types=[
            smem(ROWS, STEP),
            smem(*matrix),
            warpgroups.staging(out_dtype),
            *Ring.scratch(config.stages, copies=2, readers=2),
        ],
        num_sms=config.num_sms,
    )(lhs_RK, rhs, row_tiles(sizes_E, lhs_RK.shape[0], ROWS))
