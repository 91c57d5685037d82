"""Permutation of token rows into an expert-sorted buffer, with or without quantising them, and the maps it goes by.

T tokens, k choices of each, R rows of the buffer, D columns.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import hopper, tuned
from pallas_kernels.choose import choose
from pallas_kernels.permute import mosaic_sm90, reference, xla
from pallas_kernels.permute.config import Tiles
from pallas_kernels.permute.rows import RowMap, block_table, sort_rows
from pallas_kernels.quantize.formats import Format, Quantised, as_format
from pallas_kernels.quantize.rounding import no_gradient
from pallas_kernels.vma import align, axes_of, cast_to

__all__ = [
    "RowMap",
    "Tiles",
    "block_table",
    "implementations",
    "permute",
    "quantize_and_permute",
    "sort_rows",
]


def permute(x_TD, row_of_pair_Tk, token_of_row_R, *, implementation: str | None = None, tiles: Tiles | None = None):
    """Copies every token's row to the rows of its pairs; rows that hold no token are zero. Differentiable in x.

    Its gradient is `pallas_kernels.combine`: a token's k gradients, summed in float32 in the order of its choices. Both
    directions are copies and sums in a fixed order, without atomics. The kernel reads a row once and stores it k times.

    Args:
      x_TD: bfloat16 or float32 (the kernel's dtypes; XLA takes any).
      row_of_pair_Tk: int32, the row of each (token, choice) pair; -1: not in this buffer.
      token_of_row_R: int32, the inverse map: the token of each row; -1: none. `sort_rows` makes both; where they don't
        agree, what comes out is undefined.
      implementation: None takes the first of mosaic, xla, reference that can; a named one that can't raises.
      tiles: of the kernel; without effect on the others.

    Returns: [R, D] of x's dtype; in a shard_map it varies over the union of the arguments' axes.

    Raises ValueError with the shapes where they don't fit; NotImplementedError with the reason for a named implementation
    that can't do it.
    """
    _check(x_TD, row_of_pair_Tk, token_of_row_R)
    taken = choose("permute", implementation, _reasons(x_TD, None))
    return _permute(*align(x_TD, row_of_pair_Tk, token_of_row_R), taken, tiles)


def quantize_and_permute(
    x_TD,
    row_of_pair_Tk,
    token_of_row_R,
    format: Format | str = "e4m3_1x128",
    *,
    implementation: str | None = None,
    tiles: Tiles | None = None,
) -> Quantised:
    """`permute` of `pallas_kernels.quantize.quantize(x_TD, format)`: quantised once, copied k times. Not differentiable.

    Bytes moved for an element: 2 read, k written, where quantising permuted rows would take 3 k. Rows that hold no token
    have codes of zero and scales of one, so they add nothing to any product.

    Args: see `permute`; format: one-row tiles without random bytes and without a second level.
    Returns: codes [R, D] and scales [R, D / tile columns].
    Raises: as `permute`, and ValueError for a format with other tiles.
    """
    format = as_format(format)
    _check(x_TD, row_of_pair_Tk, token_of_row_R)
    if format.kind != "block" or format.rows != 1:
        raise ValueError(f"rows are quantised one by one: the format needs 'block' tiles of one row, got {format}")
    format.tile(x_TD.shape)
    taken = choose("quantize_and_permute", implementation, _reasons(x_TD, format))

    def call(x_TD, row_of_pair_Tk, token_of_row_R):
        if taken == "mosaic":
            maps = row_of_pair_Tk, token_of_row_R
            found = mosaic_sm90.quantize_and_permute(
                x_TD, *maps, format, tiles or best_tiles(x_TD, row_of_pair_Tk, in_codes=True)
            )
            return Quantised(*(cast_to(axes_of(x_TD), a) for a in found))
        run = xla if taken == "xla" else reference
        return run.quantize_and_permute(x_TD, row_of_pair_Tk, token_of_row_R, format)

    return no_gradient(call, "quantize_and_permute")(*align(x_TD, row_of_pair_Tk, token_of_row_R))


def implementations() -> dict[str, str]:
    """Every implementation, with the reason why it doesn't run on this back end ("" where it does)."""
    return {"mosaic": hopper.unavailable(), "xla": "", "reference": ""}


def best_tiles(x_TD, row_of_pair_Tk, *, in_codes: bool = False) -> Tiles:
    """What was measured best for rows of this width and so many choices, or the default."""
    shape = f"{x_TD.shape[1]} columns, {row_of_pair_Tk.shape[1]} choices{', in codes' if in_codes else ''}"
    return Tiles(**tuned.settings("permute", shape))


def run(x_TD, row_of_pair_Tk, token_of_row_R, implementation: str, tiles: Tiles | None = None):
    """`permute` without its gradient, by the implementation named; all arguments must vary over the same axes."""
    if implementation == "mosaic":
        rows_RD = mosaic_sm90.permute(x_TD, row_of_pair_Tk, token_of_row_R, tiles or best_tiles(x_TD, row_of_pair_Tk))
        return cast_to(axes_of(x_TD), rows_RD)
    return (xla if implementation == "xla" else reference).permute(x_TD, row_of_pair_Tk, token_of_row_R)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _permute(x_TD, row_of_pair_Tk, token_of_row_R, implementation: str, tiles: Tiles | None):
    return run(x_TD, row_of_pair_Tk, token_of_row_R, implementation, tiles)


def _permute_fwd(x_TD, row_of_pair_Tk, token_of_row_R, implementation, tiles):
    return run(x_TD, row_of_pair_Tk, token_of_row_R, implementation, tiles), row_of_pair_Tk


def _permute_bwd(implementation, tiles, row_of_pair_Tk, g_RD):
    taken = combine.able(implementation, g_RD, row_of_pair_Tk)
    return combine.run(g_RD, row_of_pair_Tk, taken), None, None


_permute.defvjp(_permute_fwd, _permute_bwd)


def able(implementation: str, x_TD) -> str:
    """This implementation, or where it cannot permute such rows the first that can."""
    reasons = _reasons(x_TD, None)
    return choose("permute", None if reasons[implementation] else implementation, reasons)


def _reasons(x_TD, format: Format | None) -> dict[str, str]:
    reasons = implementations()
    return reasons | {"mosaic": reasons["mosaic"] or mosaic_sm90.why_not(x_TD.shape, x_TD.dtype, format)}


def _check(x_TD, row_of_pair_Tk, token_of_row_R) -> None:
    if x_TD.ndim != 2 or row_of_pair_Tk.ndim != 2 or token_of_row_R.ndim != 1 or len(x_TD) != len(row_of_pair_Tk):
        shapes = x_TD.shape, row_of_pair_Tk.shape, token_of_row_R.shape
        raise ValueError(f"permute takes x [T, D], row_of_pair [T, k] and token_of_row [R], got shapes {shapes}")
    for name, index in (("row_of_pair", row_of_pair_Tk), ("token_of_row", token_of_row_R)):
        if index.dtype != jnp.int32:
            raise ValueError(f"{name} must be int32, got {index.dtype}")


from pallas_kernels import combine  # noqa: E402  (each op is the other's gradient)
