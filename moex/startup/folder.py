"""The run folder's first files, and whether a run may continue a folder."""

import json
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from moex.cli import dump, load
from moex.config import RunConfig
from moex.observe.jsonl import read_object
from moex.startup.inputs import Data
from moex.validate import ConfigError

FREE_TO_CHANGE = (
    "folder", "name", "train.steps", "data.corpus", "data.max_epochs", "parallel", "memory", "compiler", "checkpoint",
    "observe",
)  # fmt: skip
"""Fields and sections that may differ when a run folder is continued; a corpus may have moved, but not changed."""


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


def check_existing(folder: Path, config: RunConfig, data: Data) -> dict[str, tuple[Any, Any]]:
    """The settings that differ from those of the run in the folder, with both values; none where it holds no run.

    Raises ConfigError when this configuration or corpus would not continue that run.
    """
    if not (folder / "config.json").is_file():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder} exists and is no run folder (it has no config.json); pass another --folder")
        return {}
    changed = differences(load(folder / "config.json"), config)
    if refused := {n: v for n, v in changed.items() if not n.startswith(FREE_TO_CHANGE)}:
        text = "; ".join(f"{name} was {old!r}, is {new!r}" for name, (old, new) in refused.items())
        raise ConfigError(
            f"{folder} holds a run with another configuration: {text}. Pass another --folder, or those values"
        )
    plan = folder / "plan.json"
    if plan.is_file() and read_object(plan).get("corpus_fingerprint") != data.fingerprint:
        raise ConfigError(
            f"{folder} was trained on another corpus than {data.name}: give the one it was started with (the stdlib "
            "corpus changes with the Python version), or pass another --folder"
        )
    return changed


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
