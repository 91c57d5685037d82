"""What differs between the JAX versions that kernels run on, and what has no public name yet."""

from jax._src import config
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call


def interpreting() -> bool:
    """Whether Mosaic GPU kernels traced now run in the interpreter (`plgpu.force_gpu_interpret_mode`)."""
    return config.pallas_tpu_interpret_mode_context_manager.value is not None


def reset_interpreter() -> None:
    """Needed after an exception inside an interpreted kernel, before the next one."""
    interpret_pallas_call.reset_gpu_interpret_mode_state()


def races_found() -> bool:
    """Whether the last kernel interpreted with `detect_races` had a race."""
    state = interpret_pallas_call.get_races()
    return bool(state and state.races_found)
