"""Oracle of the grouped matmul of block-scaled float8 numbers: multiply out the scales, then float32 products.

R rows, E groups, K and N the dims of a group's matrix, B = K / 128 or R / 128 blocks, C = N / 128.
"""

import jax.numpy as jnp

from pallas_kernels.grouped_matmul import reference
from pallas_kernels.scaled_grouped_matmul.config import BLOCK


def spread(scales, dims: tuple[int, ...]):
    """Every scale repeated over its block of 128, along each of `dims`."""
    for dim in dims:
        scales = jnp.repeat(scales, BLOCK, axis=dim)
    return scales


def grouped_matmul(lhs_RK, lhs_scales_RB, rhs_ENK, rhs_scales_ECB, sizes_E, *, out_dtype):
    """As in the package's `scaled_grouped_matmul`."""
    lhs_RK = lhs_RK.astype(jnp.float32) * spread(lhs_scales_RB, (1,))
    rhs_ENK = rhs_ENK.astype(jnp.float32) * spread(rhs_scales_ECB, (1, 2))
    return reference.grouped_matmul(lhs_RK, rhs_ENK.swapaxes(1, 2), sizes_E, out_dtype=out_dtype)


def wgrad(grad_NR, grad_scales_NB, lhs_KR, lhs_scales_KB, sizes_E, total_ENK):
    """As in the package's `wgrad`: every group on all rows, those of others left out."""
    grad_NR = grad_NR.astype(jnp.float32) * spread(grad_scales_NB, (1,))
    lhs_KR = lhs_KR.astype(jnp.float32) * spread(lhs_scales_KB, (1,))
    ends_E = jnp.cumsum(sizes_E)
    rows_1R = jnp.arange(grad_NR.shape[1])[None]
    inside_ER = (rows_1R >= (ends_E - sizes_E)[:, None]) & (rows_1R < ends_E[:, None])

    def one(inside_R):
        grad, lhs = (jnp.where(inside_R[None], x, 0) for x in (grad_NR, lhs_KR))
        return jnp.dot(grad, lhs.T, preferred_element_type=jnp.float32)

    sums_ENK = jnp.stack([one(inside_R) for inside_R in inside_ER])
    return sums_ENK if total_ENK is None else total_ENK + sums_ENK
