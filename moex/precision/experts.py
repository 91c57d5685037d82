"""Experts whose products are of FP8 numbers with a scale for every block of 128: forward, and both gradients.

R rows, e experts of this device, D model width, F expert width of this device, G = 2 F.

Codes never meet autodiff: from the rows as they arrive to the rows as they leave it is one rule. Kept for the backward pass
are the rows' codes (one byte a number and a scale for 128), and gate and up in BF16.
"""

import functools

import jax
import jax.numpy as jnp

from mesh.vma import vary, varying
from pallas_kernels import swiglu
from pallas_kernels.quantize import Quantised, dequantize, quantize, quantize_both, transposed
from pallas_kernels.scaled_grouped_matmul import BLOCK, dgrad, scaled_grouped_matmul, wgrad

ROWS, SQUARES = "e4m3_1x128", "e4m3_128x128"


def fp8_expert_mlp(rows_RD, weights_R, sizes_e, gate_up_eDG, down_eFD, *, aligned: bool = False):
    """`moex.layers.experts.expert_mlp` with both products, and the four of their gradients, in FP8 (E4M3).

    The recipe of DeepSeek-V3 (arXiv 2412.19437 section 3.3) with power-of-two scales: 1 x 128 tiles of activations and
    gradients, along tokens for weight gradients; 128 x 128 of weights; sums in float32; gradients of weights and of the
    router's weights in float32 before they take their argument's dtype.

    Args: as there; D and F multiples of 128.  aligned: every expert's rows begin at a multiple of 128 and pad rows are
      zero; blocks of 128 tokens are then an expert's own, whatever else the device holds.
    Returns: [R, D] like rows_RD; rows past the last expert are zero.
    """
    missing = -rows_RD.shape[0] % BLOCK
    given = jnp.pad(rows_RD, ((0, missing), (0, 0))), jnp.pad(weights_R, (0, missing)), sizes_e, gate_up_eDG, down_eFD
    axes = varying(*given)
    return _mlp(*(vary(x, axes) for x in given), aligned)[: rows_RD.shape[0]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _mlp(rows_RD, weights_R, sizes_e, gate_up_eDG, down_eFD, aligned: bool):
    return _forward(rows_RD, weights_R, sizes_e, gate_up_eDG, down_eFD, aligned)[0]


def _forward(rows_RD, weights_R, sizes_e, gate_up_eDG, down_eFD, aligned: bool):
    rows = quantize(rows_RD, ROWS)
    num_experts, d_model, both = gate_up_eDG.shape
    width = both // 2
    gate_up = transposed(quantize(gate_up_eDG, SQUARES))
    codes_egFD = gate_up.codes.reshape(num_experts, 2, width, d_model)
    scales = gate_up.scales.reshape(num_experts, 2, width // BLOCK, d_model // BLOCK)
    hidden, gate_RF, up_RF = swiglu.gate_up(rows.codes, rows.scales, codes_egFD, scales, weights_R, sizes_e)
    down = transposed(quantize(down_eFD, SQUARES))
    given = hidden.codes, hidden.scales, down.codes, down.scales, sizes_e
    out_RD = scaled_grouped_matmul(*given, out_dtype=rows_RD.dtype)
    return out_RD, (rows.codes, rows.scales, gate_RF, up_RF, weights_R, sizes_e, gate_up_eDG, down_eFD)


def _backward(aligned: bool, kept, g_RD):
    codes_RD, scales, gate_RF, up_RF, weights_R, sizes_e, gate_up_eDG, down_eFD = kept
    grad, grad_columns = quantize_both(g_RD.astype(jnp.bfloat16), ROWS)
    down = quantize(down_eFD, SQUARES)
    dhidden_RF = dgrad(grad.codes, grad.scales, down.codes, down.scales, sizes_e)
    found = swiglu.backward(dhidden_RF, gate_RF, up_RF, weights_R, sizes_e)
    gate_up = quantize(gate_up_eDG, SQUARES)
    given = found.rows.codes, found.rows.scales, gate_up.codes, gate_up.scales, sizes_e
    drows_RD = dgrad(*given, out_dtype=g_RD.dtype)
    # A code times a power of two is a BF16 number: only what the tile of 128 tokens pushes out of range is lost.
    rows_RD = dequantize(Quantised(codes_RD, scales), jnp.bfloat16)
    in_use_R1 = (jnp.arange(rows_RD.shape[0]) < sizes_e.sum())[:, None]
    columns = quantize(jnp.where(in_use_R1, rows_RD, 0), ROWS, transpose=True)
    product = functools.partial(wgrad, aligned=aligned)
    dgate_up = product(found.columns.codes, found.columns.scales, columns.codes, columns.scales, sizes_e)
    ddown = product(grad_columns.codes, grad_columns.scales, found.hidden.codes, found.hidden.scales, sizes_e)
    like = lambda x, w: x.swapaxes(1, 2).astype(w.dtype)
    gradients = like(dgate_up, gate_up_eDG), like(ddown, down_eFD)
    return drows_RD, found.weights_R.astype(weights_R.dtype), None, *gradients


_mlp.defvjp(_forward, _backward)
