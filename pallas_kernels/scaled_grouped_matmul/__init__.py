"""Grouped matmul of float8 numbers with a scale for every block of 128, and its two gradients.

R rows, E groups (experts), K the summed dim, N output columns, B = K / 128 and C = N / 128 blocks.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import hopper, vma
from pallas_kernels.choose import choose
from pallas_kernels.scaled_grouped_matmul import mosaic_sm90, mosaic_sm90_wgrad, reference, xla
from pallas_kernels.scaled_grouped_matmul.config import BLOCK, Config, GradConfig
from pallas_kernels.tiles import ALIGN
from pallas_kernels.warpgroups import ROWS

__all__ = ["BLOCK", "Config", "GradConfig", "dgrad", "implementations", "scaled_grouped_matmul", "transposed", "wgrad"]

_CODES = (jnp.float8_e4m3fn, jnp.float8_e5m2)


def scaled_grouped_matmul(
    lhs_RK,
    lhs_scales_RB,
    rhs_ENK,
    rhs_scales_ECB,
    group_sizes_E,
    *,
    implementation: str | None = None,
    config: Config | None = None,
    out_dtype=jnp.bfloat16,
):
    """Multiplies rows [sum(sizes[:e]), sum(sizes[:e + 1])) of lhs by the transpose of rhs[e], scales included.

    The m-grouped contiguous matmul of DeepGEMM, DeepSeek-V3's numbers (arXiv 2412.19437 section 3.3): 1 x 128 blocks of
    rows, 128 x 128 blocks of weights, products of 128 summed by tensor cores, those sums in float32. A row's bits depend
    on that row and its matrix alone. Rows past the last group come out exactly zero, whatever they hold. Codes have no
    gradient: a layer's own rule calls `dgrad` and `wgrad`.

    Args:
      lhs_RK, rhs_ENK: float8_e4m3fn or float8_e5m2 each.
      lhs_scales_RB: float32 [R, K / 128]; a number is code times scale.
      rhs_scales_ECB: float32 [E, N / 128, K / 128].
      group_sizes_E: int32, not negative, their sum at most R; groups may begin at any row.
      implementation: None takes the first of mosaic, xla, reference that runs here; a named one that cannot run raises.
      config: of the Hopper kernel, without effect on the others.
      out_dtype: bfloat16 or float32.

    Returns: [R, N]. In a shard_map it varies over the union of the arguments' axes.

    Raises ValueError with the shapes or dtypes when they don't fit; NotImplementedError with the reason for a named
    implementation that cannot run here.
    """
    num_rows, inner = _matrix("lhs", lhs_RK)
    if rhs_ENK.ndim != 3 or rhs_ENK.shape[2] != inner:
        raise ValueError(f"rhs must be [E, N, K] with lhs' K = {inner}, got {list(rhs_ENK.shape)}")
    groups, outer, _ = rhs_ENK.shape
    _scales("lhs_scales", lhs_scales_RB, (num_rows, inner // BLOCK))
    _scales("rhs_scales", rhs_scales_ECB, (groups, outer // BLOCK, inner // BLOCK))
    _check(lhs_RK, rhs_ENK, group_sizes_E, groups, inner, outer)
    out_dtype = jnp.dtype(out_dtype)
    if out_dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"out_dtype must be bfloat16 or float32, got {out_dtype}")
    reasons = implementations()
    reasons["mosaic"] = reasons["mosaic"] or _columns_reason(config, outer)
    chosen = choose("scaled_grouped_matmul", implementation, reasons)
    given = lhs_RK, lhs_scales_RB, rhs_ENK, rhs_scales_ECB, group_sizes_E.astype(jnp.int32)
    arrays = vma.align(*_without_gradient(*given))
    if chosen != "mosaic":
        run = reference.grouped_matmul if chosen == "reference" else xla.grouped_matmul
        return run(*arrays, out_dtype=out_dtype)
    return _on_hopper(*arrays, out_dtype=out_dtype, config=config or Config.of(outer, out_dtype))


def dgrad(grad_RN, grad_scales_RC, rhs_EKN, rhs_scales_EBC, group_sizes_E, **options):
    """Gradient in the rows, [R, K]: `scaled_grouped_matmul` of the result's gradient and the weights as `transposed`."""
    return scaled_grouped_matmul(grad_RN, grad_scales_RC, rhs_EKN, rhs_scales_EBC, group_sizes_E, **options)


def transposed(rhs_ENK, rhs_scales_ECB):
    """The weights as `dgrad` takes them, (codes [E, K, N], scales [E, B, C]). Square blocks need no new scales."""
    return rhs_ENK.swapaxes(1, 2), rhs_scales_ECB.swapaxes(1, 2)


