"""Quantisation for Hopper: codes of an array, of its transpose, or of both from one read.

R rows, D columns, B = D / 128; E arrays one below the other (R counts the rows of all). A thread block is one warpgroup
that walks its share of tiles: the next tile's bulk load runs while this one's is worked on, results leave by bulk stores.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.quantize import rounding, scales
from pallas_kernels.quantize.config import Tiles
from pallas_kernels.quantize.formats import Format, Quantised

_ROWS = 64  # a warpgroup holds 64 x 128 values in 64 registers of each thread


class Wanted(NamedTuple):
    """Which copies: along rows, along columns (transposed)."""

    rows: bool
    columns: bool


def why_not(format: Format, shape: tuple[int, ...], dtype) -> str:
    """Why these kernels don't do it; "" where they do."""
    if format.kind != "block" or format.columns != 128:
        return f"there is a kernel for 1x128 and 128x128 tiles with float32 scales, not for {format}"
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"the kernel reads bfloat16 and float32, not {jnp.dtype(dtype).name}"
    if shape[-1] % 128 or 0 in shape:
        return f"the kernel takes columns in multiples of 128 and a row at least, not {list(shape[-2:])}"
    return ""


def cast(x, format: Format, wanted: Wanted, tiles: Tiles) -> tuple[Quantised, ...]:
    """x [..., R, D] quantised along its rows, along its columns as the transpose, or both, in this order."""
    *batch, rows, columns = x.shape
    if missing := -rows % 128:  # never with tiles along the rows, which must fill them
        x = jnp.pad(x, (*((0, 0),) * len(batch), (0, missing), (0, 0)))
    group = rows + missing
    tiles = tiles.resolved(x.dtype, both=wanted.columns)
    num_tiles = x.size // 128 // (128 if wanted.columns or format.rows == 128 else _ROWS)
    tiles = dataclasses.replace(tiles, blocks=min(tiles.blocks, num_tiles))
    fold = lambda a, height: a.reshape(*batch, height, -1)
    if format.rows == 128:
        *codes, scales_t64 = _squares(x.reshape(-1, columns), group, format, wanted, tiles)
        stored = fold(scales_t64[:, 0], group // 128)
        along_rows = Quantised(fold(codes[0], group), stored)
        along_columns = Quantised(fold(codes[-1], columns), stored.swapaxes(-1, -2))
    else:
        found = _lines(x.reshape(-1, columns), group, format, wanted, tiles)
        cut = lambda a: fold(a, group)[..., :rows, :]
        along_rows = Quantised(cut(found[0]), cut(found[1].T)) if wanted.rows else None
        along_columns = Quantised(fold(found[-2], columns), fold(found[-1].T, columns)) if wanted.columns else None
    sides = (along_rows, wanted.rows), (along_columns, wanted.columns)
    return tuple(side for side, asked in sides if asked and side is not None)


def swizzled(dtype):
    """Shared memory of 128-byte lines, stored so that both rows and columns are read without bank conflicts."""
    return plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128)


def _load(x_lines):
    return plgpu.load(x_lines, layout=plgpu.Layout.WGMMA).astype(jnp.float32)


def _codes(x, dtype):
    """The GPU's conversion saturates, so only the interpreter, whose doesn't, needs the limits spelled out."""
    return rounding.round_to_codes(x, dtype) if compat.interpreting() else x.astype(dtype)


def quantise_lines(x_lines, format: Format):
    """64 x 128 values in shared memory -> (codes, decode scale of each line), in registers."""
    x = _load(x_lines)
    amax = jnp.max(scales.magnitude_bits(x), axis=1)
    encode, decode = scales.block_scales(amax, format.dtype, format.power_of_two, format.loud)
    return _codes(x * lax.broadcast_in_dim(encode, x.shape, (0,)), format.dtype), decode


def _walk(num_tiles: int, tiles: Tiles, tile_shape, x, step, place):
    """Runs `step(tile's place, its values in shared memory)` for every tile of this thread block."""
    block = lax.axis_index("block")
    mine = lax.div(num_tiles - block + tiles.blocks - 1, tiles.blocks)
    at = lambda i: place(block + i * tiles.blocks)
    spec = plgpu.BlockSpec(tile_shape, at, transforms=swizzled(x.dtype))
    pipeline = plgpu.emit_pipeline(
        lambda index, x_tile: step(at(index[0]), x_tile),
        grid=(mine,),
        in_specs=[spec],
        max_concurrent_steps=tiles.stages,
    )
    pipeline(x)
    plgpu.wait_smem_to_gmem(0)


