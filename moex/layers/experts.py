"""Routed experts: gated MLPs on expert-sorted rows.

R rows, e experts of this device, D model width, F expert width of this device (over etp).
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from moex.layers.param import declare
from pallas_kernels.grouped_matmul import grouped_matmul


def expert_mlp(rows_RD, weights_R, sizes_e, gate_up_eDgF, down_eFD):
    """down(weight * silu(gate x) * up x) of each row by its expert.

    The router's weight is applied before the down projection: the sum over a token's experts is then a plain sum, and
    the expert's output isn't needed for the weight's gradient (memory-efficient permutation, arXiv 2603.07685).

    Args: rows_RD in compute dtype; weights_R float32; sizes_e int32 rows of each expert.
    Returns: [R, D] like rows_RD; rows past the last expert are zero.
    """
    num_experts, d_model, _, width = gate_up_eDgF.shape
    flat = gate_up_eDgF.reshape(num_experts, d_model, 2 * width)
    hidden_RF = _weighted_swiglu(grouped_matmul(rows_RD, flat, sizes_e), weights_R)
    return grouped_matmul(hidden_RF, down_eFD, sizes_e)


@functools.partial(jax.checkpoint, prevent_cse=False)
def _weighted_swiglu(gate_up_RF, weights_R):
    """[R, 2 F] -> [R, F] in the same dtype. Only its inputs are kept: what lies between is cheaper to compute again."""
    gate_RF, up_RF = jnp.split(gate_up_RF.astype(jnp.float32), 2, axis=1)
    return (jax.nn.silu(gate_RF) * up_RF * weights_R[:, None]).astype(gate_up_RF.dtype)


class Experts(nnx.Module):
    """Owns the weights of E experts, split over ep, each expert's width over etp."""

    def __init__(self, d_model: int, width: int, num_experts: int):
        self.gate_up = declare(num_experts, d_model, 2, width, axes=("ep", None, None, "etp"), slices=1)
        self.down = declare(num_experts, width, d_model, axes=("ep", "etp", None), slices=1, init="output")

    def __call__(self, rows_RD, weights_R, sizes_e, matrices=None):
        """See `expert_mlp`.  matrices: other experts' gate_up and down in place of its own."""
        return expert_mlp(rows_RD, weights_R, sizes_e, *(matrices or (self.gate_up[...], self.down[...])))