def wgrad(
    grad_NR,
    grad_scales_NB,
    lhs_KR,
    lhs_scales_KB,
    group_sizes_E,
    *,
    total=None,
    aligned: bool = False,
    implementation: str | None = None,
    config: GradConfig | None = None,
):
    """Gradient in the weights: every group's grad times lhs transposed, summed over its rows in float32.

    Both operands have their rows innermost and a scale for each channel and 128 rows (blocks of the array, whatever the
    groups). A group without rows gets exactly zero. Codes of rows in no group, and the scales of blocks of such rows
    only, may be anything.

    Args:
      grad_NR, lhs_KR: float8_e4m3fn or float8_e5m2 each; R a multiple of 128.
      grad_scales_NB, lhs_scales_KB: float32 [N, R / 128] and [K, R / 128].
      group_sizes_E: int32, not negative, their sum at most R.
      total: float32 [E, N, K] to add to, or None. The Hopper kernel adds in place where XLA may reuse the buffer.
      aligned: says that all sizes are multiples of 128 (padding rows hold zeros); the Hopper kernel then needs no copies of
        blocks that two groups share.
      implementation, config: as in `scaled_grouped_matmul`.

    Returns: float32 [E, N, K].  Raises as `scaled_grouped_matmul`.
    """
    outer, num_rows = _matrix("grad", grad_NR)
    inner, same_rows = _matrix("lhs", lhs_KR)
    if num_rows != same_rows:
        raise ValueError(f"grad and lhs must have the same rows, got {num_rows} and {same_rows}")
    if num_rows % BLOCK:
        raise ValueError(f"rows must be a multiple of {BLOCK}, got {num_rows}")
    _scales("grad_scales", grad_scales_NB, (outer, num_rows // BLOCK))
    _scales("lhs_scales", lhs_scales_KB, (inner, num_rows // BLOCK))
    groups = group_sizes_E.shape[0]
    _check(grad_NR, lhs_KR, group_sizes_E, groups, inner, outer)
    if total is not None:
        _scales("total", total, (groups, outer, inner))
    chosen = choose("scaled_grouped_matmul.wgrad", implementation, implementations())
    given = grad_NR, grad_scales_NB, lhs_KR, lhs_scales_KB, group_sizes_E.astype(jnp.int32)
    arrays = vma.align(*_without_gradient(*given, *(() if total is None else (total,))))
    if total is None:
        arrays = (*arrays, None)
    if chosen != "mosaic":
        return (reference if chosen == "reference" else xla).wgrad(*arrays)
    return _wgrad_on_hopper(*arrays, aligned=aligned, config=config or GradConfig())


def implementations() -> dict[str, str]:
    """Every implementation, with the reason why it doesn't run on this back end ("" where it does)."""
    return {"mosaic": hopper.unavailable(), "xla": "", "reference": ""}


def _on_hopper(lhs_RK, lhs_scales_RB, rhs_ENK, rhs_scales_ECB, sizes_E, *, out_dtype, config):
    """The kernel on an array that has whole units of eight rows, and a tile at least."""
    num_rows = lhs_RK.shape[0]
    more = (0, max(ROWS, -(-num_rows // ALIGN) * ALIGN) - num_rows), (0, 0)
    lhs_RK, lhs_scales_RB = (jnp.pad(x, more) if more[0][1] else x for x in (lhs_RK, lhs_scales_RB))
    out_RN = mosaic_sm90.grouped_matmul(lhs_RK, lhs_scales_RB.T, rhs_ENK, rhs_scales_ECB, sizes_E, out_dtype, config)
    return vma.cast_to(vma.axes_of(lhs_RK), out_RN)[:num_rows]


def _wgrad_on_hopper(grad_NR, grad_scales_NB, lhs_KR, lhs_scales_KB, sizes_E, total_ENK, *, aligned, config):
    axes, shape = vma.axes_of(grad_NR), (sizes_E.shape[0], grad_NR.shape[0], lhs_KR.shape[0])
    if grad_NR.shape[1] == 0:
        return vma.cast_to(axes, jnp.zeros(shape, jnp.float32)) if total_ENK is None else total_ENK
    operands = grad_NR, grad_scales_NB.T, lhs_KR, lhs_scales_KB.T
    return vma.cast_to(axes, mosaic_sm90_wgrad.wgrad(*operands, sizes_E, total_ENK, aligned, config))


def _columns_reason(config: Config | None, outer: int) -> str:
    if config is None or outer % config.columns == 0:
        return ""
    return f"Config.columns={config.columns} doesn't divide N = {outer}"


@jax.custom_jvp
def _without_gradient(*arrays):
    """The arrays, refusing to be differentiated: a gradient through codes would be that of rounding, zero or wrong."""
    return arrays


@_without_gradient.defjvp
def _refuse(primals, tangents):
    raise TypeError("float8 codes have no gradient: use dgrad and wgrad in the layer's own rule")


def _matrix(name: str, x) -> tuple[int, int]:
    if x.ndim != 2:
        raise ValueError(f"{name} must have two dims, got {list(x.shape)}")
    return x.shape


def _scales(name: str, x, shape) -> None:
    if x.shape != shape or x.dtype != jnp.float32:
        raise ValueError(f"{name} must be float32 {list(shape)}, got {x.dtype} {list(x.shape)}")


def _check(lhs, rhs, sizes, groups: int, inner: int, outer: int) -> None:
    if lhs.dtype not in _CODES or rhs.dtype not in _CODES:
        raise ValueError(f"codes must be float8_e4m3fn or float8_e5m2, got {lhs.dtype} and {rhs.dtype}")
    if sizes.shape != (groups,) or not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise ValueError(f"group_sizes must be integers [{groups}], got {sizes.dtype}{list(sizes.shape)}")
    if inner % BLOCK or outer % BLOCK or not inner or not outer:
        raise ValueError(f"K and N must be multiples of {BLOCK}, got K = {inner} and N = {outer}")
