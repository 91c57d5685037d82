"""An expert's gate and up products with their activation, on block-scaled float8 numbers, and the activation's gradients.

R rows, E groups (experts), K the summed dim, g = 2 (gate, up), F expert width, B = K / 128 and C = F / 128 blocks.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import hopper, vma
from pallas_kernels.choose import choose
from pallas_kernels.quantize import Format, Quantised
from pallas_kernels.quantize.formats import as_format
from pallas_kernels.scaled_grouped_matmul.config import BLOCK, Config
from pallas_kernels.swiglu import xla
from pallas_kernels.swiglu.config import GPT_OSS, SWIGLU, Activation

__all__ = ["GPT_OSS", "SWIGLU", "Activation", "GateUp", "Gradients", "backward", "gate_up", "implementations"]

_CODES = (jnp.float8_e4m3fn, jnp.float8_e5m2)


class GateUp(NamedTuple):
    """hidden: activation times router weight, [R, F] in 1 x 128 tiles.  gate_RF, up_RF: bfloat16, biases included."""

    hidden: Quantised
    gate_RF: jax.Array
    up_RF: jax.Array


class Gradients(NamedTuple):
    """What follows from the gradient in `hidden`.

    rows: gradients in the products, [R, 2 F], gates first, in 1 x 128 tiles: for the gradient in the expert's input.
    columns: their transpose, [2 F, R]: for the gradient in the gate and up weights.  hidden: the activation's transpose,
    [F, R]: for the gradient in the down weights.  weights_R: float32, in the router's weights.
    """

    rows: Quantised
    columns: Quantised
    hidden: Quantised
    weights_R: jax.Array


def gate_up(
    lhs_RK,
    lhs_scales_RB,
    rhs_EgFK,
    rhs_scales_EgCB,
    weights_R,
    group_sizes_E,
    *,
    biases_EgF=None,
    activation: Activation = SWIGLU,
    format: Format | str = "e4m3_1x128",
    implementation: str | None = None,
    config: Config | None = None,
) -> GateUp:
    """quantised(weight * activation(gate x, up x)) of each row by its group's matrices.

    The router's weight is applied here, so that what a token's experts give is simply summed (arXiv 2603.07685). gate and
    up are rounded to bfloat16 before the activation: the backward pass, which reads them, sees the same numbers. Rows
    past the last group come out zero with scale 1, whatever they hold. The implementation mosaic multiplies and quantises
    by those ops' kernels, with the activation by XLA between them. Not differentiable: a layer's rule calls
    `backward`.

    Args:
      lhs_RK, lhs_scales_RB, group_sizes_E: as in `scaled_grouped_matmul`.
      rhs_EgFK: float8_e4m3fn or float8_e5m2, gate then up, [E, 2, F, K]; rhs_scales_EgCB: float32 [E, 2, F / 128, K / 128].
      weights_R: float32.  biases_EgF: float32 [E, 2, F], or None.
      format: of the result, 1 x 128 tiles of kind "block".
      implementation: None takes the first of mosaic, xla, reference that runs here; a named one that cannot run raises.
      config: of the product's Hopper kernel, without effect on the others.

    Raises ValueError with the shapes or dtypes when they don't fit; NotImplementedError with the reason for a named
    implementation that cannot run here.
    """
    format = _checked(format)
    _check(lhs_RK, lhs_scales_RB, rhs_EgFK, rhs_scales_EgCB, weights_R, group_sizes_E, biases_EgF)
    chosen = choose("swiglu.gate_up", implementation, implementations())
    groups, _, width, inner = rhs_EgFK.shape
    rhs_EfK = rhs_EgFK.reshape(groups, 2 * width, inner)
    rhs_scales_EcB = rhs_scales_EgCB.reshape(groups, -1, inner // BLOCK)
    given = [lhs_RK, lhs_scales_RB, rhs_EfK, rhs_scales_EcB, weights_R, group_sizes_E.astype(jnp.int32)]
    if biases_EgF is not None:
        given.append(biases_EgF.reshape(groups, -1))
    options = dict(activation=activation, format=format, implementation=chosen, config=config)
    return GateUp(*xla.gate_up(*vma.align(*_without_gradient(*given)), **options))


def backward(
    grad_RF,
    gate_RF,
    up_RF,
    weights_R,
    group_sizes_E,
    *,
    activation: Activation = SWIGLU,
    format: Format | str = "e4m3_1x128",
    grad_format: Format | str = "e4m3_1x128",
    implementation: str | None = None,
) -> Gradients:
    """Gradients of `weight * activation(gate, up)` for that of the result, quantised as the following products take them.

    Gradients and the recomputed activation are rounded to bfloat16, then quantised along rows and along columns from the
    same numbers. XLA computes them; the implementation mosaic quantises by its kernel.

    Args:
      grad_RF: bfloat16; R a multiple of 128.  gate_RF, up_RF: as `gate_up` gave them.  weights_R: float32.
      group_sizes_E: int32; weights of rows past the last group count as zero, whatever they are.
      format, grad_format: of the activation and of the gradients.
      implementation: as in `gate_up`.

    Raises as `gate_up`.
    """
    formats = dict(format=_checked(format), grad_format=_checked(grad_format))
    if not grad_RF.shape == gate_RF.shape == up_RF.shape or grad_RF.ndim != 2:
        raise ValueError(f"grad, gate and up must be [R, F], got {grad_RF.shape}, {gate_RF.shape} and {up_RF.shape}")
    if grad_RF.shape[0] % BLOCK or grad_RF.shape[1] % BLOCK:
        raise ValueError(f"R and F must be multiples of {BLOCK}, got {list(grad_RF.shape)}")
    chosen = choose("swiglu.backward", implementation, implementations())
    arrays = vma.align(*_without_gradient(grad_RF, gate_RF, up_RF, weights_R, group_sizes_E.astype(jnp.int32)))
    return Gradients(*xla.backward(*arrays, activation=activation, implementation=chosen, **formats))


def implementations() -> dict[str, str]:
    """Every implementation, with the reason why it doesn't run on this back end ("" where it does)."""
    return {"mosaic": hopper.unavailable(), "xla": "", "reference": ""}


