"""Rows on the wire as FP8 codes: tokens on their way to experts, and in the backward pass gradients of combined results.

T tokens of this device, R rows of its experts' buffer, D model width. A token is quantised once, before it is copied to its k
rows; its codes and the exponents of its power-of-two scales travel as one row of D + D / 128 bytes. Sums (combining, and
its counterpart in the backward pass) are of numbers in the compute dtype, never of codes.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from mesh.fold import Fold
from mesh.vma import vary, varying
from moex import dispatch
from moex.dispatch.plan import Plan
from moex.precision.experts import QuantisedRows
from moex.precision.matrix import bits, codes
from pallas_kernels.permute import quantize_and_permute
from pallas_kernels.quantize import Format, Quantised, dequantize, quantize
from pallas_kernels.quantize.scales import two_to


def send(transport: str, x_TD, plan: Plan, fold: Fold, format: Format) -> QuantisedRows:
    """`dispatch.send` in codes. The gradient comes back in the port's dtype, which is x's.

    format: 1 x 128 tiles with power-of-two scales.  Raises ValueError for another.
    """
    if format.kind != "block" or format.rows != 1 or not format.power_of_two:
        raise ValueError(f"the wire takes tiles of one row with power-of-two scales, got {format}")
    axes = varying(x_TD, *jax.tree.leaves(plan))
    return _send(vary(x_TD, axes), plan, transport, fold, format)


def combine(transport: str, rows_RD, plan: Plan, fold: Fold, format: Format | None):
    """`dispatch.combine`, whose backward pass sends the gradient in codes of `format`, if one is given."""
    if format is None:
        return dispatch.combine(transport, rows_RD, plan, fold)
    axes = varying(rows_RD, *jax.tree.leaves(plan))
    return _combine(vary(rows_RD, axes), plan, transport, fold, format)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _send(x_TD, plan, transport: str, fold: Fold, format: Format) -> QuantisedRows:
    rows = _travel(x_TD, plan, transport, fold, format)
    port = vary(jnp.zeros(rows.codes.shape, x_TD.dtype), varying(rows.codes))
    return QuantisedRows(rows, port)


def _send_fwd(x_TD, plan, transport, fold, format):
    return _send(x_TD, plan, transport, fold, format), (plan, jnp.zeros_like(x_TD))


def _send_bwd(transport, fold, format, kept, cotangent: QuantisedRows):
    plan, like_TD = kept
    _, home = jax.vjp(lambda x: dispatch.send(transport, x, plan, fold), like_TD)
    return home(cotangent.port)[0], None


_send.defvjp(_send_fwd, _send_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _combine(rows_RD, plan, transport: str, fold: Fold, format: Format):
    return dispatch.combine(transport, rows_RD, plan, fold)


def _combine_bwd(transport, fold, format, plan, g_TD):
    rows = _travel(g_TD, plan, transport, fold, format)
    return dequantize(codes(rows, format), g_TD.dtype), None


_combine.defvjp(lambda rows, plan, *static: (_combine(rows, plan, *static), plan), _combine_bwd)


def _travel(x_TD, plan, transport: str, fold: Fold, format: Format) -> Quantised:
    """Bits of x's codes, and scales, where `dispatch.send` takes them."""
    if (hop := dispatch.first_hop(transport, plan, fold)) is None:
        arrived_RB = dispatch.send(transport, _letters(quantize(x_TD, format)), plan, fold)
    else:  # quantised and copied to its places from one read
        written = quantize_and_permute(x_TD, hop.row_of_pair_Tk, hop.token_of_row_R, format)
        arrived_RB = dispatch.onward(transport, _letters(written), plan, fold)
    codes_RD, exponents = jnp.split(arrived_RB, [x_TD.shape[1]], axis=1)
    exponents = exponents.astype(jnp.int32)
    return Quantised(codes_RD, jnp.where(exponents == 255, jnp.nan, two_to(exponents)))


def _letters(written: Quantised):
    """uint8 [..., D + D / 128]: codes, then exponents of their scales."""
    written = bits(written)
    exponents = lax.bitcast_convert_type(written.scales, jnp.int32) >> 23  # NaN has 255, 2^-127 has 0
    return jnp.concatenate([written.codes, exponents.astype(jnp.uint8)], axis=1)
