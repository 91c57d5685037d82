"""What of a run's length, optimizer, data and output contradicts itself."""

import importlib.util

import jax

from moex.config import OptimizerConfig, RunConfig
from moex.data import STDLIB, ramp_of
from moex.models.decoder import Decoder
from moex.observe.profile import parse_range
from moex.observe.trackers import PACKAGES
from moex.precision.recipes import KINDS, resolve
from moex.train.optim import cooldown_steps, parse_scale, rates
from moex.train.qk_clip import NAMES
from moex.validate.numbers import negative, not_above_zero


def training_problems(config: RunConfig) -> list[str]:
    train, problems = config.train, []
    numbers = dict(
        steps=train.steps, batch_size=train.batch_size, accumulation=train.accumulation,
        loss_chunk_tokens=train.loss_chunk_tokens,
    )  # fmt: skip
    problems += [f"train.{name}={value} must be at least 1" for name, value in numbers.items() if value < 1]
    if train.run_ahead < 1:
        problems.append(f"train.run_ahead={train.run_ahead} must be at least 1")
    if train.seq_len < 2:
        problems.append(f"train.seq_len={train.seq_len} must be at least 2")
    if train.accumulation >= 1 and train.batch_size % train.accumulation:
        problems.append(
            f"train.batch_size={train.batch_size} rows don't divide into train.accumulation={train.accumulation} equal "
            "micro-batches"
        )
    problems += schedule_problems(config) + optimizer_problems(config) + ramp_problems(config) + data_problems(config)
    if not 0 <= train.seed < 2**32:
        problems.append(f"train.seed={train.seed} must lie between 0 and {2**32 - 1}")
    if config.checkpoint.every_steps < 1 or config.checkpoint.keep < 1:
        problems.append("checkpoint.every_steps and checkpoint.keep must be at least 1")
    if min(config.observe.eval_every, config.observe.eval_rows, config.observe.sample_tokens) < 0:
        problems.append("observe.eval_every, eval_rows and sample_tokens must not be negative")
    if config.observe.record_routing_every < 0:
        problems.append(f"observe.record_routing_every={config.observe.record_routing_every} must not be negative")
    if config.observe.record_routing_every and not config.model.num_moe_layers:
        problems.append("observe.record_routing_every has no effect without MoE layers")
    if config.observe.measure_precision_every < 0:
        problems.append(
            f"observe.measure_precision_every={config.observe.measure_precision_every} must not be negative"
        )
    if config.observe.measure_precision_every and not any(resolve(config.precision).recipe(kind) for kind in KINDS):
        problems.append("observe.measure_precision_every has no effect without a recipe: set precision.recipe")
    if config.observe.sample_tokens and not config.observe.sample_prompt:
        problems.append(
            "observe.sample_prompt is empty: give generation a text to start from, or set sample_tokens to 0"
        )
    if missing := [name for name in config.observe.trackers if importlib.util.find_spec(PACKAGES[name]) is None]:
        problems.append(f"observe.trackers: {missing} are not installed; install moex-jax[track] or leave them out")
    if config.observe.profile:
        try:
            first, _ = parse_range(config.observe.profile)
            if first >= train.steps:
                problems.append(f"observe.profile={config.observe.profile} begins after train.steps={train.steps}")
        except ValueError as error:
            problems.append(f"observe.profile: {error}")
    if config.observe.log_every < 1:
        problems.append(f"observe.log_every={config.observe.log_every} must be at least 1")
    return problems


def schedule_problems(config: RunConfig) -> list[str]:
    """Of the learning rate by step."""
    train, opt, problems = config.train, config.optimizer, []
    steps = opt.schedule_steps or train.steps
    name = f"optimizer.schedule_steps={steps}" if opt.schedule_steps else f"train.steps={steps}"
    if not 0 <= opt.warmup_steps < steps:
        problems.append(f"optimizer.warmup_steps={opt.warmup_steps} must lie between 0 and {name} (not included)")
    if opt.schedule_steps and opt.schedule == "constant":
        problems.append(f"optimizer.schedule_steps={steps} has no effect with schedule=constant; set it to 0")
    if opt.schedule_steps < 0 or opt.cooldown_steps < 0:
        problems.append("optimizer.schedule_steps and cooldown_steps must not be negative")
    if opt.schedule == "wsd" and opt.warmup_steps + (cooldown := cooldown_steps(opt, steps)) > steps:
        problems.append(
            f"optimizer.warmup_steps={opt.warmup_steps} and the cooldown of {cooldown} steps don't fit into {name}"
        )
    if opt.cooldown_steps and opt.schedule != "wsd":
        problems.append(f"optimizer.cooldown_steps={opt.cooldown_steps} has no effect with schedule={opt.schedule}")
    return problems


