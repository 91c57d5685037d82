"""Shapes that tests, compile checks and benchmarks of `combine` share.  T tokens, k choices, R rows, D columns."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.case import Case
from pallas_kernels.combine import combine
from pallas_kernels.permute.specs import SHAPES, TOKENS, maps


def production_cases() -> tuple[Case, ...]:
    """Rows in bfloat16, at the shapes of `permute`."""
    found = []
    for width, top_k in SHAPES:
        row_of_pair, token_of_row = maps(TOKENS, top_k, 8)
        rows = jax.ShapeDtypeStruct((token_of_row.shape[0], width), jnp.bfloat16)
        call = functools.partial(combine, implementation="mosaic")
        found.append(Case(f"combine bf16 {TOKENS}x{width} k{top_k}", call, (rows, row_of_pair, token_of_row)))
    return tuple(found)
