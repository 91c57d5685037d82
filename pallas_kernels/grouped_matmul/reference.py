"""Oracle of the grouped matmul: every group's matrix on every row, then a choice. Slow (E times the FLOPs), plain, exact.

R rows, E groups, K and N the matrix dims.
"""

import jax.numpy as jnp


def grouped_matmul(lhs_RK, rhs_EKN, group_sizes_E, *, out_dtype):
    """As in the package's `grouped_matmul`; gradients by plain autodiff."""
    ends_E = jnp.cumsum(group_sizes_E)
    rows_R = jnp.arange(lhs_RK.shape[0])
    out_RN = jnp.zeros((lhs_RK.shape[0], rhs_EKN.shape[2]), jnp.float32)
    for e in range(rhs_EKN.shape[0]):
        inside_R1 = ((rows_R >= ends_E[e] - group_sizes_E[e]) & (rows_R < ends_E[e]))[:, None]
        mine_RK = jnp.where(inside_R1, lhs_RK, jnp.zeros((), lhs_RK.dtype))
        out_RN += jnp.where(inside_R1, jnp.dot(mine_RK, rhs_EKN[e], preferred_element_type=jnp.float32), 0)
    return out_RN.astype(out_dtype)
