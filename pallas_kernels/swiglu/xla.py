"""The activation around the products: what XLA computes between kernels, or between the plain forms of them.

R rows, E groups, K the summed dim, F expert width, f = 2 F.
"""

import jax.numpy as jnp

from pallas_kernels import quantize
from pallas_kernels.scaled_grouped_matmul import scaled_grouped_matmul


def gate_up(
    lhs_RK, lhs_scales_RB, rhs_EfK, rhs_scales_EcB, weights_R, sizes_E, biases_Ef=None, *,
    activation, format, implementation, config=None,
):  # fmt: skip
    """As in the package's `gate_up`, with gate rows before up rows in one dim."""
    # A bias is added to sums that weren't rounded.
    out_dtype = jnp.bfloat16 if biases_Ef is None else jnp.float32
    total_Rf = scaled_grouped_matmul(
        lhs_RK, lhs_scales_RB, rhs_EfK, rhs_scales_EcB, sizes_E,
        implementation=implementation, config=config, out_dtype=out_dtype,
    )  # fmt: skip
    inside_R1 = _inside(sizes_E, total_Rf.shape[0])[:, None]
    if biases_Ef is not None:
        ends_E = jnp.cumsum(sizes_E)
        group_R = (jnp.arange(total_Rf.shape[0], dtype=jnp.int32)[:, None] >= ends_E[None]).sum(axis=1)
        total_Rf = total_Rf + jnp.where(inside_R1, biases_Ef[jnp.minimum(group_R, len(biases_Ef) - 1)], 0.0)
    gate_RF, up_RF = jnp.split(total_Rf.astype(jnp.bfloat16), 2, axis=1)
    weights_R1 = jnp.where(inside_R1, weights_R[:, None], 0.0)
    hidden_RF = activation(gate_RF.astype(jnp.float32), up_RF.astype(jnp.float32)) * weights_R1
    return quantize.quantize(hidden_RF, format, implementation=implementation), gate_RF, up_RF


def _inside(sizes_E, num_rows: int):
    """bool [R]: rows that belong to a group."""
    return jnp.arange(num_rows, dtype=jnp.int32) < jnp.sum(sizes_E, dtype=jnp.int32)


def backward(grad_RF, gate_RF, up_RF, weights_R, sizes_E, *, activation, format, grad_format, implementation):
    """As in the package's `backward`."""
    weights_R1 = jnp.where(_inside(sizes_E, len(grad_RF)), weights_R, 0.0)[:, None]
    grad, gate, up = (x.astype(jnp.float32) for x in (grad_RF, gate_RF, up_RF))
    result, dgate, dup = activation.backward(gate, up, grad * weights_R1)
    dweights_R = (grad * result).sum(axis=1)
    both_Rf = jnp.concatenate([dgate, dup], axis=1).astype(jnp.bfloat16)
    hidden_RF = (result * weights_R1).astype(jnp.bfloat16)
    rows, columns = quantize.quantize_both(both_Rf, grad_format, implementation=implementation)
    hidden = quantize.quantize(hidden_RF, format, transpose=True, implementation=implementation)
    return rows, columns, hidden, dweights_R