def _call(body, x, out_types, scratch, tiles: Tiles, name: str):
    return plgpu.kernel(
        body,
        out_type=out_types,
        scratch_types=scratch,
        grid=(tiles.blocks,),
        grid_names=("block",),
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(x)


def _halves(size: int):
    return [pl.ds(start, _ROWS) for start in range(0, size, _ROWS)]


def _lines(x_RD, group: int, format: Format, wanted: Wanted, tiles: Tiles):
    """1 x 128 tiles. The scales leave the kernel as [B, R], the order in which a matmul's bulk loads want them."""
    (rows, columns), dtype = x_RD.shape, format.dtype
    height = 128 if wanted.columns else _ROWS
    across, down = columns // 128, rows // height
    turned = rows // group * columns
    out_types, scratch = [], []
    if wanted.rows:
        out_types += [jax.ShapeDtypeStruct((rows, columns), dtype), jax.ShapeDtypeStruct((across, rows), jnp.float32)]
        scratch.append(plgpu.SMEM((height, 128), dtype, transforms=swizzled(dtype)))
    if wanted.columns:
        out_types.append(jax.ShapeDtypeStruct((turned, group), dtype))
        out_types.append(jax.ShapeDtypeStruct((group // 128, turned), jnp.float32))
        scratch.append(plgpu.SMEM((128, height), dtype, transforms=swizzled(dtype)))

    def kernel(x, *refs):
        outs, staged = refs[: len(out_types)], refs[len(out_types) :]

        def write(source, codes_tile, codes, stored, place, line, start):
            """Quantises the tile and sends it to codes at `place`; scales go to row `line` of `stored` from `start`."""
            for half in _halves(source.shape[0]):
                codes_tile[half], decode = quantise_lines(source.at[half], format)
                stored[line, pl.ds(start + half.start, _ROWS)] = decode
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(codes_tile, codes.at[place])

        def step(place, x_tile):
            i, j = place
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if wanted.rows:
                at = pl.ds(i * height, height), pl.ds(j * 128, 128)
                write(x_tile, staged[0], outs[0], outs[1], at, j, i * height)
            if wanted.columns:
                array, part = lax.div(i, group // 128), lax.rem(i, group // 128)
                first = array * columns + j * 128
                at = pl.ds(first, 128), pl.ds(part * 128, 128)
                write(x_tile.transpose((1, 0)), staged[-1], outs[-2], outs[-1], at, part, first)

        place = lambda i: plgpu.planar_snake(i, (down, across), 0, tiles.width)
        _walk(down * across, tiles, (height, 128), x, step, place)

    return _call(kernel, x_RD, out_types, scratch, tiles, "quantize_lines")


def _squares(x_RD, group: int, format: Format, wanted: Wanted, tiles: Tiles):
    """128 x 128 tiles: one scale for both directions, so the transposed codes are the same codes.

    The last output has a tile's scale in each line, 64 times: that is how a warpgroup has it at hand.
    """
    (rows, columns), dtype = x_RD.shape, format.dtype
    across, down = columns // 128, rows // 128
    out_types = [jax.ShapeDtypeStruct((rows, columns), dtype)] if wanted.rows else []
    if wanted.columns:
        out_types.append(jax.ShapeDtypeStruct((rows // group * columns, group), dtype))
    scratch = [plgpu.SMEM((128, 128), dtype, transforms=swizzled(dtype)) for _ in out_types]
    out_types.append(jax.ShapeDtypeStruct((down * across, _ROWS), jnp.float32))

    def kernel(x, *refs):
        outs, staged = refs[: len(out_types)], refs[len(out_types) :]

        def write(source, codes_tile, codes, place, encode):
            for half in _halves(128):
                values = _load(source.at[half])
                codes_tile[half] = _codes(values * lax.broadcast_in_dim(encode, values.shape, (0,)), dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(codes_tile, codes.at[place])

        def step(place, x_tile):
            i, j = place
            amax = [jnp.max(scales.magnitude_bits(_load(x_tile.at[half])), axis=1) for half in _halves(128)]
            top = jnp.full((_ROWS,), jnp.max(jnp.maximum(*amax)))  # a vector, since scalars' bits can't be taken
            encode, decode = scales.block_scales(top, dtype, format.power_of_two, format.loud)
            outs[-1][i * across + j] = decode
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if wanted.rows:
                write(x_tile, staged[0], outs[0], (pl.ds(i * 128, 128), pl.ds(j * 128, 128)), encode)
            if wanted.columns:
                array, part = lax.div(i, group // 128), lax.rem(i, group // 128)
                at = pl.ds(array * columns + j * 128, 128), pl.ds(part * 128, 128)
                write(x_tile.transpose((1, 0)), staged[-1], outs[-2], at, encode)

        place = lambda i: plgpu.planar_snake(i, (down, across), 0, tiles.width)
        _walk(down * across, tiles, (128, 128), x, step, place)

    return _call(kernel, x_RD, out_types, scratch, tiles, "quantize_squares")
