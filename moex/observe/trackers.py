"""Where a run's numbers go beside its folder: TensorBoard, Weights & Biases, MLflow.

L MoE layers, E experts.
"""

import dataclasses
import importlib
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from moex.config import RunConfig
from moex.observe.load import counts_array, load_entropy, max_over_mean

PACKAGES = dict(tensorboard="tensorboardX", wandb="wandb", mlflow="mlflow")
"""What each tracker imports; `validate` says when it is missing."""
_LEFT_OUT = ("step", "time")
_GROUPS = dict(
    loss=("loss", "lm_loss", "aux_loss", "z_loss", "sequence_loss", "global_loss"),
    eval=("eval_loss", "eval_loss_ema", "eval_tokens"),
    speed=("tokens_per_s", "model_tflops", "mfu", "step_s", "data_s", "eval_s"),
    optimizer=("lr", "grad_norm", "skipped", "rows", "valid_tokens"),
)


class Tracker(Protocol):
    """Takes a step's numbers by name; `close` sends what is left."""

    def step(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a step record as group/name, and of expert_counts the load and entropy of each MoE layer."""
    group_of = {name: group for group, names in _GROUPS.items() for name in names}
    out = {}
    for name, value in record.items():
        if name not in _LEFT_OUT and isinstance(value, int | float | np.number):
            out[f"{group_of.get(name, 'router')}/{name}"] = float(value)
    counts_LE = counts_array(record.get("expert_counts"))
    if counts_LE.size:
        loads_L, entropy_L = max_over_mean(counts_LE), load_entropy(counts_LE)
        out |= {f"load/layer_{layer:03}": float(x) for layer, x in enumerate(loads_L)}
        out |= {"router/worst_load": float(np.nanmax(loads_L)), "router/least_entropy": float(np.nanmin(entropy_L))}
    out |= {f"gate/layer_{layer:03}": float(x) for layer, x in enumerate(record.get("gate_load", ())) if x is not None}
    return {name: value for name, value in out.items() if np.isfinite(value)}


def open_trackers(config: RunConfig, folder: Path) -> list[Tracker]:
    """The trackers that observe.trackers names."""
    makers = dict(tensorboard=TensorBoard, wandb=WandB, mlflow=MLflow)
    return [makers[name](config, folder) for name in config.observe.trackers]


class TensorBoard:
    """RUN/tb, by tensorboardX; `tensorboard --logdir runs` compares runs."""

    def __init__(self, config: RunConfig, folder: Path):
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tb"), flush_secs=30)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A run of the project `moex`, or of WANDB_PROJECT, continued where the folder is.  WANDB_MODE=offline keeps it here."""

    def __init__(self, config: RunConfig, folder: Path):
        wandb = importlib.import_module("wandb")
        kept = folder / "wandb_id"
        if not kept.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            kept.write_text(secrets.token_hex(6))
        settings = dict(id=kept.read_text(), resume="allow", dir=str(folder), config=dataclasses.asdict(config))
        self._run = wandb.init(name=folder.name, **settings)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of the experiment `moex`; MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME choose where."""

    def __init__(self, config: RunConfig, folder: Path):
        self._mlflow = importlib.import_module("mlflow")
        kept = folder / "mlflow_id"
        known = kept.read_text() if kept.is_file() else None
        run = self._mlflow.start_run(run_id=known, run_name=None if known else folder.name)
        if known is None:
            folder.mkdir(parents=True, exist_ok=True)
            kept.write_text(run.info.run_id)
            self._mlflow.log_dict(dataclasses.asdict(config), "config.json")

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        self._mlflow.end_run()
