"""How XLA turns a step into what a GPU runs."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompilerConfig:
    """What XLA is asked for on GPUs; nothing of it changes a bit of the results."""

    command_buffers: Literal["off", "kernels", "layers", "step"] = "kernels"
    """What the host launches at once, as CUDA graphs. kernels: neighbouring kernels, as XLA does by itself. layers: also
    collectives and custom kernels, so that a layer is one launch. step: loops too, so that a whole step is one launch."""
