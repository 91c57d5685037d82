"""Kernels on the CPU: the GPU interpreter with its race detector, cleaned up behind a failure."""

import contextlib
from collections.abc import Iterator

import jax
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Kernels called inside run in the interpreter, on one device; a race or another fault raises."""
    with _running(detect_races=True):
        yield
        jax.effects_barrier()
        assert not compat.races_found()


@contextlib.contextmanager
def interpreted_on_two_devices() -> Iterator[None]:
    """The same without races, of which it reports false ones between devices.

    The device that ends a kernel first would take the other's barriers for forgotten ones: that check is left out, too.
    """
    with pytest.MonkeyPatch.context() as patch, _running(detect_races=False):
        check = "call_assert_no_barriers_allocated"
        if hasattr(gpu_callbacks, check):
            patch.setattr(gpu_callbacks, check, lambda token: token)
        yield
        jax.effects_barrier()


@contextlib.contextmanager
def _running(*, detect_races: bool) -> Iterator[None]:
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=detect_races)):
        try:
            yield
        except BaseException:
            compat.reset_interpreter()
            raise
