"""From a public folder to a run folder, and back."""

import dataclasses
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from mesh import distributed
from moex import cli
from moex.checkpoint import save_weights, saved_arrays
from moex.config import ModelConfig, RunConfig
from moex.hf import storage
from moex.hf.folder import CARRIED, Folder
from moex.hf.load import Progress, check_tensors, load
from moex.hf.made import check_empty, whole_or_nothing
from moex.hf.names import ROUTER_BIAS
from moex.hf.params import nested, targets
from moex.hf.save import SHARD_BYTES, write_folder
from moex.models.families import FAMILIES, family_name, from_public, to_public
from moex.models.public import TRAINING_ONLY, flattened
from moex.observe.jsonl import read_object
from moex.train.program import build
from moex.validate import ConfigError, check, check_on, resolve_fold

ORIGIN = "hf"
"""Folder in a run folder with the public config.json, tokenizer files, and the formats that tensors had."""
FORMATS = "formats.json"
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def import_run(source: Path, run: Path, flags: Sequence[str], progress: Progress) -> RunConfig:
    """Reads the public checkpoint `source` into the new run folder `run`; `flags` are those of train.py.

    Raises ValueError when anything doesn't fit, before a tensor is read.
    """
    folder = Folder(source)
    _check_counts(folder)
    model, family = from_public(folder.config), family_name(folder.config)
    base = RunConfig(name=run.name, folder=str(run), model=model)
    config = cli.overridden(flags, base, "python -m moex.hf import DIR RUN")
    _check(config, model)
    extra = _beyond(folder, config.model)
    wanted = check_tensors(folder, config.model, family, left_out=extra)
    check_empty(run)
    distributed.initialise()
    fold = resolve_fold(config.parallel, jax.device_count())
    check_on(config, fold, jax.default_backend())
    program = build(config, fold)
    with whole_or_nothing(run, mine=jax.process_index() == 0):
        if jax.process_index() == 0:
            for line in _account(folder, config, family, extra):
                print(line)
            _keep_origin(folder, run / ORIGIN)
        values = load(folder, wanted, targets(program.state), progress)
        save_weights(run, nested(values), values[ROUTER_BIAS], fold.describe())
        if jax.process_index() == 0:
            (run / "config.json").write_text(cli.dump(config))  # last: a folder with it is complete
            print(f"imported to {run}: python train.py --config {run / 'config.json'}")
    return config


def _check_counts(folder: Folder) -> None:
    """Raises ConfigError where a layer would have less than a tensor, or an expert less than a number; none is listed yet."""
    numbers = sum(math.prod(tensor.shape) for tensor in folder.tensors.values())
    most = dict(num_hidden_layers=len(folder.tensors)) | dict.fromkeys(_EXPERTS, numbers)
    for name, limit in most.items():
        if isinstance(count := folder.config.get(name, 0), int) and count > limit:
            raise ConfigError(
                f"{folder.path / 'config.json'}: {name}={count}, but the folder holds {len(folder.tensors)} tensors of "
                f"{numbers} numbers together"
            )


def _check(config: RunConfig, model: ModelConfig) -> None:
    """Raises ConfigError when flags contradict the checkpoint or each other."""
    given, read = flattened(config.model), flattened(model)
    changed = {path: value for path, value in given.items() if value != read[path] and path not in TRAINING_ONLY}
    problems = [
        f"model.{path}={value!r} contradicts the checkpoint's {read[path]!r}" for path, value in changed.items()
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    # Which text it will be trained on may be decided later: train.py checks that the vocabulary has room for it.
    any_text = dataclasses.replace(config.model, vocab_size=max(config.model.vocab_size, 256))
    check(dataclasses.replace(config, model=any_text))


def _beyond(folder: Folder, model: ModelConfig) -> list[str]:
    """Tensors of layers past the last, which predict further tokens and take no part in the model's outputs."""
    number = lambda name: name.removeprefix("model.layers.").partition(".")[0]
    layers = [name for name in folder.tensors if name.startswith("model.layers.") and number(name).isdigit()]
    depth = folder.config.get("num_nextn_predict_layers") or folder.config.get("num_mtp_layers") or 0
    first = model.num_layers + model.mtp_depth
    return [name for name in layers if first <= int(number(name)) < model.num_layers + depth]


def _account(folder: Folder, config: RunConfig, family: str, extra: list[str]):
    """Lines that say what will be read."""
    tensors = folder.tensors
    largest = max((name for name in tensors if name not in set(extra)), key=lambda name: tensors[name].num_bytes)
    router = config.model.router
    losses = dict(balance=router.aux_coefficient, sequence=router.sequence_coefficient)
    effective = ", ".join(f"{name} loss x {value:g}" if value else f"{name} loss off" for name, value in losses.items())
    yield f"{folder.path}: {family}, {len(tensors)} tensors, {sum(t.num_bytes for t in tensors.values()) / 2**30:,.2f} GiB"
    yield f"largest tensor {largest}, {tensors[largest].num_bytes / 2**20:,.1f} MiB; the host holds one at a time"
    yield f"training will use: {effective}, bias rate {router.bias_rate:g}"
    if extra:
        yield f"left out: {len(extra)} tensors of layers that predict further tokens, from {extra[0]}"


def _keep_origin(folder: Folder, kept: Path) -> None:
    kept.mkdir()
    config = {name: value for name, value in folder.config.items() if name != "quantization_config"}
    if len(config) < len(folder.config):  # what was quantised is written in full
        config |= {"torch_dtype" if "torch_dtype" in config else "dtype": "bfloat16"}
    (kept / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    formats = {name: storage.NAMES[tensor.dtype] for name, tensor in folder.tensors.items()}
    (kept / FORMATS).write_text(json.dumps(formats, indent=0) + "\n")
    for name in CARRIED:
        if (folder.path / name).is_file():
            shutil.copyfile(folder.path / name, kept / name)


def export_run(
    run: Path, folder: Path, progress: Progress, *,
    step: int | None = None, family: str = "", dtype: str = "", shard_bytes: int = SHARD_BYTES,
) -> None:  # fmt: skip
    """Writes a checkpoint of `run` (the newest) as a public one.  Raises ValueError when it has no public form."""
    if not (run / "config.json").is_file():
        raise ConfigError(f"{run} is no run folder: it has no config.json")
    config, origin = cli.load(run / "config.json"), run / ORIGIN
    public, kept = _public_config(config, origin, family)
    if dtype:
        kept = {}
        public |= {"torch_dtype" if "torch_dtype" in public else "dtype": dtype}
    with saved_arrays(run, step) as read:
        write_folder(
            folder, config.model, family_name(public), public,
            lambda name: read(name if name == ROUTER_BIAS else f"params.{name}"), kept=kept,
            carry_from=origin if origin.is_dir() else None, progress=progress, shard_bytes=shard_bytes,
        )  # fmt: skip
    print(f"exported {run} to {folder}")


def _public_config(config: RunConfig, origin: Path, family: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The config.json to write, and formats of tensors: those of the import, or made from the run's configuration."""
    if family and family not in FAMILIES:
        raise ConfigError(f"--family {family} is none of {', '.join(FAMILIES)}")
    if (origin / "config.json").is_file():
        public = read_object(origin / "config.json")
        if not family or family == family_name(public):
            return public, read_object(origin / FORMATS)
    longest = dict(max_position_embeddings=config.train.seq_len, dtype=config.precision.compute_dtype)
    further = dict(num_nextn_predict_layers=config.model.mtp_depth) if config.model.mtp_depth else {}
    return longest | further | to_public(config.model, family), {}
