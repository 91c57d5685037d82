"""The grouped matmul by Mosaic GPU kernels, with its gradients.

R rows, E groups, K and N the matrix dims.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import vma
from pallas_kernels.grouped_matmul import mosaic_sm90
from pallas_kernels.grouped_matmul.config import STEP, HopperConfig
from pallas_kernels.grouped_matmul.mosaic_sm90_wgrad import wgrad
from pallas_kernels.warpgroups import ROWS


def unsupported(lhs_RK, rhs_EKN, out_dtype, config: HopperConfig | None) -> str:
    """Why the kernels cannot compute this product or its gradients; "" where they can."""
    _, inner, outer = rhs_EKN.shape
    if lhs_RK.dtype != jnp.bfloat16:
        return f"its Hopper kernels take bfloat16, not {lhs_RK.dtype}"
    if out_dtype not in (jnp.bfloat16, jnp.float32):
        return f"its Hopper kernels give bfloat16 or float32, not {out_dtype}"
    columns = config.columns if config else 128
    if inner % columns or outer % columns or not inner or not outer:
        return f"its Hopper kernels need K and N to be multiples of {columns}, got K = {inner} and N = {outer}"
    return ""


def grouped_matmul(lhs_RK, rhs_EKN, group_sizes_E, out_dtype, config: HopperConfig | None):
    """As in the package's `grouped_matmul`; all arguments must vary over the same mesh axes."""
    num_rows = lhs_RK.shape[0]
    missing = max(ROWS, -(-num_rows // STEP) * STEP) - num_rows
    if missing:  # the kernels read whole units of rows
        lhs_RK = jnp.pad(lhs_RK, ((0, missing), (0, 0)))
    return _multiply(lhs_RK, rhs_EKN, group_sizes_E, out_dtype, config)[:num_rows]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _multiply(lhs_RK, rhs_EKN, group_sizes_E, out_dtype, config):
    use = config or HopperConfig.of(rhs_EKN.shape[2])
    return _typed(lhs_RK, mosaic_sm90.grouped_matmul(lhs_RK, rhs_EKN, group_sizes_E, out_dtype, use))


def _fwd(lhs_RK, rhs_EKN, group_sizes_E, out_dtype, config):
    return _multiply(lhs_RK, rhs_EKN, group_sizes_E, out_dtype, config), (lhs_RK, rhs_EKN, group_sizes_E)


def _bwd(out_dtype, config, kept, g_RN):
    lhs_RK, rhs_EKN, sizes_E = kept
    g_RN = g_RN.astype(lhs_RK.dtype)
    _, inner, outer = rhs_EKN.shape
    by_rows = config or HopperConfig.of(inner)
    by_groups = config or HopperConfig.of(outer)
    dlhs_RK = mosaic_sm90.grouped_matmul(g_RN, rhs_EKN, sizes_E, lhs_RK.dtype, by_rows, transposed=True)
    drhs_EKN = wgrad(lhs_RK, g_RN, sizes_E, rhs_EKN.dtype, by_groups)
    return _typed(lhs_RK, dlhs_RK), _typed(lhs_RK, drhs_EKN), None


_multiply.defvjp(_fwd, _bwd)


def _typed(like, out):
    """The kernel's result, which it types as equal on all devices, typed as varying like its operands."""
    return vma.cast_to(vma.axes_of(like), out)
