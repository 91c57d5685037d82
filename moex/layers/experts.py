"""Routed experts: gated MLPs on expert-sorted rows.

R rows, e experts of this device, D model width, F expert width of this device (over etp).
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from moex.config import ModelConfig
from moex.layers.param import declare
from moex.memory.residuals import named
from moex.precision.experts import ROWS, QuantisedRows, block_expert_mlp, grouped_linear
from moex.precision.matrix import whole_tiles
from moex.precision.recipes import GemmRecipe
from moex.precision.weight import QuantisedWeight, is_quantised, quantise_here
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.swiglu import Activation


def expert_mlp(
    rows_RD, weights_R, sizes_e, gate_up_eDG, down_eFD, gate_up_bias_eG=None, down_bias_eD=None, *,
    activation: Activation | None = None,
):  # fmt: skip
    """down(weight * silu(gate x) * up x) of each row by its expert.

    The router's weight is applied before the down projection: the sum over a token's experts is then a plain sum, and
    the expert's output isn't needed for the weight's gradient (memory-efficient permutation, arXiv 2603.07685).

    Args: rows_RD in compute dtype; weights_R float32; sizes_e int32 rows of each expert; gate_up_eDG, an expert's gate
      and up matrices side by side, G = 2 F; biases, or None (both); activation: None for plain SwiGLU.
    Returns: [R, D] like rows_RD; rows past the last expert are zero.
    """
    gate_up_RG = grouped_matmul(rows_RD, gate_up_eDG, sizes_e)
    if gate_up_bias_eG is None:
        gate_up_RG = named("expert_fc1", gate_up_RG)
        return _activate_and_project(gate_up_RG, weights_R, sizes_e, down_eFD, activation)
    num_rows = rows_RD.shape[0]
    gate_up_RG = named("expert_fc1", gate_up_RG + _of_each_row(gate_up_bias_eG, sizes_e, num_rows))
    out_RD = _activate_and_project(gate_up_RG, weights_R, sizes_e, down_eFD, activation)
    return out_RD + _of_each_row(down_bias_eD, sizes_e, num_rows) * weights_R.astype(out_RD.dtype)[:, None]


def quantised_expert_mlp(rows_RD, weights_R, sizes_e, gate_up: QuantisedWeight, down: QuantisedWeight):
    """`expert_mlp` in the weights' recipe. Experts' rows begin at multiples of 128, and pad rows are zero.

    rows_RD: in the compute dtype, or `QuantisedRows` from the wire.
    """
    of_blocks = all(width % 128 == 0 for width in down.shape[1:])
    if gate_up.recipe.name == "fp8_block" and of_blocks and gate_up.meter is None:
        return block_expert_mlp(rows_RD, weights_R, sizes_e, gate_up, down)
    if isinstance(rows_RD, QuantisedRows):
        rows_RD = rows_RD.values()
    filled_RD, filled_R = (whole_tiles(x, 128, (0,)) for x in (rows_RD, weights_R))
    activate = jax.checkpoint(_hidden, prevent_cse=False)
    gate_up_RG = named("expert_fc1", grouped_linear(filled_RD, gate_up, sizes_e, name=ROWS))
    out_RD = grouped_linear(activate(gate_up_RG, filled_R), down, sizes_e)
    return out_RD[: rows_RD.shape[0]]


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(2,))
def _of_each_row(bias_eN, sizes_e, num_rows: int):
    """The bias of a row's expert, zero past the last one: [R, N].

    A product with ones and zeros: its transpose sums in a fixed order, where a gather's would need atomics.
    """
    ends_e = jnp.cumsum(sizes_e)
    row_R1 = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    own_Re = (row_R1 < ends_e[None]) & (row_R1 >= (ends_e - sizes_e)[None])
    return own_Re.astype(bias_eN.dtype) @ bias_eN


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(4,))
def _activate_and_project(gate_up_RG, weights_R, sizes_e, down_eFD, activation: Activation | None):
    """[R, 2 F] -> [R, D]. Only its inputs are kept: the activation is cheaper to compute again than to read."""
    return grouped_matmul(_hidden(gate_up_RG, weights_R, activation), down_eFD, sizes_e)


def _hidden(gate_up_RG, weights_R, activation: Activation | None = None):
    """The weighed activation [R, F], computed in float32."""
    gate_RF, up_RF = jnp.split(gate_up_RG.astype(jnp.float32), 2, axis=1)
    hidden_RF = activation(gate_RF, up_RF) if activation else jax.nn.silu(gate_RF) * up_RF
    return (hidden_RF * weights_R[:, None]).astype(gate_up_RG.dtype)


class Experts(nnx.Module):
    """Owns the weights of E experts, split over ep, each expert's width over etp.

    recipe: of weights that come in the compute dtype all the same, as clones do; None leaves them in it.
    """

    def __init__(self, config: ModelConfig, recipe: GemmRecipe | None = None):
        self.recipe, self.width = recipe, config.expert_width
        clamped = Activation(limit=config.swiglu_limit or None, alpha=config.swiglu_alpha, offset=1.0)
        self.activation = clamped if config.swiglu_limit else None
        num, d, width = config.router.num_experts, config.expert_in_width, config.expert_width
        options = dict(slices=1, product="experts")
        self.gate_up = declare(num, d, 2, width, axes=("ep", None, None, "etp"), **options)
        self.down = declare(num, width, d, axes=("ep", "etp", None), init="output", **options)
        if config.expert_bias:
            vector = dict(slices=1, init="zeros", decays=False)
            self.gate_up_bias = declare(num, 2, width, axes=("ep", None, "etp"), **vector)
            self.down_bias = declare(num, d, axes=("ep", None), **vector)

    def matrices(self):
        """gate_up [e, D, 2 F], down [e, F, D] and, with biases, theirs [e, 2 F] and [e, D], as `expert_mlp` takes them; or
        the first two as `QuantisedWeight`.
        """
        if is_quantised(self.gate_up[...]):
            return self.gate_up[...], self.down[...]
        flat = lambda w: w.reshape(*w.shape[:-2], -1)
        gate_up, down = flat(self.gate_up[...]), self.down[...]
        if not hasattr(self, "down_bias"):
            return gate_up, down
        # Each device of an expert's width split adds its part of a sum, so each adds a part of the bias.
        etp = self.width // down.shape[1]
        return gate_up, down, flat(self.gate_up_bias[...]), self.down_bias[...] / etp

    def __call__(self, rows_RD, weights_R, sizes_e, matrices=None):
        """See `expert_mlp`.  matrices: other experts' in place of its own."""
        matrices = matrices or self.matrices()
        if self.recipe is None:
            rows_RD = rows_RD.values() if isinstance(rows_RD, QuantisedRows) else rows_RD
            return expert_mlp(rows_RD, weights_R, sizes_e, *matrices, activation=self.activation)
        here = lambda w: w if isinstance(w, QuantisedWeight) else quantise_here(w, self.recipe, slices=1)
        quantised = map(here, matrices)
        return quantised_expert_mlp(rows_RD, weights_R, sizes_e, *quantised)
