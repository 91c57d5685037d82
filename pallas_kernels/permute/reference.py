"""Oracle of the permutation: every pair writes its token's row, by the map that the gathers do not read.

T tokens, k choices, R result rows, D columns.
"""

import jax.numpy as jnp

from pallas_kernels.quantize import reference as quantize_reference
from pallas_kernels.quantize.formats import Format, Quantised
from pallas_kernels.vma import axes_of, cast_to


def permute(x_TD, row_of_pair_Tk, token_of_row_R):
    """As in the package's `permute`."""
    return _scatter(x_TD, row_of_pair_Tk, token_of_row_R.shape[0], 0)


def quantize_and_permute(x_TD, row_of_pair_Tk, token_of_row_R, format: Format) -> Quantised:
    """As in the package's `quantize_and_permute`."""
    codes, scales, _ = quantize_reference.quantize(x_TD, None, None, format)
    num_rows = token_of_row_R.shape[0]
    moved = _scatter(codes.view(jnp.uint8), row_of_pair_Tk, num_rows, 0)
    return Quantised(moved.view(codes.dtype), _scatter(scales, row_of_pair_Tk, num_rows, 1))


def _scatter(x_TD, row_of_pair_Tk, num_rows: int, empty):
    rows_RD = jnp.full((num_rows, x_TD.shape[1]), empty, x_TD.dtype)
    rows_RD = cast_to(axes_of(x_TD, row_of_pair_Tk), rows_RD)
    for row_T in row_of_pair_Tk.T:
        rows_RD = rows_RD.at[jnp.where(row_T >= 0, row_T, num_rows)].set(x_TD, mode="drop")
    return rows_RD
