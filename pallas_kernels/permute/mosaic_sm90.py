"""Rows to their places for Hopper: every token's row is read once, quantised once, and stored to each of its places.

T tokens, k choices, R result rows, D columns in B lines of L. A thread block is one warpgroup that walks its share of the
tokens, n at a time; while it stores one lot, the next one's bulk load runs. Beside its tokens it looks after R / (T / n)
result rows a step and fills those that hold no token with zeros.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.permute.config import Tiles
from pallas_kernels.quantize.formats import Format
from pallas_kernels.quantize.mosaic_sm90 import quantise_lines, swizzled

_ROWS = 64  # lines of 128 that a warpgroup quantises at a time
_MOST_LINES = 256  # of one bulk copy
_LOOKED_AT = 16  # result rows whose tokens are fetched side by side


class Cut(NamedTuple):
    """Lines of a row, tokens a step, lines of a step with padding, steps, result rows a step, thread blocks."""

    lines: int
    tokens: int
    padded: int
    steps: int
    rows: int
    blocks: int


def line_width(columns: int) -> int:
    """Values of a line so that a row is at most 256 lines of at most 256 values; 0 where there is no such cut."""
    return next((w for w in (256, 128, 64) if columns % w == 0 and columns // w <= _MOST_LINES), 0)


def why_not(x_shape, dtype, format: Format | None) -> str:
    """Why these kernels don't do it; "" where they do."""
    columns = x_shape[-1]
    if 0 in x_shape:
        return "the kernel needs a row"
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"the kernel moves bfloat16 and float32, not {jnp.dtype(dtype).name}"
    if format is None:
        return "" if line_width(columns) else f"the kernel takes columns in multiples of 64 up to 65536, not {columns}"
    if format.kind != "block" or format.rows != 1 or format.columns != 128:
        return f"there is a kernel for 1x128 tiles with float32 scales, not for {format}"
    if columns % 1024 or columns > 128 * 128:
        return f"the quantising kernel takes columns in multiples of 1024 up to 16384, not {columns}"
    return ""


