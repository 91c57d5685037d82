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
    ramp_sizes: tuple[int, ...] = ()
    """Smaller batch sizes to begin with, rising, in whole micro-batches; fewer of those are accumulated."""
    ramp_samples: tuple[int, ...] = ()
    """Rows seen until which each of them holds."""
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

    name: Literal["adamw", "sgd", "muon"] = "adamw"
    """muon: matrices of layers get orthogonalised momentum, all else AdamW's update."""
    peak_lr: float = 2e-3
    """Learning rate after warm-up."""
    final_lr: float = 2e-4
    """Learning rate at the last step of the schedule."""
    warmup_steps: int = 40
    """Steps of linear warm-up from 0."""
    schedule: Literal["cosine", "constant", "wsd"] = "cosine"
    """Way from the peak to the final rate after warm-up; wsd stays at the peak until the cooldown, which is linear."""
    schedule_steps: int = 0
    """Step at which the final rate is reached, and where it stays; 0 for train.steps."""
    cooldown_steps: int = 0
    """Steps of wsd's decline; 0 for a tenth of the schedule."""
    weight_decay: float = 0.1
    """AdamW's decoupled decay, of matrices only (not norms, biases)."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    moments: Literal["float32", "bfloat16"] = "float32"
    """Averages of gradients as they are kept; they are computed in float32."""
    sgd_momentum: float = 0.0
    """sgd: share of the old direction that is added to the gradient; 0 keeps none."""
    muon_momentum: float = 0.95
    """muon: share of the old momentum in the new one."""
    muon_rms: float = 0.2
    """muon: root mean square of an update's elements for a learning rate of 1, about AdamW's."""
    qk_clip: float = 0.0
    """QK-clip: a head with attention logits above this gets smaller query and key weights after the update (Kimi K2: 100);
    0 leaves it out."""
    qk_clip_alpha: float = 0.5
    """qk_clip: share of the factor, as an exponent, that queries take; keys take the rest."""
    clip_norm: float = 1.0
    """Largest global gradient norm; 0 doesn't clip."""
    lr_scales: tuple[str, ...] = ()
    """PATTERN=FACTOR: the learning rate of parameters whose dotted names match (*, ?, [..]), times the factor."""
    freeze: tuple[str, ...] = ()
    """Patterns of parameters that are not trained: no gradient, no decay, no moments."""
    ema_decay: float = 0.0
    """Of an average of the parameters over steps, evaluated beside them; 0 keeps none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where tokens come from."""

    corpus: tuple[str, ...] = ("stdlib",)
    """Folders that `python -m moex.data tokenize` wrote, local or remote; stdlib: sources of Python's standard library."""
    weights: tuple[float, ...] = ()
    """Share of rows from each corpus; by their sizes otherwise."""
    packing: Literal["windows", "documents"] = "windows"
    """windows cut the text every seq_len tokens; documents are packed whole, best fit first, and cut only where longer."""
    max_epochs: float = 0.0
    """Refuse to go through a corpus more often than this; 0 allows any number."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving by orbax into RUN/checkpoints."""

    every_steps: int = 200
    """A checkpoint every this many steps, and after the last one."""
    keep: int = 2
    """Newest checkpoints kept."""
