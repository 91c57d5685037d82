"""Grouped matmul: consecutive groups of rows, each times its own matrix.

R rows, E groups (experts), K and N the dims of a group's matrix.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import hopper
from pallas_kernels.choose import choose
from pallas_kernels.grouped_matmul import mosaic, reference, xla
from pallas_kernels.grouped_matmul.config import HopperConfig, Tiles
from pallas_kernels.vma import align

__all__ = ["HopperConfig", "Tiles", "check_sizes", "grouped_matmul", "implementations"]


def grouped_matmul(
    lhs_RK,
    rhs_EKN,
    group_sizes_E,
    *,
    implementation: str | None = None,
    tiles: Tiles | None = None,
    config: HopperConfig | None = None,
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
      tiles: rows of a tile of the implementation xla; None takes the default, whatever R is.
      config: tiles of the Hopper kernels (mosaic: bfloat16, K and N multiples of 128), for the product and its gradients;
        None takes for each the widest tile that divides it.
      preferred_element_type: dtype of the result; None is that of lhs.

    Returns: [R, N]. In a shard_map it varies over the union of the arguments' axes, gradients over each argument's own.

    Raises ValueError with the shapes or dtypes when they don't fit; NotImplementedError with the reason for a named
    implementation that cannot run here.
    """
    _check(lhs_RK, rhs_EKN, group_sizes_E)
    out_dtype = jnp.dtype(preferred_element_type or lhs_RK.dtype)
    reasons = implementations()
    reasons["mosaic"] = reasons["mosaic"] or mosaic.unsupported(lhs_RK, rhs_EKN, out_dtype, config)
    implementation = choose("grouped_matmul", implementation, reasons)
    lhs_RK, rhs_EKN, group_sizes_E = align(lhs_RK, rhs_EKN, group_sizes_E)
    group_sizes_E = group_sizes_E.astype(jnp.int32)
    if implementation == "mosaic":
        return mosaic.grouped_matmul(lhs_RK, rhs_EKN, group_sizes_E, out_dtype, config)
    if implementation == "reference":
        return reference.grouped_matmul(lhs_RK, rhs_EKN, group_sizes_E, out_dtype=out_dtype)
    tiles, rows = tiles or Tiles(), lhs_RK.shape[0]
    if (missing := tiles.rows - rows) > 0:  # a smaller tile would be multiplied by other code, hence other bits
        lhs_RK = jnp.pad(lhs_RK, ((0, missing), (0, 0)))
    return xla.grouped_matmul(lhs_RK, rhs_EKN, group_sizes_E, tiles.rows, out_dtype)[:rows]


def implementations() -> dict[str, str]:
    """Every implementation, with the reason why it doesn't run on this back end ("" where it does)."""
    return {"mosaic": hopper.unavailable(), "xla": "", "reference": ""}


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
