"""Shapes of the fused gate and up products that published models need.  R rows, E groups, K summed dim, F expert width."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.case import Case
from pallas_kernels.grouped_matmul.specs import MODELS
from pallas_kernels.scaled_grouped_matmul.config import BLOCK
from pallas_kernels.swiglu import GPT_OSS, backward, gate_up


def arguments(rows: int, inner: int, width: int, groups: int):
    """Types of `gate_up`'s arguments."""
    struct, floats = jax.ShapeDtypeStruct, functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    codes = struct((rows, inner), jnp.float8_e4m3fn), struct((groups, 2, width, inner), jnp.float8_e4m3fn)
    scales = floats((rows, inner // BLOCK)), floats((groups, 2, width // BLOCK, inner // BLOCK))
    return codes[0], scales[0], codes[1], scales[1], floats((rows,)), struct((groups,), jnp.int32)


def production_cases() -> tuple[Case, ...]:
    """The plain activation, GPT-OSS' with biases, and gradients, at one model's widths: the parts have all others."""
    model, groups = MODELS[0], 4
    types = arguments(model.rows, model.hidden, model.expert, groups)
    biases = jax.ShapeDtypeStruct((groups, 2, model.expert), jnp.float32)
    hidden = (jax.ShapeDtypeStruct((model.rows, model.expert), jnp.bfloat16),) * 3
    rest = jax.ShapeDtypeStruct((model.rows,), jnp.float32), jax.ShapeDtypeStruct((groups,), jnp.int32)
    name = f"swiglu {model.name}"
    return (
        Case(name, functools.partial(gate_up, implementation="mosaic"), types),
        Case(f"{name}, clamped, biases", _clamped, (*types, biases)),
        Case(f"{name} backward", functools.partial(backward, implementation="mosaic"), (*hidden, *rest)),
    )


def _clamped(lhs, lhs_scales, rhs, rhs_scales, weights, sizes, biases):
    options = dict(biases_EgF=biases, activation=GPT_OSS, implementation="mosaic")
    return gate_up(lhs, lhs_scales, rhs, rhs_scales, weights, sizes, **options)
