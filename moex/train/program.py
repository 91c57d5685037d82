"""A configuration made ready to run: fold, mesh, decoder, optimizer, and the jitted programs over them."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from mesh import Fold, build_mesh
from moex.config import RunConfig
from moex.models.decoder import Decoder
from moex.train import pipelined
from moex.train.measure import make_measure_step
from moex.train.optim import optimizer
from moex.train.placing import place_batch
from moex.train.reading import make_eval_step, make_record_step
from moex.train.state import TrainState, abstract_state, initial_state
from moex.train.step import Batch, abstract_batch, batch_specs, make_train_step
from moex.train.xla import compiler_options


class Program(NamedTuple):
    """What a run is made of. train: (state, batch) -> (state, metrics), state donated. eval: see `make_eval_step`.
    record: see `make_record_step`.  measure: see `make_measure_step`.
    """

    config: RunConfig
    fold: Fold
    mesh: Mesh
    decoder: Decoder
    tx: optax.GradientTransformation
    state: TrainState
    batch: Batch
    train: Any
    eval: Any
    record: Any
    measure: Any

    def place(self, read: Callable[[slice], Mapping[str, np.ndarray]], step: int) -> Batch:
        """A step's training batch on the devices, dealt as the configuration says.  read: see `place_batch`."""
        parallel = self.config.parallel
        return place_batch(read, step, self.batch, parallel.deal, parallel.groups_of(self.batch.ids.shape[0]))

    def initial_state(self, weights: Mapping[str, Any] | None = None) -> TrainState:
        return initial_state(self.config, self.decoder, self.state, weights)


def build(
    config: RunConfig, fold: Fold, devices: Sequence[jax.Device] | None = None, *, mesh=None, replay: bool = False
) -> Program:
    """Joins the parts; nothing is compiled yet. `state` and `batch` are abstract (shapes, dtypes, shardings).

    mesh: an abstract mesh of the fold, to trace at a scale that isn't there; else one is built of `devices` (all).
    replay: the training step takes recorded choices of experts with its batches.
    """
    mesh = mesh if mesh is not None else build_mesh(fold, jax.devices() if devices is None else devices)
    decoder = Decoder(config.model, config.parallel, config.memory, config.precision)
    tx = optimizer(config.optimizer, decoder.declarations)
    state = abstract_state(config, decoder, tx, fold, mesh)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    gradients = pipelined.loss_and_gradients if config.parallel.pp > 1 or config.parallel.overlap else None
    step = make_train_step(config, decoder, tx, fold, mesh, replay=replay, gradients=gradients)
    platform = mesh.devices.flat[0].platform if isinstance(mesh, Mesh) else ""
    jit = functools.partial(jax.jit, compiler_options=compiler_options(config, platform))
    train = jit(step, donate_argnums=0, out_shardings=(shardings, None))
    choices = NamedSharding(mesh, batch_specs(fold, replay=True).experts)
    record = jit(make_record_step(config, decoder, fold, mesh), out_shardings=choices)
    return Program(
        config, fold, mesh, decoder, tx, state, abstract_batch(config, fold, mesh, replay=replay), train,
        jit(make_eval_step(config, decoder, fold, mesh)), record, jit(make_measure_step(config, decoder, fold, mesh)),
    )  # fmt: skip
