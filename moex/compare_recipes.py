"""Recipes of low precision against BF16, on a model that has been trained: what training would lose by them.

Each recipe starts from the same checkpoint and takes the same batches (a paired warm start: runs from scratch differ more by
chance than by any sound recipe). Beside the gap in the loss: gradients at the checkpoint against float32's, and the share of
choices of experts that change. A second BF16 run whose weights were jittered says how large a gap chance alone makes.
"""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from moex import startup
from moex.checkpoint import Checkpoints
from moex.cli import load
from moex.config import OptimizerConfig, PrecisionConfig, RunConfig
from moex.precision.recipes import KINDS
from moex.train.optim import learning_rate
from moex.train.program import Program, build
from moex.train.rungs import ladder
from moex.train.state import TrainState
from moex.validate import ConfigError, check, check_on, resolve_fold

NULL, BASE, JITTER = "null", "compute", 0.003
"""The jittered run, what all are compared with, and by how much of itself each weight is moved."""
SGD = OptimizerConfig(
    name="sgd", peak_lr=1024.0, warmup_steps=0, schedule="constant", final_lr=0.0, weight_decay=0.0, clip_norm=0.0
)
"""One step of it changes the parameters by the gradient, times a power of two that drowns the rounding of the sum."""


class Compared(NamedTuple):
    """Of one recipe.  losses: language-model loss of every step, float64.  errors, cosines: of each parameter's gradient,
    against float32's.  changed: share of (token, choice) pairs with another expert than in float32, 0 without experts.
    """

    losses: np.ndarray
    errors: dict[str, float]
    cosines: dict[str, float]
    changed: float

    def gap(self, base: "Compared") -> float:
        """Mean difference in the loss from `base`, nats."""
        return float((self.losses - base.losses).mean())


class Start(NamedTuple):
    """What all recipes begin with: configuration, values of the state, steps done, batches."""

    config: RunConfig
    state: TrainState
    step: int
    data: startup.Data


def open_run(run: Path, lr: float | None, steps: int) -> Start:
    """The run's newest checkpoint, to be trained on at a constant rate (None: that of the checkpoint's step).

    Raises ConfigError when there is no run, no checkpoint, or settings that a comparison cannot have.
    """
    config = load(run / "config.json")
    data = startup.load_data(config)
    fold = resolve_fold(config.parallel, jax.device_count())
    program = build(_widest(config), fold)
    with Checkpoints(run, config.checkpoint) as checkpoints:
        if checkpoints.latest is None:
            raise ConfigError(f"{run} has no checkpoint to start from")
        step = checkpoints.latest
        state = jax.device_get(checkpoints.restore(program.state))
    rate = float(np.asarray(learning_rate(config.optimizer, config.train.steps)(step))) if lr is None else lr
    if rate <= 0:
        raise ConfigError(f"the learning rate at step {step} is {rate:g}: give one with --lr")
    optimizer = dataclasses.replace(config.optimizer, schedule="constant", peak_lr=rate, warmup_steps=0)
    config = dataclasses.replace(
        _widest(config), optimizer=optimizer, train=dataclasses.replace(config.train, steps=step + steps)
    )
    return Start(config, state, step, data)


def _widest(config: RunConfig) -> RunConfig:
    """With buffers that cannot overflow: a comparison runs no step twice."""
    return list(ladder(config))[-1]


def precision_of(config: RunConfig, recipe: str) -> PrecisionConfig:
    """The run's precision with one recipe for every product."""
    kinds = dict.fromkeys(KINDS, "recipe")
    wire = config.precision.wire if recipe != BASE else "compute"
    gather = config.precision.gather if recipe not in (BASE, "mxfp8") else "compute"
    high = {} if recipe != BASE else dict(high_first=0, high_last=0)
    precision: Any = dict(recipe=recipe, wire=wire, gather=gather, emulate=recipe != BASE, **kinds, **high)
    return dataclasses.replace(config.precision, compute_dtype="bfloat16", **precision)


def configured(config: RunConfig, recipe: str) -> RunConfig:
    """The run with one recipe for every product."""
    observe = dataclasses.replace(config.observe, measure_precision_every=0)
    return dataclasses.replace(config, precision=precision_of(config, recipe), observe=observe)


