"""Numbers that follow from the configuration, and the table of them that a run prints before its first step."""

from collections.abc import Mapping
from typing import Any

import jax

from mesh.topology import peak_flops
from moex.config import RunConfig
from moex.layers import param
from moex.models.flops import num_parameters, train_flops_per_token
from moex.startup.inputs import Data
from moex.startup.rules import (
    balance_rules,
    memory_rules,
    pipeline_rules,
    precision_rules,
    routing_rules,
    transport_rules,
    xla_rules,
)
from moex.train.optim import cooldown_steps, rates
from moex.train.pipelined import layout_of, schedule_of
from moex.train.program import Program


def derive(program: Program, data: Data) -> dict[str, Any]:
    """Numbers that follow from the configuration, for plan.json and the start event."""
    config, model = program.config, program.config.model
    total, active = num_parameters(program.decoder.declarations, model)
    device = program.mesh.devices.flat[0]
    opt, declarations = config.optimizer, program.decoder.declarations
    factors, decays = rates(opt, declarations), []
    trained: dict[str, float] = {}

    def sort(name: str, d: param.Declaration, rate: float) -> None:
        trained[name] = rate
        if opt.name != "sgd" and d.decays and rate:
            decays.append(name)

    param.named_map(sort, declarations, factors)
    splits = {name: [getattr(corpus, name) for corpus in data.corpora] for name in ("train", "held_out")}
    total_of = lambda split, field: sum(getattr(one, field) for one in splits[split])
    epochs = data.train.epochs(config.train.steps)
    return dict(
        parameters=total,
        active_parameters=active,
        flops_per_token=train_flops_per_token(model, config.train.seq_len),
        tokens_per_step=config.train.batch_size * config.train.seq_len,
        total_steps=config.train.steps,
        epochs=max(epochs),
        num_devices=program.fold.num_devices,
        device_kind=device.device_kind,
        peak_flops=peak_flops(device.device_kind),
        mesh=program.fold.describe(),
        pipeline=_pipeline(config, program),
        xla=xla_rules(config, program.mesh.devices.flat[0].platform),
        state_bytes_per_device=sum(
            x.dtype.itemsize * _size(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(program.state)
        ),
        weight_decay=decays,
        frozen=[name for name, rate in trained.items() if not rate],
        scaled_rates={name: rate for name, rate in trained.items() if rate not in (0, 1)},
        corpus=data.name,
        corpus_fingerprint=data.fingerprint,
        corpora=[
            dict(name=corpus.name, weight=weight, epochs=times, rows=source.num_rows)
            for corpus, weight, times, source in zip(
                data.corpora, data.train.weights, epochs, data.train.sources, strict=True
            )
        ],
        train_tokens=total_of("train", "num_tokens"),
        held_out_tokens=total_of("held_out", "num_tokens"),
        train_documents=total_of("train", "num_documents"),
        held_out_documents=total_of("held_out", "num_documents"),
        bytes_per_token=data.bytes_per_token,
        unigram_entropy=data.unigram_entropy,
    )


def table(config: RunConfig, derived: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, text) lines for a person: what will be trained, on what, how long, with which rules."""
    d, model, router, opt = derived, config.model, config.model.router, config.optimizer
    layers = f"{model.num_layers} layers ({model.num_mlp_layers} dense), width {model.d_model}"
    lines = [
        ("model", f"{layers}; {d['parameters'] / 1e6:,.2f}M parameters, {d['active_parameters'] / 1e6:,.2f}M a token"),
        ("router", routing_rules(router)),
        ("balance", balance_rules(router)),
        ("compute", f"{precision_rules(config.precision)}; {memory_rules(config.memory)}"),
        ("mesh", f"{d['mesh']}; ZeRO-{config.parallel.zero}"),
        *([("pipeline", d["pipeline"])] if d["pipeline"] else []),
        *(("XLA" if not i else "", text) for i, text in enumerate(d["xla"])),
        ("transport", transport_rules(config.parallel)),
        ("state", f"{d['state_bytes_per_device'] / 2**20:,.1f} MiB a device ({_kept(config)})"),
        ("step", _step(config, d)),
        (
            "run",
            f"{config.train.steps} steps, {d['epochs']:.2f} epochs of {d['train_tokens']:,} tokens ({d['corpus']})",
        ),
    ]
    if len(d["corpora"]) > 1:
        say = lambda c: f"{c['name']}: {c['weight']:.1%} of rows, {c['epochs']:.2f} epochs"
        lines.append(("mixture", "; ".join(map(say, d["corpora"]))))
    rule = f"{opt.name}, lr {_rate(config)}, clip {opt.clip_norm:g}"
    lines.append(("optimizer", rule + (f", decay {opt.weight_decay:g} on" if d["weight_decay"] else "")))
    lines += [("", ", ".join(d["weight_decay"]))] if d["weight_decay"] else []
    if d["scaled_rates"]:
        lines.append(("rates", ", ".join(f"{name} x {rate:g}" for name, rate in d["scaled_rates"].items())))
    lines += [("frozen", ", ".join(d["frozen"]))] if d["frozen"] else []
    entropy = f"{d['unigram_entropy']:.4f} nats a token: the loss of knowing only how frequent each token is"
    return [*lines, ("unigram entropy", entropy)]


def _pipeline(config: RunConfig, program: Program) -> str:
    if config.parallel.pp == 1:
        return ""
    placed = layout_of(config, program.decoder)
    return pipeline_rules(placed, schedule_of(config, placed))


def _kept(config: RunConfig) -> str:
    opt = config.optimizer
    there = " on the host" if config.memory.optimizer == "host" else ""
    moments = f", {opt.moments} moments{there}" if opt.name != "sgd" or opt.sgd_momentum else ""
    return f"float32 parameters{moments}" + (f", average of decay {opt.ema_decay:g}" if opt.ema_decay else "")


def _step(config: RunConfig, d: Mapping[str, Any]) -> str:
    train = config.train
    text = f"{d['tokens_per_step']:,} tokens, {d['flops_per_token'] * d['tokens_per_step'] / 1e9:,.1f} GFLOP (model)"
    ramp = zip(train.ramp_sizes, train.ramp_samples, strict=True)
    rising = ", ".join(f"{rows} rows until {until:,} samples" for rows, until in ramp)
    return f"{text}; {rising}, then {train.batch_size}" if rising else text


def _rate(config: RunConfig) -> str:
    opt, steps = config.optimizer, config.optimizer.schedule_steps or config.train.steps
    if opt.schedule == "constant":
        return f"{opt.peak_lr:g} after {opt.warmup_steps} steps"
    over = f"the last {cooldown_steps(opt, steps)} of {steps} steps" if opt.schedule == "wsd" else f"{steps} steps"
    return f"{opt.peak_lr:g} -> {opt.final_lr:g} ({opt.schedule} over {over})"


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size
