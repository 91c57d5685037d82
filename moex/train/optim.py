"""Optimizer and learning rate, by optax. Code of the global view: it sees whole arrays, never one device's shards."""

from collections.abc import Mapping

import jax.numpy as jnp
import optax

from moex.config import OptimizerConfig
from moex.layers import param


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Rate as a function of the step alone: linear warm-up from 0, then cosine to the final rate at `steps`, or constant."""
    if config.schedule == "constant" and not config.warmup_steps:
        return optax.schedules.constant_schedule(config.peak_lr)  # optax's warm-up of 0 steps stays at 0 for ever
    if config.schedule == "constant":
        constant = optax.schedules.constant_schedule(config.peak_lr)
        warmup = optax.schedules.linear_schedule(0.0, config.peak_lr, config.warmup_steps)
        return optax.schedules.join_schedules([warmup, constant], [config.warmup_steps])
    return optax.schedules.warmup_cosine_decay_schedule(
        0.0, config.peak_lr, config.warmup_steps, steps, config.final_lr
    )


def optimizer(config: OptimizerConfig, declarations: Mapping) -> optax.GradientTransformation:
    """Gradients -> direction of the update, for a learning rate of 1: clipping, then AdamW with decay of matrices, or SGD."""
    parts = [optax.clip_by_global_norm(config.clip_norm)] if config.clip_norm else []
    if config.name == "adamw":
        parts.append(optax.scale_by_adam(config.beta1, config.beta2, config.eps, mu_dtype=jnp.float32))
        decays = param.tree_map(lambda d: d.decays, declarations)
        parts.append(optax.add_decayed_weights(config.weight_decay, mask=decays))
    return optax.chain(*parts, optax.scale(-1.0))