def optimizer_problems(config: RunConfig) -> list[str]:
    """Of the optimizer's own numbers."""
    opt = config.optimizer
    problems = not_above_zero("optimizer", peak_lr=opt.peak_lr, eps=opt.eps)
    problems += negative("optimizer", final_lr=opt.final_lr, weight_decay=opt.weight_decay, clip_norm=opt.clip_norm)
    problems += not_above_zero("optimizer", muon_rms=opt.muon_rms)
    for name, own in {"muon": ("muon_momentum", "muon_rms"), "sgd": ("sgd_momentum",)}.items():
        odd = [n for n in own if opt.name != name and getattr(opt, n) != getattr(OptimizerConfig, n)]
        problems += [f"optimizer.{', '.join(odd)} has no effect with name={opt.name}"] if odd else []
    problems += _qk_clip_problems(config)
    for name in ("beta1", "beta2", "ema_decay", "muon_momentum", "sgd_momentum"):
        if not 0 <= (beta := getattr(opt, name)) < 1:
            problems.append(f"optimizer.{name}={beta} must be at least 0 and below 1")
    if opt.name == "sgd" and opt.weight_decay:
        problems.append(f"optimizer.weight_decay={opt.weight_decay} has no effect with sgd; set it to 0")
    if opt.name == "sgd" and opt.moments != "float32" and not opt.sgd_momentum:
        problems.append(f"optimizer.moments={opt.moments} has no effect with sgd without momentum, which has none")
    if opt.moments == "bfloat16" and opt.name != "sgd" and opt.beta2 > 0.995:
        problems.append(
            f"optimizer.moments=bfloat16 keeps 8 bits of a number: a step of 1 - beta2={opt.beta2} of it would be rounded "
            "away; take beta2 of at most 0.995, or moments=float32"
        )
    for text in opt.lr_scales:
        try:
            parse_scale(text)
        except ValueError as error:
            problems.append(f"optimizer.lr_scales: {error}")
    return problems


def _qk_clip_problems(config: RunConfig) -> list[str]:
    opt, a = config.optimizer, config.model.attention
    problems = negative("optimizer", qk_clip=opt.qk_clip)
    if not 0 <= opt.qk_clip_alpha <= 1:
        problems.append(f"optimizer.qk_clip_alpha={opt.qk_clip_alpha} must lie between 0 and 1")
    if opt.qk_clip_alpha != OptimizerConfig.qk_clip_alpha and not opt.qk_clip:
        problems.append(f"optimizer.qk_clip_alpha={opt.qk_clip_alpha} has no effect with qk_clip=0")
    if opt.qk_clip and (a.qk_norm or a.soft_cap):
        problems.append(
            f"optimizer.qk_clip={opt.qk_clip}: qk_norm={a.qk_norm} and soft_cap={a.soft_cap} bound attention logits already, "
            "whatever the size of query and key weights: set qk_clip to 0"
        )
    return problems


def pattern_problems(config: RunConfig) -> list[str]:
    """Of patterns that name parameters; the model must be without problems of its own."""
    if not (config.optimizer.freeze or config.optimizer.lr_scales):
        return []
    try:
        factors = rates(config.optimizer, Decoder(config.model).declarations)
    except ValueError as error:
        return [f"optimizer.freeze, lr_scales: {error}"]
    clipped = {f"attention.{name}" for name in NAMES[config.model.attention.kind]} if config.optimizer.qk_clip else {}
    frozen = [
        name
        for path, rate in jax.tree.leaves_with_path(factors)
        if not rate and (name := jax.tree_util.keystr(path, simple=True, separator=".")).split(".", 1)[-1] in clipped
    ]
    return (
        [f"optimizer.qk_clip scales {', '.join(frozen)}, which optimizer.freeze holds: leave one out"] if frozen else []
    )


def ramp_problems(config: RunConfig) -> list[str]:
    """Of batch sizes that rise."""
    train = config.train
    if not (train.ramp_sizes or train.ramp_samples):
        return []
    try:
        ramp_of(train)
    except ValueError as error:
        return [f"train.ramp_sizes, ramp_samples, batch_size: {error}"]
    micro = train.batch_size // max(train.accumulation, 1)
    if odd := [size for size in train.ramp_sizes if size % max(micro, 1)]:
        text = (
            f"train.ramp_sizes: {odd} are no whole micro-batches of batch_size / accumulation = {micro} rows; raise "
            "train.accumulation or choose multiples"
        )
        return [text]
    return []


def data_problems(config: RunConfig) -> list[str]:
    """Of corpora, as far as they needn't be opened."""
    data, problems = config.data, []
    if not data.corpus or len(set(data.corpus)) < len(data.corpus):
        problems.append(f"data.corpus={list(data.corpus)} must name at least one corpus, and none twice")
    if data.weights and len(data.weights) != len(data.corpus):
        problems.append(f"data.weights has {len(data.weights)} numbers for {len(data.corpus)} corpora; give one each")
    if data.weights and len(data.corpus) == 1:
        problems.append("data.weights has no effect with one corpus; leave it out")
    problems += not_above_zero("data.weights", **{str(i): w for i, w in enumerate(data.weights)})
    problems += negative("data", max_epochs=data.max_epochs)
    if STDLIB in data.corpus and config.model.vocab_size < 256:
        problems.append(f"model.vocab_size={config.model.vocab_size} must be at least 256: the stdlib corpus is bytes")
    return problems
