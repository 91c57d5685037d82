"""Grouped matmul of block-scaled float8 numbers in plain XLA, on any back end: scales multiplied out, float32 products.

R rows, E groups, K and N the dims of a group's matrix, B = K / 128 or R / 128 blocks, C = N / 128.
"""

import jax.numpy as jnp

from pallas_kernels.grouped_matmul import xla
from pallas_kernels.grouped_matmul.config import Tiles
from pallas_kernels.scaled_grouped_matmul.reference import spread


def grouped_matmul(lhs_RK, lhs_scales_RB, rhs_ENK, rhs_scales_ECB, sizes_E, *, out_dtype):
    """As in the package's `scaled_grouped_matmul`; all arguments must vary over the same mesh axes."""
    lhs_RK = lhs_RK.astype(jnp.float32) * spread(lhs_scales_RB, (1,))
    rhs_ENK = rhs_ENK.astype(jnp.float32) * spread(rhs_scales_ECB, (1, 2))
    rows, m = lhs_RK.shape[0], Tiles().rows
    lhs_RK = jnp.pad(lhs_RK, ((0, max(m - rows, 0)), (0, 0)))
    return xla.rows_by_matrix(lhs_RK, rhs_ENK, sizes_E, m, out_dtype)[:rows]


def wgrad(grad_NR, grad_scales_NB, lhs_KR, lhs_scales_KB, sizes_E, total_ENK):
    """As in the package's `wgrad`; all arguments must vary over the same mesh axes."""
    more = (0, max(Tiles().rows - grad_NR.shape[1], 0)), (0, 0)
    grad_RN = jnp.pad((grad_NR.astype(jnp.float32) * spread(grad_scales_NB, (1,))).T, more)
    lhs_RK = jnp.pad((lhs_KR.astype(jnp.float32) * spread(lhs_scales_KB, (1,))).T, more)
    sums_ENK = xla.sums_of_rows(grad_RN, lhs_RK, sizes_E, Tiles().rows)
    return sums_ENK if total_ENK is None else total_ENK + sums_ENK
