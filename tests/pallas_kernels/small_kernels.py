"""Small Mosaic kernels for the tests of the compile-only harness, some of them faulty on purpose."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.case import Case

SIDE = 128
TILES = (plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128))


def product(a, b, *, transposed=True, scratch_bytes=0):
    """[128, 128] x [128, 128] float8 by one warpgroup; `transposed=False` asks for what the hardware cannot do."""

    def kernel(a_gmem, b_gmem, out_gmem, a_smem, b_smem, barrier, *_):
        plgpu.copy_gmem_to_smem(a_gmem, a_smem, barrier)
        plgpu.copy_gmem_to_smem(b_gmem, b_smem, barrier)
        plgpu.barrier_wait(barrier)

        def multiply(acc):
            plgpu.wgmma(acc, a_smem, b_smem.transpose((1, 0)) if transposed else b_smem)
            return acc[...]

        out_gmem[...] = pl.run_scoped(multiply, plgpu.ACC((SIDE, SIDE), jnp.float32))

    smem = plgpu.SMEM((SIDE, SIDE), jnp.float8_e4m3fn, transforms=TILES)
    room = [plgpu.SMEM((scratch_bytes,), jnp.int8)] if scratch_bytes else []
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32),
        scratch_types=[smem, smem, plgpu.Barrier(num_arrivals=2), *room],
        grid=(1,),
        grid_names=("sm",),
        kernel_name="product",
    )(a, b)


def too_many_live(a):
    """640 floats of each thread live at once: more than its 255 registers."""

    def kernel(a_gmem, out_gmem):
        parts = [plgpu.load(a_gmem.at[i], layout=plgpu.Layout.WGMMA, optimized=False) for i in range(10)]
        total = functools.reduce(lambda x, y: x * y, parts)
        for part in parts:  # so that none is dead before all are loaded
            total += part * total
        out_gmem[...] = total

    shape = jax.ShapeDtypeStruct(a.shape[1:], jnp.float32)
    return plgpu.kernel(kernel, out_type=shape, grid=(1,), grid_names=("sm",), kernel_name="too_many_live")(a)


def production_cases() -> tuple[Case, ...]:
    codes = (jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float8_e4m3fn),) * 2
    return (
        Case("product", product, codes),
        Case("not K-major", functools.partial(product, transposed=False), codes),
        Case("too much shared memory", functools.partial(product, scratch_bytes=200_000), codes),
        Case("too many live", too_many_live, (jax.ShapeDtypeStruct((10, 64, 128), jnp.float32),)),
        Case("no kernel", lambda a, b: a, codes),
    )
