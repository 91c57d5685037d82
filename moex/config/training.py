"""The run's length, batch, optimizer, data and checkpoints."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The run's length and batch."""

    steps: int = 400
    """Optimizer steps."""
    batch_size: int = 16
    """Rows (sequences) of a step over all devices."""
    accumulation: int = 1
    """Micro-batches that a step's batch is cut into."""
    seq_len: int = 256
    """Tokens of a row (S)."""
    seed: int = 0
    """Of initial values and data order."""
    run_ahead: int = 1
    """Steps that are enqueued before the numbers of an earlier one are read."""
    loss_chunk_tokens: int = 2048
    """Logits are held for this many tokens of a device at a time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer, learning rate, clipping (optax)."""

    name: Literal["adamw", "sgd"] = "adamw"
    peak_lr: float = 2e-3
    """Learning rate after warm-up."""
    final_lr: float = 2e-4
    """Learning rate at the last step."""
    warmup_steps: int = 40
    """Steps of linear warm-up from 0."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Way from the peak to the final rate after warm-up."""
    weight_decay: float = 0.1
    """AdamW's decoupled decay, of matrices only (not norms, biases)."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_norm: float = 1.0
    """Largest global gradient norm; 0 doesn't clip."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where tokens come from."""

    corpus: Literal["stdlib"] = "stdlib"
    """stdlib: sources of Python's standard library as bytes, found on any machine."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving by orbax into RUN/checkpoints."""

    every_steps: int = 200
    """A checkpoint every this many steps, and after the last one."""
    keep: int = 2
    """Newest checkpoints kept."""
