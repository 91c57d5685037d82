"""Experts whose products are quantised: the gated MLP in 128-blocks as one rule, and a grouped product for other recipes.

R rows, e experts of this device, D model width, F expert width of this device, G = 2 F; K and N the dims of any weight.

Codes never meet autodiff: they travel as bytes, and beside them a port whose cotangent is the gradient (`QuantisedWeight`,
`QuantisedRows`).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mesh.vma import vary, varying
from moex.precision.linear import KEPT, named, random_keys
from moex.precision.matrix import bits, codes, whole_tiles
from moex.precision.products import grouped_product, grouped_sum
from moex.precision.recipes import RECIPES, GemmRecipe
from moex.precision.statistics import measure
from moex.precision.weight import QuantisedWeight
from pallas_kernels import swiglu
from pallas_kernels.quantize import Format, Quantised, dequantize, hadamard, quantize, quantize_both
from pallas_kernels.quantize.scales import magnitude_bits
from pallas_kernels.scaled_grouped_matmul import BLOCK, dgrad, scaled_grouped_matmul, wgrad

BLOCKS = RECIPES["fp8_block"]
ROWS, GATE_UP = "expert_rows", "expert_fc1"
"""Names of what experts keep, their rows' codes and gate and up, for `jax.checkpoint` policies."""
NO_GRADIENT: Any = None
"""What stands in a cotangent for codes and scales."""


class QuantisedRows(NamedTuple):
    """Rows as they came over the wire: bits of codes [R, D] with scales [R, D / 128], in 1 x 128 tiles.  port: [R, D] in the
    compute dtype, never read: its cotangent is the rows' gradient.
    """

    quantised: Quantised
    port: Any

    def values(self):
        """The rows in the compute dtype, with their gradient."""
        return _values(self)


@jax.custom_vjp
def _values(rows: QuantisedRows):
    return dequantize(codes(rows.quantised, BLOCKS.x), rows.port.dtype)


_values.defvjp(lambda rows: (_values(rows), None), lambda _, g: (QuantisedRows(NO_GRADIENT, g),))


def block_expert_mlp(rows_RD, weights_R, sizes_e, gate_up: QuantisedWeight, down: QuantisedWeight):
    """`moex.layers.experts.expert_mlp` with both products, and the four of their gradients, in FP8 (E4M3).

    The recipe of DeepSeek-V3 (arXiv 2412.19437 section 3.3) with power-of-two scales: 1 x 128 tiles of activations and
    gradients, along tokens for weight gradients; 128 x 128 of weights; sums in float32; gradients of weights and of the
    router's weights in float32. Kept for the backward pass are the rows' codes (one byte a number and a scale for 128), and
    gate and up in BF16.

    Args: rows_RD: in the compute dtype, or `QuantisedRows`; D and F multiples of 128; every expert's rows begin at a
      multiple of 128 and pad rows are zero, so that blocks of 128 tokens are an expert's own.
      gate_up: [e, D, 2, F] or [e, D, 2 F].  down: [e, F, D].
    Returns: [R, D] like rows_RD; rows past the last expert are zero.
    """
    more = lambda x: whole_tiles(x, BLOCK, (0,))
    if not isinstance(rows_RD, QuantisedRows):
        rows_RD = QuantisedRows(bits(quantize(lax.stop_gradient(rows_RD), BLOCKS.x)), rows_RD)
    rows = jax.tree.map(more, rows_RD)
    matrices = [(w.forward, w.backward, w.port.reshape(*w.backward.codes.shape)) for w in (gate_up, down)]
    given = rows, more(weights_R), sizes_e, *matrices
    axes = varying(*jax.tree.leaves(given))
    return _mlp(*jax.tree.map(lambda x: vary(x, axes), given))[: weights_R.shape[0]]


@jax.custom_vjp
def _mlp(rows: QuantisedRows, weights_R, sizes_e, gate_up, down):
    return _forward(rows, weights_R, sizes_e, gate_up, down)[0]


