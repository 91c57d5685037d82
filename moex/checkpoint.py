"""Saving and restoring the training state by orbax (v1), and looking at what was saved.

A checkpoint is named by the number of steps done; it holds the whole `TrainState` as nested names, independent of the
mesh it was saved from.
"""

import contextlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from moex.config import CheckpointConfig
from moex.train.state import TrainState


class Checkpoints:
    """The checkpoints of one run folder; saving is asynchronous. Use as a context manager, so that the last save ends."""

    def __init__(self, run_folder: str | Path, config: CheckpointConfig):
        # orbax's own policies are typed for its older class of checkpoint metadata.
        every: Any = ocp.training.save_decision_policies.FixedIntervalPolicy(config.every_steps)
        newest: Any = ocp.training.preservation_policies.LatestN(config.keep)
        self._checkpointer = ocp.training.Checkpointer(
            str((Path(run_folder) / "checkpoints").absolute()),
            save_decision_policy=every,
            preservation_policy=newest,
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exc: object) -> None:
        self._checkpointer.close()

    @property
    def latest(self) -> int | None:
        """Steps done of the newest checkpoint, or None."""
        found = self._checkpointer.latest
        return None if found is None else found.step

    def due(self, step: int) -> bool:
        """Whether a checkpoint after `step` steps is wanted."""
        return self._checkpointer.should_save(step)

    def save(self, step: int, state: TrainState) -> None:
        """Starts saving; returns once the values are out of the device's buffers, so the next step may reuse them."""
        if self.latest != step:
            self._checkpointer.save_async(step, _named(state), force=True)

    def restore(self, abstract: TrainState, step: int | None = None) -> TrainState:
        """The state after `step` steps (None: the newest), laid out as `abstract` says, on whatever mesh that is."""
        values: Any = self._checkpointer.load(step, _named(abstract))
        return TrainState(**values)


@contextlib.contextmanager
def _reading(run_folder: str | Path) -> Generator[ocp.training.Checkpointer]:
    folder = Path(run_folder) / "checkpoints"
    if not folder.is_dir():
        raise ValueError(f"{run_folder} has no folder `checkpoints`: give the folder of a run")
    with ocp.training.Checkpointer(str(folder.absolute())) as checkpointer:
        if checkpointer.latest is None:
            raise ValueError(f"{folder} holds no finished checkpoint")
        yield checkpointer


def open_step(run_folder: str | Path, step: int | None = None) -> dict[str, Any]:
    """A saved step as a tree of named numpy arrays, on any machine.

    Args: step as in the folder's name; None takes the newest.
    Raises ValueError when the folder holds no checkpoint of that step.
    """
    with _reading(run_folder) as checkpointer:
        steps = [c.step for c in checkpointer.checkpoints]
        if step is not None and step not in steps:
            raise ValueError(f"{run_folder} has no checkpoint of step {step}; it has {steps}")
        kept = checkpointer.metadata(step).metadata
        local = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shaped = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=local)
        return jax.device_get(checkpointer.load(step, jax.tree.map(shaped, kept)))


def _named(state: TrainState) -> Any:
    return state._asdict()
