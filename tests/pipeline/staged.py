"""A step over pipeline stages, named for what is different in it."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from moex.config import MemoryConfig, ModelConfig, ParallelConfig, RunConfig
from tests.train.tiny import MODELS, tiny_config

DEEP = {name: dataclasses.replace(model, num_layers=4) for name, model in MODELS.items()}
DEEP["three"] = dataclasses.replace(MODELS["dropping"], num_layers=3)
DEEP["further"] = dataclasses.replace(MODELS["mla"], num_layers=3, mtp_depth=1, mtp_coefficient=0.3)


class Staged(NamedTuple):
    """A folding of eight devices with stages, and what else differs from the step that it is compared with."""

    parallel: ParallelConfig
    model: str = "gqa"
    accumulation: int = 4
    recompute: tuple[str, ...] = ()
    skewed: bool = False

    def __str__(self):
        p = self.parallel
        sizes = [
            f"{name}{getattr(p, name)}" for name in ("pp", "virtual_pp", "dp", "cp", "tp", "edp", "ep", "etp", "zero")
        ]
        how = [self.model, f"acc{self.accumulation}", p.transport, p.layout, *["overlap"] * p.overlap, *self.recompute]
        return "-".join(filter(None, [*sizes, *how]))

    def config(self, models: Mapping[str, ModelConfig] = DEEP) -> RunConfig:
        memory = MemoryConfig(recompute=self.recompute)
        return tiny_config(models[self.model], accumulation=self.accumulation, parallel=self.parallel, memory=memory)