def _forward(rows: QuantisedRows, weights_R, sizes_e, gate_up, down):
    x = codes(rows.quantised, BLOCKS.x)
    w = codes(gate_up[0], BLOCKS.w)
    num_experts, both, d_model = w.codes.shape
    width = both // 2
    w_egFD = w.codes.reshape(num_experts, 2, width, d_model)
    scales = w.scales.reshape(num_experts, 2, width // BLOCK, d_model // BLOCK)
    hidden, gate_RF, up_RF = swiglu.gate_up(x.codes, x.scales, w_egFD, scales, weights_R, sizes_e, format=BLOCKS.x)
    w = codes(down[0], BLOCKS.w)
    given = hidden.codes, hidden.scales, w.codes, w.scales, sizes_e
    out_RD = scaled_grouped_matmul(*given, out_dtype=rows.port.dtype)
    gate_RF, up_RF = (checkpoint_name(a, GATE_UP) for a in (gate_RF, up_RF))
    # Codes as floats: a stash takes those.
    return out_RD, (named(x, ROWS), gate_RF, up_RF, weights_R, sizes_e, gate_up[1], down[1])


def _backward(kept, g_RD):
    rows, gate_RF, up_RF, weights_R, sizes_e, gate_up, down = kept
    gate_up, down = codes(gate_up, BLOCKS.w_dgrad), codes(down, BLOCKS.w_dgrad)
    grad, grad_columns = quantize_both(g_RD.astype(jnp.bfloat16), BLOCKS.dy)
    dhidden_RF = dgrad(grad.codes, grad.scales, down.codes, down.scales, sizes_e)
    formats = dict(format=BLOCKS.x_wgrad, grad_format=BLOCKS.dy)
    found = swiglu.backward(dhidden_RF, gate_RF, up_RF, weights_R, sizes_e, **formats)
    given = found.rows.codes, found.rows.scales, gate_up.codes, gate_up.scales, sizes_e
    drows_RD = dgrad(*given, out_dtype=g_RD.dtype)
    # A code times a power of two is a BF16 number: only what the tile of 128 tokens pushes out of range is lost.
    rows_RD = dequantize(rows, jnp.bfloat16)
    columns = quantize(_in_use(rows_RD, sizes_e), BLOCKS.x_wgrad, transpose=True)
    product = functools.partial(wgrad, aligned=True)
    dgate_up_eGD = product(found.columns.codes, found.columns.scales, columns.codes, columns.scales, sizes_e)
    ddown_eDF = product(grad_columns.codes, grad_columns.scales, found.hidden.codes, found.hidden.scales, sizes_e)
    drows = QuantisedRows(NO_GRADIENT, drows_RD)
    dweights = found.weights_R.astype(weights_R.dtype)
    return drows, dweights, None, (None, None, dgate_up_eGD.swapaxes(1, 2)), (None, None, ddown_eDF.swapaxes(1, 2))


_mlp.defvjp(_forward, _backward)


def grouped_linear(rows_RK, weight: QuantisedWeight, sizes_e, *, name: str = KEPT):
    """Rows times their expert's matrix [e, K, N], in any recipe; rows past the last expert give zero, whatever they hold.

    The second level of NVFP4 is an expert's own; one scale for all rows ("tensor") is one for this device's.

    Args: rows_RK: in the compute dtype, R a multiple of 128, experts' rows as `block_expert_mlp` wants them.
      name: as of `moex.precision.linear.linear`.
    Returns: [R, N] like rows_RK. The gradient in the weight is float32.
    """
    port_eKN, tile = weight.port.reshape(weight.port.shape[0], rows_RK.shape[1], -1), weight.recipe.tile
    rows_RK = whole_tiles(rows_RK, tile, (-1,))
    given = rows_RK, sizes_e, weight.forward, weight.backward, whole_tiles(port_eKN, tile), weight.meter
    axes = varying(*jax.tree.leaves(given))
    lifted = jax.tree.map(lambda x: vary(x, axes), given)
    return _grouped(*lifted, weight.recipe, tuple(sorted(axes)), name)[:, : port_eKN.shape[2]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8))
def _grouped(rows_RK, sizes_e, forward, backward, port, meter, recipe: GemmRecipe, axes, name: str):
    return _grouped_forward(rows_RK, sizes_e, forward, backward, port, meter, recipe, axes, name)[0]


def _grouped_forward(rows_RK, sizes_e, forward, backward, port, meter, recipe: GemmRecipe, axes, name: str):
    rows_RK = _in_use(rows_RK, sizes_e)
    x = _by_expert(rows_RK, recipe.x, sizes_e)
    y_RN = grouped_product(x, codes(forward, recipe.w), sizes_e, rows_RK.dtype)
    columns = named(bits(_by_expert(rows_RK, recipe.x_wgrad, sizes_e, transpose=True)), name)
    return y_RN, (columns, sizes_e, backward, None if meter is None else measure(rows_RK, recipe.x))


def _grouped_backward(recipe: GemmRecipe, axes, name: str, kept, g_RN):
    columns, sizes_e, backward, measured = kept
    g_RN = _in_use(g_RN, sizes_e)
    keys = random_keys(g_RN, axes) if recipe.dy.stochastic else (None, None)
    dy = _by_expert(g_RN, recipe.dy, sizes_e, key=keys[0])
    dy_columns = _by_expert(g_RN, recipe.dy_wgrad, sizes_e, transpose=True, key=keys[1])
    drows_RK = grouped_product(dy, codes(backward, recipe.w_dgrad), sizes_e, g_RN.dtype)
    dw_eKN = grouped_sum(codes(columns, recipe.x_wgrad), dy_columns, sizes_e)
    meter = None if measured is None else jnp.stack([measured, measure(g_RN, recipe.dy)])
    return drows_RK, None, None, None, dw_eKN, meter


_grouped.defvjp(_grouped_forward, _grouped_backward)


def _in_use(rows_RX, sizes_e):
    return jnp.where((jnp.arange(rows_RX.shape[0]) < sizes_e.sum())[:, None], rows_RX, 0)


def _by_expert(rows_RX, format: Format, sizes_e, *, transpose: bool = False, key=None) -> Quantised:
    """Quantised; the second level of NVFP4 from each expert's own rows, after the turn if there is one."""
    outer = None
    if format.kind == "nvfp4":
        values = rows_RX.astype(jnp.float32)
        largest_R = magnitude_bits(hadamard(values, dim=-2) if format.hadamard else values).max(axis=1)
        expert_R = (jnp.arange(rows_RX.shape[0])[:, None] >= jnp.cumsum(sizes_e)[None]).sum(axis=1)
        largest_e = jax.ops.segment_max(largest_R, expert_R, num_segments=sizes_e.shape[0] + 1)
        outer_R = lax.bitcast_convert_type(jnp.maximum(largest_e, 0), jnp.float32)[expert_R]
        outer = outer_R[None, :: format.columns] if transpose else outer_R[:, None]
    return quantize(rows_RX, format, transpose=transpose, outer_amax=outer, key=key)
