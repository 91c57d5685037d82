"""In which formats steps compute, and what they keep for the backward pass."""

import dataclasses
from typing import Literal

Module = Literal["layer", "attention", "mlp", "moe", "experts"]
"""Parts of a layer that stand for several of the following."""
Residual = Literal[
    "layer_input", "attn_norm", "qkv", "mla_down_proj", "mla_up_proj", "context", "core_attn", "attn_proj", "mlp_norm",
    "mlp_fc1", "router", "expert_rows", "expert_fc1", "shared_experts", "latent_rows",
]  # fmt: skip
"""What a layer may keep for its backward pass: see docs/memory.md."""
Recipe = Literal["compute", "fp8_block", "fp8_tensor", "mxfp8", "nvfp4"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Formats of compute. Parameters, optimizer, router, norms' statistics, loss and reductions are float32 always."""

    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of activations and weights in attention, MLP and experts."""
    recipe: Recipe = "compute"
    """Of the products of attention's projections, MLPs and experts, forward and both gradients. fp8_block: E4M3 with a
    power-of-two scale for 1 x 128 of activations and gradients and 128 x 128 of weights (DeepSeek-V3). fp8_tensor: one scale
    an array, gradients in E5M2. mxfp8: a scale for 32. nvfp4: 4-bit, a scale for 16 and one above it."""
    attention: Recipe | Literal["recipe"] = "recipe"
    """Of attention's projections, where they differ from `recipe`."""
    mlp: Recipe | Literal["recipe"] = "recipe"
    """Of the MLPs of dense layers, where they differ from `recipe`."""
    shared: Recipe | Literal["recipe"] = "recipe"
    """Of shared experts, where they differ from `recipe`."""
    experts: Recipe | Literal["recipe"] = "recipe"
    """Of routed experts, where they differ from `recipe`."""
    wire: Literal["compute", "forward", "both"] = "compute"
    """How rows travel to experts: in the compute dtype; or tokens as FP8 codes with a scale for 128 (forward); or also the
    gradients of combined results (both). What is summed on its way back is never quantised."""
    gather: Literal["compute", "codes"] = "compute"
    """Quantised weights are gathered in the compute dtype and then quantised, or quantised where they are stored, from the
    float32 master, and gathered as codes."""
    high_first: int = 0
    """The first this many layers compute in the compute dtype, whatever the recipes."""
    high_last: int = 0
    """The last this many layers likewise."""
    emulate: bool = False
    """Run recipes that the GPU has no tensor cores or kernels for: exact, and slower than the compute dtype."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """What the backward pass computes again or finds elsewhere than in buffers of each layer, and what waits on the host."""

    recompute: tuple[Literal[Module, Residual], ...] = ()
    """Modules, or single ones of their results, that are computed again; `layer` is all of them. Rows in a stash are not."""
    offload: tuple[Residual, ...] = ()
    """Results that go to pinned memory of the host in the forward pass and come back, a layer ahead, in the backward pass."""
    optimizer: Literal["device", "host"] = "device"
    """Where the optimizer's moments are between steps: on the device, or in pinned memory of the host."""
    stash: tuple[Literal["experts"], ...] = ()
    """Modules whose rows all layers keep in one stash, of the size that is used rather than the worst case of each layer."""
    stash_factor: float = 1.1
    """Rows of the stash, in units of what all layers use when routing is balanced; 0 takes the worst case. A step that needs
    more is run again with the next of `parallel.rungs` sizes."""
