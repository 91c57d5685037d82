"""Kernels on the CPU: the GPU interpreter with its race detector, cleaned up behind a failure."""

import contextlib
from collections.abc import Iterator

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat


@contextlib.contextmanager
def interpreted(*, races: bool = True) -> Iterator[None]:
    """Kernels called inside run in the interpreter; a race or another fault raises. One device only with `races`."""
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=races)):
        try:
            yield
            jax.effects_barrier()
        except BaseException:
            compat.reset_interpreter()
            raise
        if races:
            assert not compat.races_found()
