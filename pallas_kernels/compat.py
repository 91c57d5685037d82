"""The few places where the kernels touch what JAX doesn't export, or names otherwise in 0.11 and 0.12."""

import functools
from collections.abc import Mapping

import jax
from jax._src import config as _config
from jax._src.pallas import mpmd as _mpmd
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as _interpreter
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


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


def kernel_in_place(body, *, out_type, scratch_types, compiler_params, aliases: Mapping[int, int], **mesh):
    """`plgpu.kernel` whose outputs may be operands' memory: {operand: output}. `mesh`: what `plgpu.Mesh` takes.

    Through a `Ref`, which plgpu.kernel takes for this, it would not run in a shard_map: those may not vary over mesh axes.
    """
    blocks = plgpu.Mesh(**mesh)

    def scoped(*refs):
        pl.run_scoped(functools.partial(body, *refs), *scratch_types, collective_axes=mesh["thread_name"])

    def call(*operands):
        with _config._check_vma(False):  # as plgpu.kernel does: refs inside a kernel have no manual axes
            run = _mpmd._mpmd_map(
                [(blocks, scoped)],
                (out_type,),
                input_output_aliases=dict(aliases),
                compiler_params=compiler_params,
                interpret=_config.pallas_tpu_interpret_mode_context_manager.value or False,
                name=mesh["kernel_name"],
            )
            return run(*operands)[0]

    return call
