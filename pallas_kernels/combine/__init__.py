"""Combination of experts' rows: each token's k rows are gathered and summed in float32.

T tokens, k choices of each, R rows of the buffer, D columns.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import hopper, tuned
from pallas_kernels.choose import choose
from pallas_kernels.combine import mosaic_sm90, reference, xla
from pallas_kernels.combine.config import Tiles
from pallas_kernels.vma import align, axes_of, cast_to

__all__ = ["Tiles", "combine", "implementations"]


def combine(rows_RD, row_of_pair_Tk, token_of_row_R, *, implementation: str | None = None, tiles: Tiles | None = None):
    """y[t] = sum over j of rows[row_of_pair[t, j]], in float32 in the order of j; differentiable in the rows.

    The experts have applied the router's weights, so this is a plain sum; its gradient is `pallas_kernels.permute`: a
    token's gradient copied to each of its rows. No atomics: the bits are the same every time, and those of every
    implementation.

    Args:
      rows_RD: bfloat16 or float32 (the kernel's dtypes; XLA takes any).
      row_of_pair_Tk: int32, the row of each (token, choice) pair; -1 adds nothing, whatever stands in the buffer.
      token_of_row_R: int32, the inverse map, which the gradient goes by; see `pallas_kernels.permute.sort_rows`.
      implementation: None takes the first of mosaic, xla, reference that can; a named one that can't raises.
      tiles: of the kernel; without effect on the others.

    Returns: [T, D] of the rows' dtype; in a shard_map it varies over the union of the arguments' axes.

    Raises ValueError with the shapes where they don't fit; NotImplementedError with the reason for a named implementation
    that can't do it.
    """
    if rows_RD.ndim != 2 or row_of_pair_Tk.ndim != 2 or token_of_row_R.shape != rows_RD.shape[:1]:
        shapes = rows_RD.shape, row_of_pair_Tk.shape, token_of_row_R.shape
        raise ValueError(f"combine takes rows [R, D], row_of_pair [T, k] and token_of_row [R], got shapes {shapes}")
    if row_of_pair_Tk.dtype != jnp.int32 or token_of_row_R.dtype != jnp.int32:
        raise ValueError(f"maps must be int32, got {row_of_pair_Tk.dtype} and {token_of_row_R.dtype}")
    taken = choose("combine", implementation, _reasons(rows_RD, row_of_pair_Tk))
    return _combine(*align(rows_RD, row_of_pair_Tk, token_of_row_R), taken, tiles)


def implementations() -> dict[str, str]:
    """Every implementation, with the reason why it doesn't run on this back end ("" where it does)."""
    return {"mosaic": hopper.unavailable(), "xla": "", "reference": ""}


def best_tiles(rows_RD, row_of_pair_Tk) -> Tiles:
    """What was measured best for rows of this width and so many choices, or the default."""
    return Tiles(**tuned.settings("combine", f"{rows_RD.shape[1]} columns, {row_of_pair_Tk.shape[1]} choices"))


def run(rows_RD, row_of_pair_Tk, implementation: str, tiles: Tiles | None = None):
    """`combine` without its gradient, by the implementation named; all arguments must vary over the same axes."""
    if implementation == "mosaic":
        return cast_to(
            axes_of(rows_RD), mosaic_sm90.combine(rows_RD, row_of_pair_Tk, tiles or best_tiles(rows_RD, row_of_pair_Tk))
        )
    return (xla if implementation == "xla" else reference).combine(rows_RD, row_of_pair_Tk)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _combine(rows_RD, row_of_pair_Tk, token_of_row_R, implementation: str, tiles: Tiles | None):
    return run(rows_RD, row_of_pair_Tk, implementation, tiles)


def _combine_fwd(rows_RD, row_of_pair_Tk, token_of_row_R, implementation, tiles):
    return run(rows_RD, row_of_pair_Tk, implementation, tiles), (row_of_pair_Tk, token_of_row_R)


def _combine_bwd(implementation, tiles, maps, g_TD):
    row_of_pair_Tk, token_of_row_R = maps
    taken = permute.able(implementation, g_TD)
    return permute.run(g_TD, row_of_pair_Tk, token_of_row_R, taken), None, None


_combine.defvjp(_combine_fwd, _combine_bwd)


def able(implementation: str, rows_RD, row_of_pair_Tk) -> str:
    """This implementation, or where it cannot combine such rows the first that can."""
    reasons = _reasons(rows_RD, row_of_pair_Tk)
    return choose("combine", None if reasons[implementation] else implementation, reasons)


def _reasons(rows_RD, row_of_pair_Tk) -> dict[str, str]:
    reasons, top_k = implementations(), row_of_pair_Tk.shape[1]
    return reasons | {"mosaic": reasons["mosaic"] or mosaic_sm90.why_not(rows_RD.shape, rows_RD.dtype, top_k)}


from pallas_kernels import permute  # noqa: E402  (each op is the other's gradient)
