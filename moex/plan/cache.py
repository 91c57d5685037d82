"""Compiled steps kept by what they were compiled from, so that a plan asked for again takes a second.

The key covers what the program depends on: model, parallel, train, optimizer, precision, memory and compiler settings, the
GPU and their number, and the source of every module that the step is traced from.
"""

import dataclasses
import functools
import gzip
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moex.config import OptimizerConfig, RunConfig, TrainConfig
from moex.plan.compiled import CompiledStep, CompileError, compile_step
from moex.plan.target import Target
from pallas_kernels.sass import toolchain

_ROOT = Path(__file__).resolve().parents[2]
_TRACED = (
    "mesh", "pallas_kernels", "moex/config", "moex/layers", "moex/dispatch", "moex/precision", "moex/balance",
    "moex/memory", "moex/pipeline", "moex/models", "moex/train",
)  # fmt: skip
_PROGRAM = ("model", "parallel", "train", "optimizer", "precision", "memory", "compiler")
_TEXTS = ("text", "thunks", "live", "log")


def cache_folder() -> Path:
    """$MOEX_PLAN_CACHE, or moex/plan in the user's folder for caches."""
    named = os.environ.get("MOEX_PLAN_CACHE")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moex/plan"


def aot_python() -> Path:
    """Python of the compile-only environment: $MOEX_AOT_PYTHON, or that of .venv-aot.

    Raises CompileError naming the command that makes it.
    """
    python = Path(os.environ.get("MOEX_AOT_PYTHON") or _ROOT / ".venv-aot/bin/python")
    if toolchain(python) is None:
        raise CompileError(
            f"{python} is missing or lacks NVIDIA's compiler packages: `python -m moex.plan --install` makes .venv-aot "
            "(1.3 GB, some minutes, once)"
        )
    return python


def compiled_for(config: RunConfig, target: Target, *, tell: Callable[[str], None] = lambda _: None) -> CompiledStep:
    """The step compiled for the target, from the cache where it has it.

    tell: is given a line before a compile, which takes minutes.

    Raises ConfigError when the configuration doesn't fit the GPUs; CompileError with the compiler's text.
    """
    config = _with_default_schedule(config)
    if (found := cached(config, target)) is not None:
        return found
    python = aot_python()
    tell(f"compiling the step for {target}: one to five minutes, once")
    step = compile_step(config, target.num_gpus, target.description, python=python, gpus_per_host=target.gpus_per_host)
    _write(cache_folder() / key(config, target), step)
    return step


def cached(config: RunConfig, target: Target) -> CompiledStep | None:
    """The step where it was compiled before, else None."""
    return _read(cache_folder() / key(config, target))


def key(config: RunConfig, target: Target) -> str:
    """What names the cached step; GPUs in an NVLink domain are not part of it, since XLA doesn't know them."""
    settings = dataclasses.asdict(_with_default_schedule(config))
    content = {name: settings[name] for name in _PROGRAM}
    content |= dict(gpus=target.num_gpus, host=target.gpus_per_host, target=target.description, source=_sources())
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _with_default_schedule(config: RunConfig) -> RunConfig:
    """Without what changes constants of the program only: its length, rates, seed."""
    rates = {n: getattr(OptimizerConfig(), n) for n in ("peak_lr", "final_lr", "warmup_steps", "weight_decay", "eps")}
    train = dataclasses.replace(config.train, steps=TrainConfig.steps, seed=TrainConfig.seed)
    return dataclasses.replace(config, train=train, optimizer=dataclasses.replace(config.optimizer, **rates))


@functools.cache
def _sources() -> str:
    digest = hashlib.sha256()
    for package in _TRACED:
        for path in sorted((_ROOT / package).rglob("*")):
            if path.suffix in (".py", ".json"):
                digest.update(str(path.relative_to(_ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()


def _read(folder: Path) -> CompiledStep | None:
    if not (folder / "numbers.json").exists():
        return None
    texts: dict[str, Any] = {name: gzip.decompress((folder / f"{name}.gz").read_bytes()).decode() for name in _TEXTS}
    return CompiledStep(**json.loads((folder / "numbers.json").read_text()), **texts)


def _write(folder: Path, step: CompiledStep) -> None:
    """The numbers come last: an entry without them was interrupted and doesn't count."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in _TEXTS:
        (folder / f"{name}.gz").write_bytes(gzip.compress(getattr(step, name).encode(errors="replace"), 5))
    numbers = {f.name: getattr(step, f.name) for f in dataclasses.fields(step) if f.name not in _TEXTS}
    (folder / "numbers.json").write_text(json.dumps(numbers))
