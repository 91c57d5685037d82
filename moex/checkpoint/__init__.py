"""Saving and restoring the training state by orbax (v1), and looking at what was saved.

A checkpoint is named by the number of steps done; it holds the whole `TrainState` as nested names, independent of the
mesh it was saved from. Beside it stand the checksum of every array and what the run knew of itself.
"""

import contextlib
import functools
import operator
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from moex.checkpoint.checksum import checksums
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

    def save(self, step: int, state: TrainState, facts: Mapping[str, Any] | None = None) -> None:
        """Starts saving; returns once the values are out of the device's buffers, so the next step may reuse them.

        facts: of the run, for those who look at the checkpoint later; what JSON can hold.
        """
        if self.latest != step:
            tree = _named(state)
            metadata: Any = dict(facts or {}) | dict(checksums=checksums(tree))
            self._checkpointer.save_async(step, tree, force=True, custom_metadata=metadata)

    def weights(self, abstract: TrainState) -> dict[str, Any] | None:
        """`params` and `router_bias` of `save_weights`, laid out as `abstract` says; None where no such state was saved."""
        if self.latest != 0:
            return None
        wanted: Any = dict(params=abstract.params, router_bias=abstract.router_bias)
        values: Any = self._checkpointer.load(0, wanted)
        return values

    def restore(self, abstract: TrainState, step: int | None = None) -> TrainState:
        """The state after `step` steps (None: the newest), laid out as `abstract` says, on whatever mesh that is."""
        values: Any = self._checkpointer.load(step, _named(abstract))
        return TrainState(**values)


def save_weights(run_folder: str | Path, params: Any, router_bias: Any, mesh: str = "") -> None:
    """Saves a state of step 0 that has these alone, and waits; a run begins from it with a fresh optimizer.

    mesh: what is said of the devices' layout to those who look at the checkpoint. No checksums are saved: computing them
    takes about as much memory again as the arrays, and the files they came from are still there.

    Nothing changes the arrays meanwhile, so the host needs no copies of them, only the pieces that are being written.
    """
    weights: Any = dict(params=params, router_bias=router_bias)
    context = ocp.Context()
    context.memory.deepcopy_host_arrays = False
    largest = max(x.nbytes for x in jax.tree.leaves(weights))
    context.memory.write_concurrent_bytes = context.memory.transfer_concurrent_bytes = largest + 1
    context.array.saving.storage_options.chunk_byte_size = 2**26
    folder = Path(run_folder) / "checkpoints"
    with ocp.training.Checkpointer(str(folder.absolute()), context=context) as checkpointer:
        device = jax.devices()[0].device_kind
        facts = dict(processes=jax.process_count(), num_devices=jax.device_count(), device_kind=device, mesh=mesh)
        metadata: Any = facts | dict(jax=jax.__version__)
        checkpointer.save(0, weights, custom_metadata=metadata)


@contextlib.contextmanager
def saved_arrays(run_folder: str | Path, step: int | None = None) -> Generator[Callable[[str], np.ndarray]]:
    """A function that reads one array of a saved step by its dotted name ("params.ends.embedding"), and no other.

    Raises ValueError as `open_step`; the function raises KeyError for a name that wasn't saved.
    """
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    with reading(run_folder, context) as checkpointer:
        kept: Any = about(checkpointer, step).metadata
        local = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        at: Callable[[Any, list[str]], Any] = lambda tree, path: functools.reduce(operator.getitem, path, tree)
        inside: Callable[[Any, str], Any] = lambda tree, name: {name: tree}

        def read(name: str) -> np.ndarray:
            path = name.split(".")
            leaf = at(kept, path)
            wanted: Any = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=local)
            for part in reversed(path):
                wanted = inside(wanted, part)
            with _told(run_folder, step):
                found = checkpointer.load(step, wanted)
            return jax.device_get(at(found, path))

        yield read


@contextlib.contextmanager
def reading(run_folder: str | Path, context: ocp.Context | None = None) -> Generator[ocp.training.Checkpointer]:
    """The checkpoints of a run, to look at.  Raises ValueError when there is none."""
    folder = Path(run_folder) / "checkpoints"
    if not folder.is_dir():
        raise ValueError(f"{run_folder} has no folder `checkpoints`: give the folder of a run")
    with ocp.training.Checkpointer(str(folder.absolute()), context=context) as checkpointer:
        if checkpointer.latest is None:
            raise ValueError(f"{folder} holds no finished checkpoint")
        yield checkpointer


def open_step(run_folder: str | Path, step: int | None = None) -> dict[str, Any]:
    """A saved step as a tree of named numpy arrays, on any machine.

    Args: step as in the folder's name; None takes the newest.
    Raises ValueError when the folder holds no checkpoint of that step, or one that cannot be read.
    """
    with reading(run_folder) as checkpointer:
        kept = about(checkpointer, step).metadata
        local = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shaped = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=local)
        with _told(run_folder, step):
            return jax.device_get(checkpointer.load(step, jax.tree.map(shaped, kept)))


def about(checkpointer: ocp.training.Checkpointer, step: int | None) -> Any:
    """What orbax knows of a step (None: the newest): tree of shapes, times, our facts.  Raises ValueError without it."""
    steps = [c.step for c in checkpointer.checkpoints]
    if step is not None and step not in steps:
        raise ValueError(f"{checkpointer.directory.parent} has no checkpoint of step {step}; it has {steps}")
    with _told(checkpointer.directory.parent, step):
        found: Any = checkpointer.metadata(step)
    if not isinstance(found.metadata, Mapping):
        raise ValueError(f"{checkpointer.directory.parent}: step {step or max(steps)} has lost its list of arrays")
    return found


@contextlib.contextmanager
def _told(run_folder: Any, step: int | None) -> Generator[None]:
    """Turns what orbax raises, which depends on where a checkpoint is damaged, into a ValueError that names it."""
    try:
        yield
    except Exception as error:
        name = "the newest checkpoint" if step is None else f"the checkpoint of step {step}"
        text = f"{run_folder}: {name} cannot be read ({type(error).__name__}: {str(error)[:300]})"
        raise ValueError(f"{text}; `python -m moex.checkpoint verify` looks at each") from error


def _named(state: TrainState) -> Any:
    return state._asdict()
