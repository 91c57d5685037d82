"""Shapes and routing patterns that tests, compile checks and benchmarks of `permute` and `combine` share.

T tokens, k choices of each, E experts here, D model width.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.case import Case
from pallas_kernels.permute import permute, quantize_and_permute

TOKENS = 8192
SHAPES = ((7168, 8), (7168, 4), (4096, 8), (4096, 2), (2048, 8), (2048, 4))  # model width, choices


def maps(num_tokens: int, top_k: int, num_experts: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Types of the two index maps, with room for every pair and 128-aligned experts."""
    rows = -(-num_tokens * top_k // 128) * 128 + num_experts * 128
    return jax.ShapeDtypeStruct((num_tokens, top_k), jnp.int32), jax.ShapeDtypeStruct((rows,), jnp.int32)


def production_cases() -> tuple[Case, ...]:
    """Rows quantised on their way and as they are, forward (`combine` has the way back)."""
    found = []
    for width, top_k in SHAPES:
        arguments = (jax.ShapeDtypeStruct((TOKENS, width), jnp.bfloat16), *maps(TOKENS, top_k, 8))
        for name, call in (("quantize_and_permute e4m3", quantize_and_permute), ("permute bf16", permute)):
            call = functools.partial(call, implementation="mosaic")
            found.append(Case(f"{name} {TOKENS}x{width} k{top_k}", call, arguments))
    call = functools.partial(permute, implementation="mosaic")
    arguments = (jax.ShapeDtypeStruct((TOKENS, 2880), jnp.bfloat16), *maps(TOKENS, 4, 8))
    return (*found, Case(f"permute bf16 {TOKENS}x2880 k4", call, arguments))


PATTERNS = ("even", "one_row", "around_128", "all_to_one", "trailing_empty", "some_elsewhere", "none_here")


def choices(name: str, num_tokens: int, top_k: int, num_experts: int) -> np.ndarray:
    """int32 [T, k] experts of a named pattern; -1 and E are not here."""
    rng = np.random.default_rng(0)
    found = np.stack([rng.permutation(num_experts)[:top_k] for _ in range(num_tokens)]).astype(np.int32)
    if name == "one_row":
        found[:] = -1
        found[num_tokens // 2, 0] = 1
    elif name == "around_128":
        found[:] = num_experts
        flat = found.reshape(-1)
        flat[: 127 + 128 + 129] = np.repeat([0, 1, 2], (127, 128, 129))[: flat.size]
    elif name == "all_to_one":
        found[:] = -1
        found[:, 0] = num_experts - 2
    elif name == "trailing_empty":
        found[found >= num_experts // 2] = -1
    elif name == "some_elsewhere":
        found[rng.random(found.shape) < 0.2] = -1
        found[0] = num_experts
    elif name == "none_here":
        found[:] = -1
    elif name != "even":
        raise ValueError(f"no routing pattern {name!r}")
    return found