@jax.custom_jvp
def _without_gradient(*arrays):
    """The arrays, refusing to be differentiated."""
    return arrays


@_without_gradient.defjvp
def _refuse(primals, tangents):
    raise TypeError("quantised numbers have no gradient: use swiglu.backward in the layer's own rule")


def _checked(format: Format | str) -> Format:
    format = as_format(format)
    if format.kind != "block" or (format.rows, format.columns) != (1, BLOCK):
        raise ValueError(f"the format must have 1 x {BLOCK} tiles of kind 'block', got {format}")
    return format


def _check(lhs, lhs_scales, rhs, rhs_scales, weights, sizes, biases) -> None:
    if lhs.ndim != 2 or rhs.ndim != 4 or rhs.shape[1] != 2 or rhs.shape[3] != lhs.shape[1]:
        raise ValueError(f"lhs must be [R, K] and rhs [E, 2, F, K] with the same K, got {lhs.shape} and {rhs.shape}")
    (rows, inner), (groups, _, width, _) = lhs.shape, rhs.shape
    if inner % BLOCK or width % BLOCK or not inner or not width:
        raise ValueError(f"K and F must be multiples of {BLOCK}, got K = {inner} and F = {width}")
    if lhs.dtype not in _CODES or rhs.dtype not in _CODES:
        raise ValueError(f"codes must be float8_e4m3fn or float8_e5m2, got {lhs.dtype} and {rhs.dtype}")
    if sizes.shape != (groups,) or not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise ValueError(f"group_sizes must be integers [{groups}], got {sizes.dtype}{list(sizes.shape)}")
    wanted: dict[str, tuple] = dict(
        lhs_scales=(lhs_scales, (rows, inner // BLOCK)),
        rhs_scales=(rhs_scales, (groups, 2, width // BLOCK, inner // BLOCK)),
        weights=(weights, (rows,)),
    )
    if biases is not None:
        wanted["biases"] = biases, (groups, 2, width)
    for name, (x, shape) in wanted.items():
        if x.shape != shape or x.dtype != jnp.float32:
            raise ValueError(f"{name} must be float32 {list(shape)}, got {x.dtype} {list(x.shape)}")
