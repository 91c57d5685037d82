"""Hopper kernels in the GPU interpreter on two devices at once."""

import contextlib
from collections.abc import Iterator

import jax
import pytest
from jax._src.pallas.mosaic_gpu.interpret import shared_memory
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Kernels traced and run inside are interpreted, without the race detector, whose clocks know one device only.

    The interpreter asserts at a kernel's end that no barrier is left, and sees those of the other device, still running.
    """
    with pytest.MonkeyPatch.context() as patch, plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        patch.setattr(shared_memory.GPUSharedMemory, "assert_no_barriers_allocated", lambda self: None)
        try:
            yield
            jax.effects_barrier()
        except BaseException:
            compat.reset_interpreter()
            raise
