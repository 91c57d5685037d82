"""Grouped matmul: consecutive groups of rows, each times its own matrix.

R rows, E groups (experts), K and N the dims of a group's matrix.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul import reference, xla
from pallas_kernels.grouped_matmul.config import Tiles
from pallas_kernels.vma import align

__all__ = ["Tiles", "check_sizes", "grouped_matmul", "implementations"]

_ORDER = ("mosaic", "xla", "reference")


def grouped_matmul(
    lhs_RK,
    rhs_EKN,
    group_sizes_E,
    *,
    implementation: str | None = None,
    tiles: Tiles | None = None,
    preferred_element_type=None,
):
    """Multiplies rows [sum(sizes[:e]), sum(sizes[:e + 1])) of lhs by rhs[e]; differentiable in lhs and rhs.

    The m-grouped contiguous matmul of DeepGEMM; `jax.lax.ragged_dot` computes the same. Sums are float32. For given tiles
    a row's bits depend on that row and its matrix alone, not on R, the other groups or where the row stands. Rows past
    the last group come out exactly zero and get a gradient of exactly zero, whatever they hold (NaN too); a group without
    rows gets a weight gradient of exactly zero.

    Args:
      lhs_RK: float32 or bfloat16.
      rhs_EKN: of the same dtype; its gradient is summed in float32 and then cast to it.
      group_sizes_E: int32, not negative, their sum at most R. `check_sizes` tests this outside jit.
      implementation: None takes the first of mosaic, xla, reference that runs here; a named one that cannot run raises.
      tiles: rows of a tile; None takes the default, whatever R is. Without effect on the reference.
      preferred_element_type: dtype of the result; None is that of lhs.

    Returns: [R, N]. In a shard_map it varies over the union of the arguments' axes, gradients over each argument's own.

    Raises ValueError with the shapes or dtypes when they don't fit; NotImplementedError with the reason for a named
    implementation that cannot run here.
    """
    _check(lhs_RK, rhs_EKN, group_sizes_E)
    if implementation is None:
        implementation = next(name for name in _ORDER if not implementations()[name])
    elif implementation not in _ORDER:
        raise ValueError(f"implementation={implementation!r}: choose one of {_ORDER}, or None")
    elif reason := implementations()[implementation]:
        raise NotImplementedError(f"grouped_matmul implementation={implementation!r}: {reason}")
    lhs_RK, rhs_EKN, group_sizes_E = align(lhs_RK, rhs_EKN, group_sizes_E)
    group_sizes_E = group_sizes_E.astype(jnp.int32)
    out_dtype = jnp.dtype(preferred_element_type or lhs_RK.dtype)
    if implementation == "reference":
        return reference.grouped_matmul(lhs_RK, rhs_EKN, group_sizes_E, out_dtype=out_dtype)
    tiles, rows = tiles or Tiles(), lhs_RK.shape[0]
    if (missing := tiles.rows - rows) > 0:  # a smaller tile would be multiplied by other code, hence other bits
        lhs_RK = jnp.pad(lhs_RK, ((0, missing), (0, 0)))
    return xla.grouped_matmul(lhs_RK, rhs_EKN, group_sizes_E, tiles.rows, out_dtype)[:rows]


def implementations() -> dict[str, str]:
    """Every implementation, with the reason why it doesn't run on this back end ("" where it does)."""
    return {"mosaic": "the Mosaic GPU kernel isn't built yet", "xla": "", "reference": ""}


def check_sizes(group_sizes_E, num_rows: int) -> None:
    """Raises ValueError when sizes are negative or sum to more than `num_rows`. Reads values: call it outside jit."""
    sizes = jax.device_get(group_sizes_E)
    if sizes.min(initial=0) < 0 or sizes.sum() > num_rows:
        raise ValueError(f"group sizes {sizes.tolist()} must not be negative and sum to at most {num_rows} rows")


def _check(lhs, rhs, sizes) -> None:
    if lhs.ndim != 2 or rhs.ndim != 3 or lhs.shape[1] != rhs.shape[1]:
        raise ValueError(f"lhs must be [R, K] and rhs [E, K, N] with the same K, got {lhs.shape} and {rhs.shape}")
    if sizes.shape != rhs.shape[:1] or not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise ValueError(f"group_sizes must be integers [{rhs.shape[0]}], got {sizes.dtype}{list(sizes.shape)}")
    if lhs.dtype != rhs.dtype or lhs.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"lhs and rhs must both be float32 or both bfloat16, got {lhs.dtype} and {rhs.dtype}")
