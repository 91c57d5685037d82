"""Shapes that tests, compile checks and benchmarks of `quantize` share.  R rows, D columns, E experts, F expert width."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.case import Case
from pallas_kernels.quantize import quantize, quantize_both

MODELS = {  # model width, expert width, experts a token
    "DeepSeek-V3": (7168, 2048, 8),
    "Qwen3-235B": (4096, 1536, 8),
    "Qwen3-30B": (2048, 768, 8),
    "Mixtral": (4096, 14336, 2),
}
ROWS = 8192  # of one device's expert buffer
LOCAL_EXPERTS = 4


def production_cases() -> tuple[Case, ...]:
    """Activations in bfloat16 along rows, columns and both; master weights in float32 along both."""
    found = []
    for width in (7168, 4096, 2048, 14336, 1536, 768):
        x = jax.ShapeDtypeStruct((ROWS, width), jnp.bfloat16)
        for name, call in (
            ("rows", quantize),
            ("columns", functools.partial(quantize, transpose=True)),
            ("both", quantize_both),
        ):
            call = functools.partial(call, format="e4m3_1x128", implementation="mosaic")
            found.append(Case(f"quantize {name} e4m3 1x128 bf16 {ROWS}x{width}", call, (x,)))
    call = functools.partial(quantize_both, format="e5m2_1x128", implementation="mosaic")
    found.append(
        Case(f"quantize both e5m2 1x128 bf16 {ROWS}x7168", call, (jax.ShapeDtypeStruct((ROWS, 7168), jnp.bfloat16),))
    )
    for model, (width, hidden, _) in MODELS.items():
        for rows, columns in ((width, 2 * hidden), (hidden, width)):
            shape = (LOCAL_EXPERTS, rows, columns)
            call = functools.partial(quantize_both, format="e4m3_128x128", implementation="mosaic")
            name = f"quantize both e4m3 128x128 f32 {'x'.join(map(str, shape))} {model}"
            found.append(Case(name, call, (jax.ShapeDtypeStruct(shape, jnp.float32),)))
    return tuple(found)
