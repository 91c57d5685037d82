"""Every setting of a run: frozen dataclasses, one a section. Defaults are those of a small model on one device.

Values are plain (numbers, strings, tuples), so a resolved configuration is a JSON file that can be loaded again.
"""

import dataclasses

from moex.config.compiler import CompilerConfig
from moex.config.compute import MemoryConfig, Module, PrecisionConfig, Residual
from moex.config.model import AttentionConfig, ModelConfig, RopeConfig, RouterConfig
from moex.config.observe import ObserveConfig
from moex.config.parallel import ParallelConfig
from moex.config.training import CheckpointConfig, DataConfig, OptimizerConfig, TrainConfig

__all__ = [
    "AttentionConfig",
    "CheckpointConfig",
    "CompilerConfig",
    "DataConfig",
    "MemoryConfig",
    "Module",
    "ModelConfig",
    "ObserveConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "Residual",
    "RopeConfig",
    "RouterConfig",
    "RunConfig",
    "TrainConfig",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A run. Every field can be set on the command line as --section.field."""

    name: str = "custom"
    """Of the preset; the run folder is runs/NAME unless `folder` says otherwise."""
    folder: str = ""
    """The run folder; an existing one is continued."""
    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    precision: PrecisionConfig = PrecisionConfig()
    memory: MemoryConfig = MemoryConfig()
    compiler: CompilerConfig = CompilerConfig()
    data: DataConfig = DataConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    observe: ObserveConfig = ObserveConfig()

    @property
    def run_folder(self) -> str:
        return self.folder or f"runs/{self.name}"
