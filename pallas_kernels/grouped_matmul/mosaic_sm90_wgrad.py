"""Weight gradient of the grouped matmul of bfloat16 numbers, for Hopper GPUs.

R rows, E groups, K and N the dims of a group's matrix; a step sums over 64 rows. Tensor cores take 16-bit operands along
either dim, so both are read as they are stored.
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
from pallas_kernels.tiles import BEGIN, BLOCKS, ENDS, LEADS, row_blocks, shared_blocks, walk
from pallas_kernels.warpgroups import HALF, ROWS


@dataclasses.dataclass(frozen=True)
class _Block:
    """What a block works with. edges: lhs and grad of blocks that two groups share, with zeros for the other's rows."""

    lhs: Any
    grad: Any
    edges: tuple[Any, Any]
    blocks: Any
    out: Any
    lhs_smem: Any
    grad_smem: Any
    staged: Any
    ring: Ring
    config: HopperConfig

    def walk(self, visit):
        """Visits (group, first row of the tile, first column, step)."""
        groups, inner, outer = self.out.shape
        per_group = inner // ROWS

        def visit_tile(tile, column, step):
            group, row = lax.div(tile, jnp.int32(per_group)), lax.rem(tile, jnp.int32(per_group))
            return visit(group, row * ROWS, column * self.config.columns, step)

        return walk(groups * per_group, outer // self.config.columns, self.config.width, jnp.int32(0), visit_tile)

    def copy_in(self):
        def visit(group, row, column, step):
            steps, begin = self.blocks[BLOCKS, group], self.blocks[BEGIN, group]

            def one(k, _):
                slot, barrier = self.ring.next_free(step + k)

                def copy(lhs, grad, block):
                    rows = pl.ds(block * STEP, STEP)
                    some = pl.ds(column, self.config.columns)
                    plgpu.copy_gmem_to_smem(lhs.at[rows, pl.ds(row, ROWS)], self.lhs_smem.at[slot], barrier)
                    plgpu.copy_gmem_to_smem(grad.at[rows, some], self.grad_smem.at[slot], barrier)

                leads = (k == 0) & (self.blocks[LEADS, group] > 0)
                ends = (k == steps - 1) & (self.blocks[ENDS, group] > 0)
                lax.cond(
                    leads | ends,
                    lambda: copy(*self.edges, block=2 * group + jnp.minimum(k, 1)),
                    lambda: copy(self.lhs, self.grad, begin + k),
                )

            lax.fori_loop(0, steps, one, None)
            return step + steps

        self.ring.drain(self.walk(visit))

    def multiply(self):
        self.ring.open()

        def visit(group, row, column, step):
            steps = self.blocks[BLOCKS, group]

            def one_tile(total):
                def one(k, _):
                    slot = self.ring.next_full(step + k)
                    channels = self.lhs_smem.at[slot, :, warpgroups.own_rows()].transpose((1, 0))
                    plgpu.wgmma(total, channels, self.grad_smem.at[slot])
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

            warpgroups.store_tile((total,), self.staged, self.out.at[group], row, column)
            return step + steps

        self.walk(visit)


def wgrad(lhs_RK, grad_RN, sizes_E, out_dtype, config: HopperConfig):
    """Each group's lhs^T grad, [E, K, N], summed in float32; zero for a group without rows. R a multiple of 64."""
    inner, outer = lhs_RK.shape[1], grad_RN.shape[1]
    smem = lambda *shape: plgpu.SMEM((config.stages, *shape), jnp.bfloat16, transforms=warpgroups.tiled(jnp.bfloat16))

    def kernel(lhs, grad, lhs_edges, grad_edges, blocks, out, lhs_smem, grad_smem, staged, full, empty):
        ring = Ring(full, empty, config.stages)
        edges = lhs_edges, grad_edges
        block = _Block(lhs, grad, edges, blocks, out, lhs_smem, grad_smem, staged, ring, config)
        warpgroups.copy_or_multiply(block.copy_in, block.multiply)

    edges = (shared_blocks(x_RC, sizes_E, STEP, axis=0) for x_RC in (lhs_RK, grad_RN))
    return warpgroups.launch(
        kernel,
        name="grouped_wgrad",
        out_type=jax.ShapeDtypeStruct((sizes_E.shape[0], inner, outer), out_dtype),
        scratch_types=[
            smem(STEP, ROWS),
            smem(STEP, config.columns),
            warpgroups.staging(out_dtype),
            *Ring.scratch(config.stages, copies=2, readers=2),
        ],
        num_sms=config.num_sms,
    )(lhs_RK, grad_RN, *edges, row_blocks(sizes_E, STEP))
