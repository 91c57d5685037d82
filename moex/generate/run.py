"""A run's model and a checkpoint's weights on some of this machine's devices, for generation and evaluation."""

import dataclasses
from pathlib import Path

import jax

from moex import cli
from moex.checkpoint import open_step
from moex.config import ParallelConfig
from moex.train.program import Program, build
from moex.train.rungs import ladder
from moex.train.state import TrainState
from moex.validate import ConfigError, check_on, resolve_fold


def program_of(run: Path, num_devices: int = 1, parallel: ParallelConfig = ParallelConfig()) -> Program:  # noqa: B008
    """A run's model on some of this machine's devices.  Raises ConfigError when it isn't a run folder or doesn't fit."""
    if not (run / "config.json").is_file():
        raise ConfigError(f"{run} is no run folder: it has no config.json")
    if not 1 <= num_devices <= jax.local_device_count():
        raise ConfigError(f"devices={num_devices}: this machine has {jax.local_device_count()}")
    config = dataclasses.replace(cli.load(run / "config.json"), parallel=parallel)
    fold = resolve_fold(parallel, num_devices)
    check_on(config, fold, jax.default_backend(), jax.devices()[0].device_kind)
    return build(ladder(config)[-1], fold, jax.local_devices()[:num_devices])  # its buffers cannot overflow


def restored(program: Program, run: Path, step: int | None = None, *, weights: str = "params") -> TrainState:
    """What generation needs of a checkpoint: parameters and router biases; the rest of the state stays abstract.

    weights: `ema` for the average.  Raises ValueError when none was kept.
    """
    saved = open_step(run, step)
    if not saved[weights]:
        raise ValueError(f"{run} kept no average of its parameters (optimizer.ema_decay=0)")
    place = lambda values, like: jax.tree.map(lambda x, to: jax.device_put(x, to.sharding), values, like)
    return program.state._replace(
        params=place(saved[weights], program.state.params),
        router_bias=place(saved["router_bias"], program.state.router_bias),
    )
