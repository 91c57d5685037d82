"""The options with which XLA compiles a run's programs for GPUs, each with its reason: they stand here and nowhere else.

They are options of the programs, not of the process (`XLA_FLAGS`), so a notebook, `train.py` and a plan compile the same. An
option that XLA_FLAGS names is left to it. CPUs get none.
"""

import os
from typing import NamedTuple

from moex.config import RunConfig

_GRAPHS = {
    "off": [],
    "layers": ["FUSION", "CUBLAS", "CUBLASLT", "CUDNN", "CUSTOM_CALL", "COLLECTIVES", "DYNAMIC_SLICE_FUSION"],
}
_GRAPHS["step"] = [*_GRAPHS["layers"], "WHILE"]
_WHY = {
    "off": "every kernel is launched by itself",
    "layers": "a layer's kernels, collectives included, are launched at once as a CUDA graph",
    "step": "a whole step is launched at once as a CUDA graph",
}


class Option(NamedTuple):
    """An option of XLA's, its value and why it has it."""

    name: str
    value: str | bool
    why: str


def options(config: RunConfig) -> list[Option]:
    """What a configuration asks of XLA on GPUs, but for what XLA_FLAGS already says."""
    chosen = []
    if config.parallel.pp > 1 or config.parallel.overlap:
        why = "with it XLA 0.12 takes over 20 minutes to fuse the ticks of a pipeline, without it seconds"
        chosen.append(Option("xla_gpu_experimental_enable_tiling_propagation", False, why))
    if config.memory.offload:
        why = "what comes back from the host is asked for a layer ahead, not where it is first used"
        chosen.append(Option("xla_gpu_enable_pipelined_host_offloading", True, why))
    graphs = config.compiler.command_buffers
    if graphs != "kernels":
        chosen.append(Option("xla_gpu_enable_command_buffer", ",".join(_GRAPHS[graphs]), _WHY[graphs]))
    if graphs == "step":
        why = "a loop's layers stand one after the other in the graph, each with its own slice of the weights"
        chosen.append(Option("xla_gpu_command_buffer_unroll_loops", True, why))
    given = os.environ.get("XLA_FLAGS", "")
    return [option for option in chosen if f"--{option.name}" not in given.replace("=", " ").split()]


def compiler_options(config: RunConfig, platform: str) -> dict[str, str | bool] | None:
    """The options for `jax.jit` on a platform of devices; None where that is not GPUs.

    platform: as devices name it; GPUs that are only compiled for are "cuda".
    """
    if platform not in ("gpu", "cuda"):
        return None
    return {option.name: option.value for option in options(config)} or None
