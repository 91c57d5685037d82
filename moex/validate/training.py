"""What of a run's length, optimizer, data and output contradicts itself."""

from moex.config import RunConfig
from moex.validate.numbers import negative, not_above_zero


def training_problems(config: RunConfig) -> list[str]:
    train, opt, problems = config.train, config.optimizer, []
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
    if not 0 <= opt.warmup_steps < train.steps:
        problems.append(
            f"optimizer.warmup_steps={opt.warmup_steps} must lie between 0 and train.steps={train.steps} (not included)"
        )
    if not 0 <= train.seed < 2**32:
        problems.append(f"train.seed={train.seed} must lie between 0 and {2**32 - 1}")
    problems += not_above_zero("optimizer", peak_lr=opt.peak_lr, eps=opt.eps)
    problems += negative("optimizer", final_lr=opt.final_lr, weight_decay=opt.weight_decay, clip_norm=opt.clip_norm)
    for name in ("beta1", "beta2"):
        if not 0 <= (beta := getattr(opt, name)) < 1:
            problems.append(f"optimizer.{name}={beta} must be at least 0 and below 1")
    if opt.name == "sgd" and opt.weight_decay:
        problems.append(f"optimizer.weight_decay={opt.weight_decay} has no effect with sgd; set it to 0")
    if config.checkpoint.every_steps < 1 or config.checkpoint.keep < 1:
        problems.append("checkpoint.every_steps and checkpoint.keep must be at least 1")
    if config.data.corpus == "stdlib" and config.model.vocab_size < 256:
        problems.append(f"model.vocab_size={config.model.vocab_size} must be at least 256: the stdlib corpus is bytes")
    if min(config.observe.eval_every, config.observe.eval_rows, config.observe.sample_tokens) < 0:
        problems.append("observe.eval_every, eval_rows and sample_tokens must not be negative")
    if config.observe.record_routing_every < 0:
        problems.append(f"observe.record_routing_every={config.observe.record_routing_every} must not be negative")
    if config.observe.record_routing_every and not config.model.num_moe_layers:
        problems.append("observe.record_routing_every has no effect without MoE layers")
    if config.observe.sample_tokens and not config.observe.sample_prompt:
        problems.append(
            "observe.sample_prompt is empty: give generation a text to start from, or set sample_tokens to 0"
        )
    if config.observe.log_every < 1:
        problems.append(f"observe.log_every={config.observe.log_every} must be at least 1")
    return problems
