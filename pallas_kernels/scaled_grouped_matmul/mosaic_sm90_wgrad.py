"""Weight gradient of the grouped matmul of block-scaled float8 numbers, for Hopper GPUs.

R rows, E groups, K and N the dims of a group's matrix, B = R / 128 blocks of rows.

Both operands are stored with rows innermost, as the tensor cores take float8 only along the summed dim, and have a scale
for every channel and block of 128 rows: twice the multiplications of the forward product.
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
from pallas_kernels.scaled_grouped_matmul.config import BLOCK, GradConfig
from pallas_kernels.scaled_grouped_matmul.mosaic_sm90 import row_scales, scaled
from pallas_kernels.tiles import BEGIN, BLOCKS, ENDS, LEADS, row_blocks, shared_blocks, walk
from pallas_kernels.warpgroups import HALF, ROWS


@dataclasses.dataclass(frozen=True)
class _Block:
    """What a block works with. edges: grad and lhs of blocks that two groups share, with zeros for the other's rows; empty
    when there are no such blocks. total: what to add to, the same memory as `out`, or None.
    """

    grad: Any
    grad_scales: Any
    lhs: Any
    lhs_scales: Any
    blocks: Any
    edges: tuple[Any, ...]
    total: Any
    out: Any
    grad_smem: Any
    lhs_smem: Any
    ring: Ring
    config: GradConfig

    def walk(self, visit):
        """Visits (group, first row of the tile, first column, step)."""
        groups, outer, inner = self.out.shape
        per_group = outer // ROWS

        def visit_tile(tile, column, step):
            group, row = lax.div(tile, jnp.int32(per_group)), lax.rem(tile, jnp.int32(per_group))
            return visit(group, row * ROWS, column * BLOCK, step)

        return walk(groups * per_group, inner // BLOCK, self.config.width, jnp.int32(0), visit_tile)

    def copy_in(self):
        def visit(group, row, column, step):
            steps, begin = self.blocks[BLOCKS, group], self.blocks[BEGIN, group]

            def one(k, _):
                slot, barrier = self.ring.next_free(step + k)

                def copy(grad, lhs, block):
                    inside = pl.ds(block * BLOCK, BLOCK)
                    plgpu.copy_gmem_to_smem(grad.at[pl.ds(row, ROWS), inside], self.grad_smem.at[slot], barrier)
                    plgpu.copy_gmem_to_smem(lhs.at[pl.ds(column, BLOCK), inside], self.lhs_smem.at[slot], barrier)

                if not self.edges:
                    copy(self.grad, self.lhs, begin + k)
                    return
                leads = (k == 0) & (self.blocks[LEADS, group] > 0)
                ends = (k == steps - 1) & (self.blocks[ENDS, group] > 0)
                lax.cond(
                    leads | ends,
                    lambda: copy(self.edges[0], self.edges[1], 2 * group + jnp.minimum(k, 1)),
                    lambda: copy(self.grad, self.lhs, begin + k),
                )

            lax.fori_loop(0, steps, one, None)
            return step + steps

        self.ring.drain(self.walk(visit))

    def multiply(self):
        self.ring.open()

        def visit(group, row, column, step):
            steps, begin = self.blocks[BLOCKS, group], self.blocks[BEGIN, group]
            mine = pl.ds(row + warpgroups.me() * HALF, HALF)

            def one(k, total):
                partial, rows, columns = self.product(self.ring.next_full(step + k), begin + k, mine, column)
                self.ring.release(self.ring.slot(step + k))
                return total + scaled(scaled(partial, columns, 1), rows, 0)

            total = lax.fori_loop(0, steps, one, warpgroups.zeros(HALF, BLOCK))
            self.store((group, mine, pl.ds(column, BLOCK)), total, steps)
            return step + steps

        self.walk(visit)

    def product(self, slot, block, mine, column):
        """This warpgroup's sum over 128 rows, and the scales of its rows and columns."""

        def multiply(partial):
            matrix = self.lhs_smem.at[slot].transpose((1, 0))
            plgpu.wgmma(partial, self.grad_smem.at[slot, warpgroups.own_rows()], matrix)
            # While the tensor cores work: scales come from the L2 cache straight into registers.
            rows = row_scales(self.grad_scales.at[block, mine])
            some = self.lhs_scales.at[block, pl.ds(column, BLOCK)]
            columns = plgpu.load(some, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
            return partial[...], rows, columns

        return pl.run_scoped(multiply, plgpu.ACC((HALF, BLOCK), jnp.float32))

    def store(self, place, sums, steps):
        """A thread's neighbouring columns are 32 bytes with its quad's, a whole sector: no detour by shared memory."""
        if self.total is None:
            self.out[place] = sums
            return

        @pl.when(steps > 0)
        def _():
            before = plgpu.load(self.total.at[place], layout=plgpu.Layout.WGMMA, optimized=False)
            self.out[place] = before + sums


def wgrad(grad_NR, grad_scales_BN, lhs_KR, lhs_scales_BK, sizes_E, total_ENK, aligned: bool, config: GradConfig):
    """As in the package's `wgrad`, with the scales transposed."""
    edges = () if aligned else tuple(shared_blocks(x, sizes_E, BLOCK, axis=1) for x in (grad_NR, lhs_KR))
    totals = () if total_ENK is None else (total_ENK,)
    smem = lambda rows, dtype: plgpu.SMEM((config.stages, rows, BLOCK), dtype, transforms=warpgroups.tiled(dtype))

    def kernel(grad, grad_scales, lhs, lhs_scales, blocks, *refs):
        *rest, out, grad_smem, lhs_smem, full, empty = refs
        edge_refs, total = tuple(rest[: len(edges)]), rest[len(edges)] if totals else None
        operands = grad, grad_scales, lhs, lhs_scales, blocks, edge_refs, total, out
        block = _Block(*operands, grad_smem, lhs_smem, Ring(full, empty, config.stages), config)
        warpgroups.copy_or_multiply(block.copy_in, block.multiply)

    operands = (grad_NR, grad_scales_BN, lhs_KR, lhs_scales_BK, row_blocks(sizes_E, BLOCK), *edges, *totals)
    return warpgroups.launch(
        kernel,
        name="scaled_grouped_wgrad",
        out_type=jax.ShapeDtypeStruct((sizes_E.shape[0], grad_NR.shape[0], lhs_KR.shape[0]), jnp.float32),
        scratch_types=[
            smem(ROWS, grad_NR.dtype),
            smem(BLOCK, lhs_KR.dtype),
            *Ring.scratch(config.stages, copies=2, readers=2),
        ],
        num_sms=config.num_sms,
        in_place=len(operands) - 1 if totals else None,
    )(*operands)
