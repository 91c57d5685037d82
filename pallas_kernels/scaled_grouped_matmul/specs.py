"""Argument shapes of the block-scaled grouped matmul that tests and benchmarks share, and what published models need.

R rows, E groups, K and N the dims of a group's matrix.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.case import Case
from pallas_kernels.grouped_matmul.specs import MODELS, products
from pallas_kernels.scaled_grouped_matmul import BLOCK, scaled_grouped_matmul, wgrad

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


def arguments(rows: int, inner: int, outer: int, groups: int, lhs=E4M3, rhs=E4M3):
    """Types of `scaled_grouped_matmul`'s arguments."""
    struct, floats = jax.ShapeDtypeStruct, functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    codes = struct((rows, inner), lhs), struct((groups, outer, inner), rhs)
    scales = floats((rows, inner // BLOCK)), floats((groups, outer // BLOCK, inner // BLOCK))
    return codes[0], scales[0], codes[1], scales[1], struct((groups,), jnp.int32)


def wgrad_arguments(rows: int, inner: int, outer: int, groups: int, grad=E4M3, lhs=E4M3):
    """Types of `wgrad`'s arguments."""
    struct, floats = jax.ShapeDtypeStruct, functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    codes = struct((outer, rows), grad), struct((inner, rows), lhs)
    scales = floats((outer, rows // BLOCK)), floats((inner, rows // BLOCK))
    return codes[0], scales[0], codes[1], scales[1], struct((groups,), jnp.int32)


def draw(structs, seed: int):
    """Arrays of these types: codes over the formats' whole range, scales between a half and two; sizes are zero."""
    rng = np.random.default_rng(seed)

    def one(struct):
        if struct.dtype == jnp.int32:
            return jnp.zeros(struct.shape, jnp.int32)
        if struct.dtype == jnp.float32:
            return jnp.asarray(rng.uniform(0.5, 2, struct.shape), jnp.float32)
        return jnp.asarray(rng.normal(size=struct.shape) * float(jnp.finfo(struct.dtype).max) / 8, struct.dtype)

    return tuple(map(one, structs))


def production_cases() -> tuple[Case, ...]:
    """Every product of a training step's experts; gradients in e5m2 on four groups, in e4m3 on eight."""
    cases = []
    for model in MODELS:
        for groups, grad in ((4, E5M2), (8, E4M3)):
            for kind, inner, outer in products(model):
                name = f"scaled_grouped_matmul {model.name} {kind} {groups} groups"
                shape = (model.rows, inner, outer, groups)
                if kind.startswith("wgrad"):
                    types = wgrad_arguments(*shape, grad=grad)
                    cases.append(Case(name, functools.partial(wgrad, implementation="mosaic"), types))
                    total = jax.ShapeDtypeStruct((groups, outer, inner), jnp.float32)
                    cases.append(Case(f"{name}, aligned, added", _added, (*types, total)))
                else:
                    types = arguments(*shape, lhs=grad if kind.startswith("dgrad") else E4M3)
                    multiply = functools.partial(scaled_grouped_matmul, implementation="mosaic")
                    cases.append(Case(name, multiply, types))
    types = arguments(MODELS[0].rows, MODELS[0].hidden, MODELS[0].expert, 4)
    float32 = functools.partial(scaled_grouped_matmul, implementation="mosaic", out_dtype=jnp.float32)
    return (*cases, Case("scaled_grouped_matmul float32 result", float32, types))


def _added(grad, grad_scales, lhs, lhs_scales, sizes, total):
    return wgrad(grad, grad_scales, lhs, lhs_scales, sizes, total=total, aligned=True, implementation="mosaic")
