"""Products of quantised numbers, by what the device compiled for has, or of the same numbers in BF16 or float32.

M rows, N columns, K the dim summed over; R rows of experts' buffer, e experts.
"""

import functools
import re

import jax
import jax.numpy as jnp
from jax import lax

from mesh.vma import vary, varying
from moex.precision.recipes import GemmRecipe
from pallas_kernels import compat, hopper, scaled_grouped_matmul
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.quantize import Format, Quantised, dequantize

_FLOAT8_TENSOR_CORES = re.compile(r"NVIDIA .*(H20|H100|H200|H800|GH200|B100|B200|B300|GB200|GB300)\b")
_BLACKWELL = re.compile(r"NVIDIA .*G?B[123]00\b")
_LAST = (((1,), (1,)), ((), ()))


def hardware(format: Format, *, grouped: bool, kind: str | None = None) -> str:
    """What multiplies numbers of this format: "mosaic" (a kernel of this project), "xla" (tensor cores by XLA), or
    "emulation" (products of the same values in wider numbers).

    kind: of the device; None is that compiled for, or the kernels' interpreter.
    """
    if format.kind == "block":
        return "emulation" if hopper.unavailable(kind) else "mosaic"
    if grouped:
        return "emulation"
    known = _FLOAT8_TENSOR_CORES if format.kind == "tensor" else _BLACKWELL
    return "xla" if known.match(kind or compat.device_kind()) else "emulation"


def missing_hardware(recipe: GemmRecipe, kind: str, *, grouped: bool) -> str:
    """Why a GPU of this kind would compute the recipe slower than BF16; "" where it has what it takes, or is no GPU."""
    if not kind.startswith("NVIDIA") or hardware(recipe.x, grouped=grouped, kind=kind) != "emulation":
        return ""
    alone = dict(
        block="the kernels for 128-blocks are for Hopper",
        tensor="tensor cores have FP8 since Hopper",
        mx="tensor cores have MX formats since Blackwell",
        nvfp4="tensor cores have NVFP4 since Blackwell",
    )
    grouped_here = grouped and recipe.x.kind != "block"
    reason = "experts' products have kernels for fp8_block alone" if grouped_here else alone[recipe.x.kind]
    return f"{reason}; on {kind} {recipe.name} would be BF16 or float32 products of rounded numbers, slower than BF16 alone"


def product(a: Quantised, b: Quantised, format: Format, out_dtype):
    """a [M, K] times the transpose of b [N, K], sums in float32: [M, N].  format: of a; with blocks, b has square ones."""
    if hardware(format, grouped=False) != "mosaic":
        return _by_xla(a, b, format).astype(out_dtype)
    sizes = jnp.full((1,), a.codes.shape[0], jnp.int32)
    b = jax.tree.map(lambda x: x[None], b)
    return scaled_grouped_matmul.scaled_grouped_matmul(a.codes, a.scales, b.codes, b.scales, sizes, out_dtype=out_dtype)


def weight_gradient(x: Quantised, dy: Quantised, format: Format):
    """x [K, T] times the transpose of dy [N, T], float32 [K, N]: the product whose factors both have tiles along tokens."""
    if hardware(format, grouped=False) != "mosaic":
        return _by_xla(x, dy, format)
    sizes = jnp.full((1,), x.codes.shape[1], jnp.int32)
    return scaled_grouped_matmul.wgrad(x.codes, x.scales, dy.codes, dy.scales, sizes, aligned=True)[0]


def _by_xla(a: Quantised, b: Quantised, format: Format):
    """float32 [M, N]: by tensor cores where XLA knows how, or of the same values in wider numbers."""
    emulated = hardware(format, grouped=False) == "emulation"
    sums = functools.partial(lax.dot_general, dimension_numbers=_LAST, preferred_element_type=jnp.float32)
    if format.kind == "tensor":  # one scale an array: after the sum
        x, w = (q.codes.astype(jnp.bfloat16) if emulated else q.codes for q in (a, b))
        return sums(x, w) * (a.scales * b.scales)
    if not emulated:
        return _scaled_dot(a, b)
    if format.kind == "block" and not format.power_of_two:
        return sums(dequantize(a), dequantize(b), precision=lax.Precision.HIGHEST)
    # A code has 2 or 4 significant bits, its scale 1 or, as E4M3, 4: their product is a BF16 number.
    inner = lambda q: dequantize(q._replace(outer=None), jnp.bfloat16)
    return _with_outer(sums(inner(a), inner(b)), a, b)


def _scaled_dot(a: Quantised, b: Quantised):
    """XLA's block-scaled product, which Blackwell's tensor cores compute natively; scales stand beside each row."""
    beside = lambda q: jnp.repeat(q.scales, q.codes.shape[0] // q.scales.shape[0], axis=0)
    sums = lax.scaled_dot(
        a.codes, b.codes.T, lhs_scale=beside(a), rhs_scale=beside(b).T, preferred_element_type=jnp.float32
    )
    return _with_outer(sums, a, b)


def _with_outer(sums, a: Quantised, b: Quantised):
    """Sums of two-level numbers, their second level put in; it is one number an array."""
    return sums if a.outer is None or b.outer is None else sums * (a.outer * b.outer)


def grouped_product(a: Quantised, b: Quantised, sizes_e, out_dtype):
    """Rows of a [R, K] times the transpose of their expert's b [e, N, K]: [R, N]; rows past the last expert are zero."""
    return grouped_matmul(
        dequantize(a), dequantize(b).swapaxes(1, 2), sizes_e, preferred_element_type=jnp.dtype(out_dtype)
    )


def grouped_sum(a: Quantised, b: Quantised, sizes_e):
    """Each expert's a [K, R] times the transpose of b [N, R], over its own rows: float32 [e, K, N]."""
    rows_RK, rows_RN = dequantize(a).T, dequantize(b).T
    zeros = jnp.zeros((sizes_e.shape[0], rows_RK.shape[1], rows_RN.shape[1]), jnp.float32)
    like = vary(zeros, varying(rows_RK, rows_RN, sizes_e))  # or the sum would run over devices, too
    _, pull = jax.vjp(lambda w: grouped_matmul(rows_RK, w, sizes_e), like)
    return pull(rows_RN)[0]
