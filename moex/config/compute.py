"""In which formats steps compute, and what they keep for the backward pass."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Formats of compute. Parameters, optimizer, router, norms' statistics, loss and reductions are float32 always."""

    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of activations and weights in attention, MLP and experts."""
    experts: Literal["compute", "fp8_block"] = "compute"
    """Of experts' products, forward and both gradients: the compute dtype; or E4M3 with a power-of-two scale for 1 x 128 of
    activations and gradients and 128 x 128 of weights, sums in float32 (DeepSeek-V3)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """What the backward pass computes again, and what it finds elsewhere than in buffers of each layer."""

    recompute: tuple[Literal["layer", "attention", "mlp", "moe", "experts"], ...] = ()
    """Modules that are computed again; `layer` is all of them at once. Rows in a stash are not."""
    stash: tuple[Literal["experts"], ...] = ()
    """Modules whose rows all layers keep in one stash, of the size that is used rather than the worst case of each layer."""
    stash_factor: float = 1.1
    """Rows of the stash, in units of what all layers use when routing is balanced; 0 takes the worst case. A step that needs
    more is run again with the next of `parallel.rungs` sizes."""
