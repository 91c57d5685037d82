"""The few places where the kernels touch what JAX doesn't export, or names otherwise in 0.11 and 0.12."""

import jax
from jax._src import config as _config
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as _interpreter


def interpreting() -> bool:
    """True inside `plgpu.force_gpu_interpret_mode`: kernels then run on the CPU."""
    return bool(_config.pallas_tpu_interpret_mode_context_manager.value)  # the TPU's and the GPU's share one switch


def reset_interpreter() -> None:
    """Clears what an interpreted kernel that raised left behind; without it the next one fails, too."""
    _interpreter.reset_gpu_interpret_mode_state()


def races_found() -> bool:
    """True when the last kernel interpreted with `detect_races=True` had a race."""
    return _interpreter.get_races().races_found


def device_kind() -> str:
    """Kind of the device to compile for: that of the ambient abstract mesh, which Pallas asks too, or the default one."""
    mesh = jax.sharding.get_abstract_mesh()
    abstract = getattr(mesh, "abstract_device", None)
    if abstract is not None:
        return abstract.device_kind
    default = jax.config.jax_default_device  # a device, a platform's name, or None
    if isinstance(default, jax.Device):
        return default.device_kind
    return jax.devices(default)[0].device_kind
