"""Routed experts: gated MLPs on expert-sorted rows.

R rows, e experts of this device, D model width, F expert width of this device (over etp).
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from moex.layers.param import declare
from moex.precision.experts import fp8_expert_mlp
from pallas_kernels.grouped_matmul import grouped_matmul


def expert_mlp(rows_RD, weights_R, sizes_e, gate_up_eDG, down_eFD):
    """down(weight * silu(gate x) * up x) of each row by its expert.

    The router's weight is applied before the down projection: the sum over a token's experts is then a plain sum, and
    the expert's output isn't needed for the weight's gradient (memory-efficient permutation, arXiv 2603.07685).

    Args: rows_RD in compute dtype; weights_R float32; sizes_e int32 rows of each expert; gate_up_eDG, an expert's gate
      and up matrices side by side, G = 2 F.
    Returns: [R, D] like rows_RD; rows past the last expert are zero.
    """
    return _activate_and_project(grouped_matmul(rows_RD, gate_up_eDG, sizes_e), weights_R, sizes_e, down_eFD)


@functools.partial(jax.checkpoint, prevent_cse=False)
def _activate_and_project(gate_up_RG, weights_R, sizes_e, down_eFD):
    """[R, 2 F] -> [R, D]. Only its inputs are kept: the activation is cheaper to compute again than to read."""
    gate_RF, up_RF = jnp.split(gate_up_RG.astype(jnp.float32), 2, axis=1)
    hidden_RF = (jax.nn.silu(gate_RF) * up_RF * weights_R[:, None]).astype(gate_up_RG.dtype)
    return grouped_matmul(hidden_RF, down_eFD, sizes_e)


class Experts(nnx.Module):
    """Owns the weights of E experts, split over ep, each expert's width over etp."""

    def __init__(self, d_model: int, width: int, num_experts: int, precision: str = "compute"):
        self.precision = precision
        self.gate_up = declare(num_experts, d_model, 2, width, axes=("ep", None, None, "etp"), slices=1)
        self.down = declare(num_experts, width, d_model, axes=("ep", "etp", None), slices=1, init="output")

    def matrices(self) -> tuple[jax.Array, jax.Array]:
        """gate_up [e, D, 2 F] and down [e, F, D], as `expert_mlp` takes them."""
        gate_up_eDgF = self.gate_up[...]
        return gate_up_eDgF.reshape(*gate_up_eDgF.shape[:2], -1), self.down[...]

    def __call__(self, rows_RD, weights_R, sizes_e, matrices=None):
        """See `expert_mlp`.  matrices: other experts' in place of its own."""
        matrices = matrices or self.matrices()
        if self.precision == "fp8_block":
            return fp8_expert_mlp(rows_RD, weights_R, sizes_e, *matrices, aligned=True)
        return expert_mlp(rows_RD, weights_R, sizes_e, *matrices)

    @property
    def align(self) -> int:
        """What an expert's first row must be a multiple of."""
        return 128 if self.precision == "fp8_block" else 1
