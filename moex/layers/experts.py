"""Routed experts: gated MLPs on expert-sorted rows.

R rows, e experts of this device, D model width, F expert width of this device (over etp).
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from moex.layers.param import declare
from moex.precision.experts import QuantisedRows, block_expert_mlp, grouped_linear
from moex.precision.recipes import GemmRecipe
from moex.precision.weight import QuantisedWeight, is_quantised, quantise_here
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


def quantised_expert_mlp(rows_RD, weights_R, sizes_e, gate_up: QuantisedWeight, down: QuantisedWeight):
    """`expert_mlp` in the weights' recipe. Experts' rows begin at multiples of 128, and pad rows are zero.

    rows_RD: in the compute dtype, or `QuantisedRows` from the wire.
    """
    of_blocks = all(width % 128 == 0 for width in down.shape[1:])
    if gate_up.recipe.name == "fp8_block" and of_blocks and gate_up.meter is None:
        return block_expert_mlp(rows_RD, weights_R, sizes_e, gate_up, down)
    if isinstance(rows_RD, QuantisedRows):
        rows_RD = rows_RD.values()
    missing = -rows_RD.shape[0] % 128
    rows_RD, weights_R = jnp.pad(rows_RD, ((0, missing), (0, 0))), jnp.pad(weights_R, (0, missing))
    activate = jax.checkpoint(_hidden, prevent_cse=False)
    out_RD = grouped_linear(activate(grouped_linear(rows_RD, gate_up, sizes_e), weights_R), down, sizes_e)
    return out_RD[: out_RD.shape[0] - missing]


@functools.partial(jax.checkpoint, prevent_cse=False)
def _activate_and_project(gate_up_RG, weights_R, sizes_e, down_eFD):
    """[R, 2 F] -> [R, D]. Only its inputs are kept: the activation is cheaper to compute again than to read."""
    return grouped_matmul(_hidden(gate_up_RG, weights_R), down_eFD, sizes_e)


def _hidden(gate_up_RG, weights_R):
    """The weighed activation [R, F], computed in float32."""
    gate_RF, up_RF = jnp.split(gate_up_RG.astype(jnp.float32), 2, axis=1)
    return (jax.nn.silu(gate_RF) * up_RF * weights_R[:, None]).astype(gate_up_RG.dtype)


class Experts(nnx.Module):
    """Owns the weights of E experts, split over ep, each expert's width over etp.

    recipe: of weights that come in the compute dtype all the same, as clones do; None leaves them in it.
    """

    def __init__(self, d_model: int, width: int, num_experts: int, recipe: GemmRecipe | None = None):
        self.recipe = recipe
        options = dict(slices=1, product="experts")
        self.gate_up = declare(num_experts, d_model, 2, width, axes=("ep", None, None, "etp"), **options)
        self.down = declare(num_experts, width, d_model, axes=("ep", "etp", None), init="output", **options)

    def matrices(self):
        """gate_up [e, D, 2 F] and down [e, F, D], as `expert_mlp` takes them; or both as `QuantisedWeight`."""
        gate_up_eDgF = self.gate_up[...]
        if is_quantised(gate_up_eDgF):
            return gate_up_eDgF, self.down[...]
        return gate_up_eDgF.reshape(*gate_up_eDgF.shape[:2], -1), self.down[...]

    def __call__(self, rows_RD, weights_R, sizes_e, matrices=None):
        """See `expert_mlp`.  matrices: other experts' in place of its own."""
        matrices = matrices or self.matrices()
        if self.recipe is None:
            rows_RD = rows_RD.values() if isinstance(rows_RD, QuantisedRows) else rows_RD
            return expert_mlp(rows_RD, weights_R, sizes_e, *matrices)
        here = lambda w: w if isinstance(w, QuantisedWeight) else quantise_here(w, self.recipe, slices=1)
        quantised = map(here, matrices)
        return quantised_expert_mlp(rows_RD, weights_R, sizes_e, *quantised)