def _cut(num_tokens: int, num_rows: int, lines: int, tiles: Tiles, multiple: int) -> Cut:
    """As few tokens a step as leave the fewest lines of its multiple idle."""
    padded = lambda n: -(-n * lines // multiple) * multiple
    fits = [n for n in range(1, 9) if padded(n) <= 128] or [1]
    tokens = tiles.tokens or max(fits, key=lambda n: (n * lines / padded(n), -n))
    steps = -(-num_tokens // tokens)
    return Cut(lines, tokens, padded(tokens), steps, -(-num_rows // steps), min(tiles.blocks, steps))


def quantize_and_permute(x_TD, row_of_pair_Tk, token_of_row_R, format: Format, tiles: Tiles):
    """-> codes [R, D], scales [R, D / 128]."""
    (num_tokens, columns), num_rows = x_TD.shape, token_of_row_R.shape[0]
    cut = _cut(num_tokens, num_rows, columns // 128, tiles, _ROWS)
    lines, dtype = cut.lines, format.dtype
    empty_lines = -(-lines // _ROWS) * _ROWS

    def kernel(x, places, tokens, codes, scales, x_now, codes_now, scales_now, nothing, ones, arrived):
        nothing[...] = jnp.zeros((empty_lines, 128), dtype)
        ones[...] = jnp.ones(ones.shape, jnp.float32)
        row = lambda ref, i: ref.at[pl.ds(i * lines if isinstance(i, int) else pl.multiple_of(i * lines, 8), lines)]

        def fetch(step, slot):
            for i in range(cut.tokens):
                token = jnp.minimum(step * cut.tokens + i, num_tokens - 1)
                plgpu.copy_gmem_to_smem(row(x, token), row(x_now, i), arrived)

        def store(place, i):
            plgpu.copy_smem_to_gmem(row(codes_now, i), row(codes, place), commit_group=False)
            plgpu.copy_smem_to_gmem(row(scales_now, i), row(scales, place), commit_group=False)

        def clear(place):
            plgpu.copy_smem_to_gmem(nothing.at[pl.ds(0, lines)], row(codes, place), commit_group=False)
            plgpu.copy_smem_to_gmem(ones.at[pl.ds(0, lines)], row(scales, place), commit_group=False)

        def quantise():
            @pl.loop(0, cut.padded // _ROWS)
            def _(chunk):
                at = pl.ds(pl.multiple_of(chunk * _ROWS, _ROWS), _ROWS)
                codes_now[at], scales_now[at] = quantise_lines(x_now.at[at], format)

        def body(step, next_step, slot):
            found = _places(places, step, cut, num_tokens)
            plgpu.barrier_wait(arrived)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            quantise()
            plgpu.commit_smem()
            pl.when(next_step < cut.steps)(lambda: fetch(next_step, 0))
            for place, i in found:
                pl.when(place >= 0)(functools.partial(store, place, i))
            _clear_empty(tokens, step, cut, num_rows, clear)
            plgpu.commit_smem_to_gmem_group()

        _walk(cut, fetch, body)

    staged = lambda kind: plgpu.SMEM((cut.padded, 128), kind, transforms=swizzled(kind))
    codes, scales = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((num_rows * lines, 128), dtype),
            jax.ShapeDtypeStruct((num_rows * lines,), jnp.float32),
        ),
        scratch_types=[
            staged(x_TD.dtype),
            staged(dtype),
            plgpu.SMEM((cut.padded,), jnp.float32),
            plgpu.SMEM((empty_lines, 128), dtype, transforms=swizzled(dtype)),
            plgpu.SMEM((-(-lines // 128) * 128,), jnp.float32),
            plgpu.Barrier(num_arrivals=cut.tokens),
        ],
        **_launch(cut, "quantize_and_permute"),
    )(x_TD.reshape(num_tokens * lines, 128), row_of_pair_Tk.reshape(-1), token_of_row_R)
    return codes.reshape(num_rows, columns), scales.reshape(num_rows, lines)


def permute(x_TD, row_of_pair_Tk, token_of_row_R, tiles: Tiles):
    """-> rows [R, D] as they are."""
    (num_tokens, columns), num_rows = x_TD.shape, token_of_row_R.shape[0]
    width = line_width(columns)
    cut = _cut(num_tokens, num_rows, columns // width, tiles, 1)
    lines = cut.lines
    row = lambda ref, i: ref.at[pl.ds(i * lines, lines)]

    def kernel(x, places, tokens, rows, x_now, nothing, arrived):
        nothing[...] = jnp.zeros(nothing.shape, x.dtype)
        plgpu.commit_smem()

        def fetch(step, slot):
            for i in range(cut.tokens):
                token = jnp.minimum(step * cut.tokens + i, num_tokens - 1)
                plgpu.copy_gmem_to_smem(row(x, token), row(x_now.at[slot], i), arrived.at[slot])

        def store(place, i, slot):
            plgpu.copy_smem_to_gmem(row(x_now.at[slot], i), row(rows, place), commit_group=False)

        def clear(place):
            plgpu.copy_smem_to_gmem(nothing.at[pl.ds(0, lines)], row(rows, place), commit_group=False)

        def body(step, next_step, slot):
            found = _places(places, step, cut, num_tokens)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            pl.when(next_step < cut.steps)(lambda: fetch(next_step, 1 - slot))
            plgpu.barrier_wait(arrived.at[slot])
            for place, i in found:
                pl.when(place >= 0)(functools.partial(store, place, i, slot))
            _clear_empty(tokens, step, cut, num_rows, clear)
            plgpu.commit_smem_to_gmem_group()

        _walk(cut, fetch, body)

    whole = -(-lines * width // 1024) * 1024 // width  # a warpgroup clears eight values a thread at a time
    rows = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((num_rows * lines, width), x_TD.dtype),
        scratch_types=[
            plgpu.SMEM((2, cut.tokens * lines, width), x_TD.dtype),
            plgpu.SMEM((whole, width), x_TD.dtype),
            plgpu.Barrier(num_arrivals=cut.tokens, num_barriers=2),
        ],
        **_launch(cut, "permute"),
    )(x_TD.reshape(num_tokens * lines, width), row_of_pair_Tk.reshape(-1), token_of_row_R)
    return rows.reshape(num_rows, columns)


def _launch(cut: Cut, name: str) -> dict:
    return dict(
        grid=(cut.blocks,),
        grid_names=("block",),
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )


def _walk(cut: Cut, fetch, body) -> None:
    """`body(step, next step, slot)` for this thread block's steps, in slots 0 and 1 by turns; waits for the last stores.

    The first step is fetched here, each other one by the body before it.
    """
    first = lax.axis_index("block")
    fetch(first, 0)

    @pl.loop(0, lax.div(cut.steps - first + cut.blocks - 1, cut.blocks))
    def _(i):
        step = first + i * cut.blocks
        body(step, step + cut.blocks, lax.rem(i, 2))

    plgpu.wait_smem_to_gmem(0)


def _places(places, step, cut: Cut, num_tokens: int):
    """(place, token's number in the step) of all pairs of a step; -1 for tokens past the last."""
    top_k = places.shape[0] // num_tokens
    found = []
    for i in range(cut.tokens):
        token = step * cut.tokens + i
        known = jnp.minimum(token, num_tokens - 1) * top_k
        found += [(jnp.where(token < num_tokens, places[known + j], -1), i) for j in range(top_k)]
    return found


def _clear_empty(tokens, step, cut: Cut, num_rows: int, clear) -> None:
    """Clears those of this step's result rows that hold no token."""
    start = step * cut.rows

    def some(first, number):
        rows = [first + i for i in range(number)]
        held = [tokens[jnp.minimum(row, num_rows - 1)] for row in rows]
        for row, token in zip(rows, held, strict=True):
            pl.when((token < 0) & (row < num_rows))(functools.partial(clear, row))

    whole, rest = divmod(cut.rows, _LOOKED_AT)
    if whole == 1:
        some(start, _LOOKED_AT)
    elif whole:
        pl.loop(0, whole)(lambda i: some(start + i * _LOOKED_AT, _LOOKED_AT))
    if rest:
        some(start + whole * _LOOKED_AT, rest)