def compare(start: Start, recipes: Sequence[str], steps: int) -> dict[str, Compared]:
    """Every recipe, BF16 as "compute" and its jittered twin as "null"; in this order, which begins with the latter two.

    Raises ConfigError, before anything is compiled, for a recipe that this model, mesh or device cannot have.
    """
    names = [BASE, NULL, *[name for name in recipes if name not in (BASE, NULL)]]
    configs = {name: configured(start.config, BASE if name == NULL else name) for name in names}
    fold = resolve_fold(start.config.parallel, jax.device_count())
    for config in configs.values():
        check(config)
        check_on(config, fold, jax.default_backend(), jax.devices()[0].device_kind)
    full = dataclasses.replace(
        start.config, precision=dataclasses.replace(precision_of(start.config, BASE), compute_dtype="float32")
    )
    exact, exact_choices = _gradients(start, full), _choices(start, full)
    found = {}
    for name, config in configs.items():
        began = start if name != NULL else start._replace(state=_jittered(start.state))
        losses = losses_of(began, config, steps)
        if name == NULL:
            found[name] = found[BASE]._replace(losses=losses)
            continue
        gradients, choices = _gradients(start, config), _choices(start, config)
        errors = {k: float(np.linalg.norm(g - exact[k]) / np.linalg.norm(exact[k])) for k, g in gradients.items()}
        cosine = lambda a, b: float((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b))
        cosines = {k: cosine(g, exact[k]) for k, g in gradients.items()}
        found[name] = Compared(losses, errors, cosines, _changed(choices, exact_choices, config))
    return found


def _jittered(state: TrainState) -> TrainState:
    draw = np.random.default_rng(0).standard_normal
    move = lambda w: (w * (1 + JITTER * draw(w.shape))).astype(w.dtype)
    return state._replace(params=jax.tree.map(move, state.params))


def _put(values, like):
    return jax.tree.map(lambda value, leaf: jax.device_put(value, leaf.sharding), values, like)


def _batch(start: Start, program: Program, step: int):
    return program.place(lambda rows: start.data.train.batch(step, rows), step)


@functools.lru_cache(maxsize=4)
def _program(config: RunConfig) -> Program:
    """Built, and so compiled, once for all that ask for it one after another."""
    return build(config, resolve_fold(config.parallel, jax.device_count()))


def losses_of(start: Start, config: RunConfig, steps: int) -> np.ndarray:
    """Language-model loss of every step from the start on."""
    program = _program(config)
    state, losses = _put(start.state, program.state), []
    for step in range(start.step, start.step + steps):
        state, metrics = program.train(state, _batch(start, program, step))
        losses.append(metrics["lm_loss"])
    return np.array(jax.device_get(losses), np.float64)


def _gradients(start: Start, config: RunConfig) -> dict[str, np.ndarray]:
    """Of the first batch, by parameter, float64; those that are zero are left out."""
    program = _program(dataclasses.replace(config, optimizer=SGD))
    params = _put(start.state.params, program.state.params)
    empty = jax.jit(program.tx.init, out_shardings=jax.tree.map(lambda x: x.sharding, program.state.optimizer))(params)
    state = _put(start.state._replace(params=None, optimizer=None), program.state._replace(params=None, optimizer=None))
    after, _ = program.train(state._replace(params=params, optimizer=empty), _batch(start, program, start.step))
    moved = jax.tree_util.tree_leaves_with_path(jax.device_get(after.params))
    found = {}
    for (path, now), before in zip(moved, jax.tree.leaves(start.state.params), strict=True):
        change = np.asarray(now, np.float64) - before
        if change.any():
            found[jax.tree_util.keystr(path, simple=True, separator=".")] = change
    return found


def _choices(start: Start, config: RunConfig) -> np.ndarray | None:
    if not config.model.num_moe_layers:
        return None
    program = _program(config)
    state = _put(start.state, program.state)
    return jax.device_get(program.record(state.params, state.router_bias, _batch(start, program, start.step)))


def _changed(ours: np.ndarray | None, theirs: np.ndarray | None, config: RunConfig) -> float:
    if ours is None or theirs is None:
        return 0.0
    real = theirs < config.model.router.num_experts
    kept = (ours[..., :, None] == theirs[..., None, :]).any(axis=-2)
    return float(1 - kept[real].mean())
