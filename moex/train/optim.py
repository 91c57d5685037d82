"""Optimizer and learning rate, by optax. Code of the global view: it sees whole arrays, never one device's shards."""

import fnmatch
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import optax

from moex.config import OptimizerConfig
from moex.layers import param
from moex.train.muon import with_muon


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Rate as a function of the step alone: linear warm-up from 0, then the schedule to the final rate, where it stays.

    steps: at which the final rate is reached unless config says.
    """
    steps, peak, warmup = config.schedule_steps or steps, config.peak_lr, config.warmup_steps
    if config.schedule == "cosine":
        return optax.schedules.warmup_cosine_decay_schedule(0.0, peak, warmup, steps, config.final_lr)
    parts, borders = [optax.schedules.constant_schedule(peak)], []
    if warmup:  # optax's warm-up of 0 steps stays at 0 for ever
        parts, borders = [optax.schedules.linear_schedule(0.0, peak, warmup), *parts], [warmup]
    if config.schedule == "wsd":
        cooldown = cooldown_steps(config, steps)
        parts.append(optax.schedules.linear_schedule(peak, config.final_lr, cooldown))
        borders.append(steps - cooldown)
    return optax.schedules.join_schedules(parts, borders)


def cooldown_steps(config: OptimizerConfig, steps: int) -> int:
    """Steps of the decline of a schedule that ends at `steps`."""
    return config.cooldown_steps or max(1, steps // 10)


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a parameter's dotted name matches one of the patterns."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def parse_scale(text: str) -> tuple[str, float]:
    """PATTERN=FACTOR as both.  Raises ValueError."""
    pattern, equals, factor = text.rpartition("=")
    try:
        scale = float(factor)
    except ValueError:
        scale = -1.0
    if not equals or not pattern or not 0 < scale < float("inf"):
        raise ValueError(f"{text!r} must be PATTERN=FACTOR with a factor above 0, such as *.experts.*=0.5")
    return pattern, scale


def rates(config: OptimizerConfig, declarations: Mapping) -> dict:
    """Factor of each parameter's learning rate, as a tree: 0 where it is frozen, and the first scale that matches.

    Raises ValueError for a pattern that no parameter's name matches, which would have no effect.
    """
    scales = [parse_scale(text) for text in config.lr_scales]
    names: list[str] = []
    param.named_map(lambda name, _: names.append(name), declarations)
    for pattern in (*config.freeze, *(pattern for pattern, _ in scales)):
        if not any(matches(name, [pattern]) for name in names):
            raise ValueError(f"no parameter matches {pattern!r}; there are {', '.join(names)}")

    def rate(name: str, _) -> float:
        if matches(name, config.freeze):
            return 0.0
        return next((scale for pattern, scale in scales if matches(name, [pattern])), 1.0)

    return param.named_map(rate, declarations)


def without_frozen(config: OptimizerConfig, declarations: Mapping, gradients: Mapping) -> Mapping:
    """Gradients, 0 where a parameter is frozen, so that it counts in no norm."""
    if not config.freeze:
        return gradients
    return jax.tree.map(lambda rate, g: g if rate else jnp.zeros_like(g), rates(config, declarations), gradients)


def optimizer(config: OptimizerConfig, declarations: Mapping) -> optax.GradientTransformation:
    """Gradients -> direction of an update, for a learning rate of 1: clipping, then SGD, or AdamW or Muon with decay.

    Frozen parameters have no moments, and a direction of 0. Raises ValueError for a pattern without effect.
    """
    parts = [optax.clip_by_global_norm(config.clip_norm)] if config.clip_norm else []
    factors = rates(config, declarations)
    rule = _rule(config, declarations, factors)
    if rule is not None:
        kept = rule if config.moments == "float32" else kept_in(jnp.dtype(config.moments), rule)
        masked = config.freeze and config.name != "muon"  # which leaves the frozen out by itself
        parts.append(optax.masked(kept, jax.tree.map(bool, factors)) if masked else kept)
    if config.name != "sgd":
        decays = param.tree_map(lambda d, rate: d.decays and rate > 0, declarations, factors)
        parts.append(optax.add_decayed_weights(config.weight_decay, mask=decays))
    if any(rate != 1 for rate in jax.tree.leaves(factors)):
        parts.append(optax.stateless(lambda updates, _: jax.tree.map(jnp.multiply, updates, factors)))
    return optax.chain(*parts, optax.scale(-1.0))


def _rule(config: OptimizerConfig, declarations: Mapping, factors: Mapping) -> optax.GradientTransformation | None:
    """What turns gradients into directions by what it remembers; None for SGD without momentum, which remembers nothing."""
    if config.name == "sgd":
        momentum = config.sgd_momentum
        return optax.trace(momentum, accumulator_dtype=jnp.float32) if momentum else None
    adam = optax.scale_by_adam(config.beta1, config.beta2, config.eps, mu_dtype=jnp.float32)
    return with_muon(config, declarations, adam, factors) if config.name == "muon" else adam


def kept_in(dtype, tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same transformation with its state's float arrays kept in `dtype` between updates, rounded to nearest."""
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    cast = lambda tree, to: jax.tree.map(lambda x: x.astype(to) if is_float(x) else x, tree)

    def update(updates, state, params=None):
        updates, state = tx.update(updates, cast(state, jnp.float32), params)
        return updates, cast(state, dtype)

    return optax.GradientTransformation(lambda params: cast(tx.init(params), dtype), update)
