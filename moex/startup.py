"""What a run says of itself before its first step: derived numbers, environment, and whether it may continue a folder."""

import json
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax

from mesh.topology import peak_flops
from moex.cli import dump, load
from moex.config import MemoryConfig, ParallelConfig, PrecisionConfig, RouterConfig, RunConfig
from moex.data import Batches, Corpus, check_tokens, stdlib_corpus, unigram_entropy
from moex.layers import param
from moex.models.flops import num_parameters, train_flops_per_token
from moex.precision.recipes import KINDS
from moex.train.program import Program
from moex.validate import ConfigError

FREE_TO_CHANGE = ("folder", "name", "train.steps", "parallel", "memory", "checkpoint", "observe")
"""Fields and sections that may differ when a run folder is continued."""


class Data(NamedTuple):
    """The corpus, its two readers, and nats a token of guessing by frequency alone in the training text."""

    corpus: Corpus
    train: Batches
    held_out: Batches
    unigram_entropy: float


def load_data(config: RunConfig) -> Data:
    """Opens and checks the corpus.  Raises ConfigError when it is missing, too small or has ids past the vocabulary."""
    train = config.train
    sizes = dict(seq_len=train.seq_len, rows=train.batch_size // train.accumulation, accumulation=train.accumulation)
    try:
        corpus = stdlib_corpus()
        for tokens in (corpus.train, corpus.held_out):
            check_tokens(tokens, config.model.vocab_size)
        batches = Batches(corpus.train, **sizes, seed=train.seed)
        held_out = Batches(corpus.held_out, **sizes, seed=train.seed, shuffle=False)
    except ValueError as error:
        raise ConfigError(f"data: {error}") from error
    return Data(corpus, batches, held_out, unigram_entropy(corpus.train.tokens))


def derive(program: Program, data: Data) -> dict[str, Any]:
    """Numbers that follow from the configuration, for plan.json and the start event."""
    config, model = program.config, program.config.model
    total, active = num_parameters(program.decoder.declarations, model)
    device = program.mesh.devices.flat[0]
    decays: list[str] = []
    param.named_map(lambda name, d: decays.append(name) if d.decays else None, program.decoder.declarations)
    return dict(
        parameters=total,
        active_parameters=active,
        flops_per_token=train_flops_per_token(model, config.train.seq_len),
        tokens_per_step=config.train.batch_size * config.train.seq_len,
        total_steps=config.train.steps,
        epochs=config.train.steps * data.train.windows_per_step / data.train.num_windows,
        num_devices=program.fold.num_devices,
        device_kind=device.device_kind,
        peak_flops=peak_flops(device.device_kind),
        mesh=program.fold.describe(),
        state_bytes_per_device=sum(
            x.dtype.itemsize * _size(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(program.state)
        ),
        weight_decay=decays,
        corpus=data.corpus.name,
        corpus_fingerprint=data.corpus.fingerprint,
        train_tokens=len(data.corpus.train),
        held_out_tokens=len(data.corpus.held_out),
        train_files=len(data.corpus.train.names),
        held_out_files=len(data.corpus.held_out.names),
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
        ("transport", transport_rules(config.parallel)),
        ("state", f"{d['state_bytes_per_device'] / 2**20:,.1f} MiB a device (float32 parameters and optimizer)"),
        (
            "step",
            f"{d['tokens_per_step']:,} tokens, {d['flops_per_token'] * d['tokens_per_step'] / 1e9:,.1f} GFLOP (model)",
        ),
        (
            "run",
            f"{config.train.steps} steps, {d['epochs']:.2f} epochs of {d['train_tokens']:,} tokens ({d['corpus']})",
        ),
        (
            "optimizer",
            f"{opt.name}, lr {opt.peak_lr:g} -> {opt.final_lr:g}, clip {opt.clip_norm:g}, decay {opt.weight_decay:g} on",
        ),
        ("", ", ".join(d["weight_decay"])),
        (
            "unigram entropy",
            f"{d['unigram_entropy']:.4f} nats a byte: the loss of knowing only how frequent each byte is",
        ),
    ]
    return lines if opt.name == "adamw" else [line for line in lines if line[0]]


def routing_rules(router: RouterConfig) -> str:
    """How experts are chosen and weighed, with every number in effect."""
    rules = [f"{router.score_function}, top {router.top_k} of {router.num_experts}"]
    if router.num_groups > 1:
        best = f"sum of best {router.group_score_top}" if router.group_score_top > 1 else "maximum"
        rules += [f"within the best {router.top_groups} of {router.num_groups} groups by {best}"]
    if router.selection != "top_k":
        decay = f", decay {router.quantile_decay:g}" if router.selection == "quantile" else ""
        rules += [f"selection {router.selection}{decay}"]
    scaled = router.renormalize and (router.top_k > 1 or router.score_function == "softmax")
    rules += [f"weights {'scaled to sum 1' if scaled else 'as scored'}, x {router.scaling_factor:g}"]
    rules += [f"jitter {router.jitter:g}"] if router.jitter else []
    if router.forced:
        skew = f" {router.forced_skew:g}" if router.forced == "skew" else ""
        rules += [f"FORCED {router.forced}{skew}: random logits, for benchmarks only"]
    return "; ".join(rules)


def balance_rules(router: RouterConfig) -> str:
    """What keeps experts evenly used, with every coefficient in effect; what is off is said to be off."""
    losses = dict(
        balance=router.aux_coefficient, sequence=router.sequence_coefficient, z=router.z_coefficient,
        **{"global-batch": router.global_coefficient},
    )  # fmt: skip
    on = [f"{name} loss x {value:g}" for name, value in losses.items() if value]
    off = [name for name, value in losses.items() if not value]
    rules = on + ([f"{', '.join(off)} loss off"] if off else [])
    centred = ", centred" if router.bias_centred else ""
    rules += [f"bias rate {router.bias_rate:g}{centred}" if router.bias_rate else "bias not moved"]
    if router.selection == "quantile":
        rules[-1] = "bias by quantiles"
    if router.capacity_factor:
        padded = ", padded" if router.pad_to_capacity else ""
        rules += [f"DROPS beyond {router.capacity_factor:g} x balanced rows by {router.capacity_policy}{padded}"]
    else:
        rules += ["drops nothing"]
    return "; ".join(rules)


def transport_rules(parallel: ParallelConfig) -> str:
    """How rows travel, with the sizes of buffers and clones in effect."""
    factors = dict(cells=parallel.cell_factor, spill=parallel.spill_factor, rows=parallel.row_factor)
    sized = [f"{name} x {value:g}" for name, value in factors.items() if value]
    worst = (
        "the worst case" if parallel.waves == 1 else f"the worst case of a {parallel.waves}th of the tokens at a time"
    )
    sizes = f"{', '.join(sized)} of balanced, {parallel.rungs} sizes up to {worst}" if sized else f"buffers for {worst}"
    when = dict(always="", retry=" in retries", report=" REPORTED only")[parallel.echo]
    clones = f"; clones of hot experts{when}: {parallel.echo_slots} a device, above x {parallel.echo_cap:g}"
    return f"{parallel.transport}; {sizes}{clones if parallel.echo_slots else ''}"


def precision_rules(precision: PrecisionConfig) -> str:
    """What products are computed in."""
    rules, named = [precision.compute_dtype], {kind: getattr(precision, kind) for kind in KINDS}
    chosen = {kind: precision.recipe if name == "recipe" else name for kind, name in named.items()}
    rules += [f"{kind} {name}" for kind, name in chosen.items() if name != "compute"]
    if precision.wire != "compute":
        rules.append("rows travel in FP8" + (", their results' gradients too" if precision.wire == "both" else ""))
    if precision.gather == "codes":
        rules.append("weights gathered in codes")
    return ", ".join(rules)


def memory_rules(memory: MemoryConfig) -> str:
    """What the backward pass computes again or finds in a stash."""
    rules = [f"recompute {', '.join(memory.recompute) or 'nothing'}"]
    if memory.stash:
        size = f"x {memory.stash_factor:g} of balanced" if memory.stash_factor else "the worst case"
        rules += [f"stash {', '.join(memory.stash)}: {size}"]
    return "; ".join(rules)


def environment() -> dict[str, Any]:
    """Versions, platform and the code's git state, for env.json."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")

    def git(*arguments: str) -> str | None:
        folder = Path(__file__).parent
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    try:
        commit, changed = git("rev-parse", "HEAD"), git("status", "--porcelain")
    except OSError:  # no git on this machine
        commit = changed = None
    return dict(
        python=sys.version.split()[0],
        platform=platform.platform(),
        versions={name: metadata.version(name) for name in packages},
        devices=[d.device_kind for d in jax.devices()],
        processes=jax.process_count(),
        git_commit=commit,
        git_clean=None if changed is None else not changed,
    )


def write_inputs(folder: Path, config: RunConfig, derived: Mapping[str, Any]) -> None:
    """Writes config.json, env.json and plan.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(dump(config))
    (folder / "env.json").write_text(json.dumps(environment(), indent=2) + "\n")
    (folder / "plan.json").write_text(json.dumps(derived, indent=2) + "\n")


def check_existing(folder: Path, config: RunConfig, data: Data) -> None:
    """Raises ConfigError when the folder holds a run that this configuration or corpus would not continue."""
    if not (folder / "config.json").is_file():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder} exists and is no run folder (it has no config.json); pass another --folder")
        return
    changed = differences(load(folder / "config.json"), config)
    if refused := {n: v for n, v in changed.items() if not n.startswith(FREE_TO_CHANGE)}:
        text = "; ".join(f"{name} was {old!r}, is {new!r}" for name, (old, new) in refused.items())
        raise ConfigError(
            f"{folder} holds a run with another configuration: {text}. Pass another --folder, or those values"
        )
    plan = folder / "plan.json"
    if plan.is_file() and json.loads(plan.read_text())["corpus_fingerprint"] != data.corpus.fingerprint:
        raise ConfigError(
            f"{folder} was trained on another corpus than {data.corpus.name} of this machine: continue it with the Python "
            "version it was started with, or pass another --folder"
        )


def differences(old: RunConfig, new: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Fields by dotted name whose values differ, with both values."""
    flat = lambda config: dict(_flatten(json.loads(dump(config))))
    before, after = flat(old), flat(new)
    return {name: (before[name], after[name]) for name in before if before[name] != after[name]}


def _flatten(values: Mapping[str, Any], prefix: str = ""):
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size
