"""Sums of each token's rows for Hopper: a gather by bulk loads and a sum in float32, in the order of the choices.

T tokens, k choices, R rows, D columns in lines of 256. A thread block is one warpgroup that walks its share of the pieces
of tokens' rows, two in shared memory: while one is summed, the k parts of the next are on their way. Nothing is added in
memory, so there are no atomics and the bits are the same every time.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.combine.config import Tiles

_LINE = 256  # the most values along a dim of a bulk copy


def why_not(rows_shape, dtype, top_k: int) -> str:
    """Why this kernel doesn't do it; "" where it does."""
    if 0 in rows_shape or not top_k:
        return "the kernel needs a row and a choice"
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"the kernel sums bfloat16 and float32, not {jnp.dtype(dtype).name}"
    if rows_shape[-1] % _LINE:
        return f"the kernel takes columns in multiples of {_LINE}, not {rows_shape[-1]}"
    return "" if top_k <= 32 else f"the kernel takes up to 32 choices, not {top_k}"


def combine(rows_RD, row_of_pair_Tk, tiles: Tiles):
    """-> [T, D], in the rows' dtype."""
    (num_tokens, top_k), (num_rows, columns), dtype = row_of_pair_Tk.shape, rows_RD.shape, rows_RD.dtype
    per_row = columns // _LINE
    lines = next(n for n in (8, 4, 2, 1) if n * _LINE <= tiles.columns and per_row % n == 0)
    pieces = per_row // lines
    num_steps = num_tokens * pieces
    blocks = min(tiles.blocks, num_steps)
    held = plgpu.Layout.WG_STRIDED((lines, _LINE), vec_size=min(lines * _LINE // 128, 16 // dtype.itemsize))

    def kernel(rows, places, sums, parts, staged, arrived):
        at = lambda row, step: pl.ds(row * per_row + lax.rem(step, pieces) * lines, lines)

        def places_of(step):
            token = lax.div(jnp.minimum(step, num_steps - 1), pieces)
            return [places[token * top_k + j] for j in range(top_k)]

        def fetch(step, slot, found):
            for j, place in enumerate(found):
                copy = lambda j=j, place=place: plgpu.copy_gmem_to_smem(
                    rows.at[at(place, step)], parts.at[slot, j], arrived.at[slot]
                )
                lax.cond(place >= 0, copy, lambda: plgpu.barrier_arrive(arrived.at[slot]))

        def part(j, place, slot):
            x = plgpu.load(parts.at[slot, j], layout=held).astype(jnp.float32)
            # Chosen, not multiplied by 0: what stands there may be NaN.
            return jnp.where(jnp.full(x.shape, place) >= 0, x, jnp.zeros_like(x))

        def add_up(step, slot, found):
            plgpu.barrier_wait(arrived.at[slot])
            total = part(0, found[0], slot)
            for j in range(1, top_k):
                total += part(j, found[j], slot)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            staged[...] = total.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staged, sums.at[at(lax.div(step, pieces), step)])

        first = lax.axis_index("block")
        mine = lax.div(num_steps - first + blocks - 1, blocks)
        found = places_of(first)
        fetch(first, 0, found)

        def body(i, found):
            step, slot = first + i * blocks, lax.rem(i, 2)
            after = places_of(step + blocks)
            pl.when(i + 1 < mine)(lambda: fetch(step + blocks, 1 - slot, after))
            add_up(step, slot, found)
            return after

        lax.fori_loop(0, mine, body, found)
        plgpu.wait_smem_to_gmem(0)

    sums = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((num_tokens * per_row, _LINE), dtype),
        scratch_types=[
            plgpu.SMEM((2, top_k, lines, _LINE), dtype),
            plgpu.SMEM((lines, _LINE), dtype),
            plgpu.Barrier(num_arrivals=top_k, num_barriers=2),
        ],
        grid=(blocks,),
        grid_names=("block",),
        kernel_name="combine",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(rows_RD.reshape(num_rows * per_row, _LINE), row_of_pair_Tk.reshape(-1))
    return sums.reshape(num_tokens, columns)
