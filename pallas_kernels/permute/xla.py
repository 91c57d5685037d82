"""Rows to their places in plain XLA, on any back end: a gather.  T tokens, k choices, R result rows, D columns."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.quantize import xla as quantize_xla
from pallas_kernels.quantize.formats import Format, Quantised


def permute(x_TD, row_of_pair_Tk, token_of_row_R):
    """As in the package's `permute`."""
    del row_of_pair_Tk
    return _gather(x_TD, token_of_row_R, 0)


def quantize_and_permute(x_TD, row_of_pair_Tk, token_of_row_R, format: Format) -> Quantised:
    """As in the package's `quantize_and_permute`."""
    codes, scales, _ = quantize_xla.quantize(x_TD, None, None, format)
    moved = _gather(lax.bitcast_convert_type(codes, jnp.uint8), token_of_row_R, 0)
    return Quantised(lax.bitcast_convert_type(moved, codes.dtype), _gather(scales, token_of_row_R, 1))


def _gather(x_TD, token_of_row_R, empty):
    if not x_TD.shape[0]:  # a gather cannot take from nothing, and no row holds a token
        x_TD = jnp.zeros((1, x_TD.shape[1]), x_TD.dtype)
    inside_R1 = (token_of_row_R >= 0)[:, None]
    return jnp.where(inside_R1, x_TD[jnp.maximum(token_of_row_R, 0)], jnp.asarray(empty, x_TD.dtype))
