"""The command line: a preset's name or a saved configuration, then overrides as --section.field VALUE."""

import dataclasses
import difflib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tyro

from configs import GPUS, PRESETS
from moex.config import RunConfig
from moex.observe.jsonl import read_object
from moex.validate import ConfigError

__all__ = ["GPUS", "PRESETS", "USAGE", "Command", "dump", "fail", "load", "parse"]

USAGE = """usage: train.py [PRESET] [--section.field VALUE ...] [--print-config] [--inspect-batch STEP] [--profile FIRST:STOP]
       train.py --config RUN/config.json [--section.field VALUE ...] [...]
       train.py [PRESET] --help      (all fields with their defaults)"""


class Command(NamedTuple):
    """inspect_batch: the step whose batch is to be shown in place of training, or None."""

    config: RunConfig
    print_config: bool
    inspect_batch: int | None = None


def parse(arguments: Sequence[str]) -> Command:
    """Reads the command line.  Raises ConfigError; a wrong flag or value exits with 2 through tyro, with a suggestion."""
    rest = list(arguments)
    print_config = "--print-config" in rest
    rest = [_recipe_flag(a) for a in rest if a != "--print-config"]
    inspect, profile = _take(rest, "--inspect-batch"), _take(rest, "--profile")
    if inspect is not None and not inspect.isdigit():
        raise ConfigError(f"--inspect-batch {inspect} must be the number of a step, from 0")
    rest += [] if profile is None else [f"--observe.profile={profile}"]
    preset = rest.pop(0) if rest and not rest[0].startswith("-") else None
    saved = _take(rest, "--config")
    if saved is not None and (not saved or saved.startswith("--")):
        raise ConfigError("--config needs the path of a JSON file, such as RUN/config.json")
    if preset and saved is not None:
        raise ConfigError(f"give a preset ({preset}) or --config {saved}, not both")
    base = load(saved) if saved is not None else _preset(preset or "tiny")
    return Command(_tyro(rest, base), print_config, None if inspect is None else int(inspect))


def _take(arguments: list[str], flag: str) -> str | None:
    """The value of `--flag VALUE` or `--flag=VALUE`, which is removed; empty where it has none, None without the flag."""
    for i, argument in enumerate(arguments):
        if argument == flag or argument.startswith(f"{flag}="):
            value = argument.partition("=")[2] or (arguments[i + 1] if i + 1 < len(arguments) else "")
            del arguments[i : i + (1 if "=" in argument else 2)]
            return value
    return None


def _recipe_flag(argument: str) -> str:
    """--precision NAME is short for --precision.recipe NAME."""
    name, equals, value = argument.partition("=")
    return f"--precision.recipe{equals}{value}" if name == "--precision" else argument


def overridden(arguments: Sequence[str], base: RunConfig, program: str) -> RunConfig:
    """The base with --section.field VALUE flags.  Raises ConfigError; a wrong flag or value exits with 2 through tyro."""
    return _tyro([_recipe_flag(a) for a in arguments], base, program)


def _preset(name: str) -> RunConfig:
    if name not in PRESETS:
        close = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"; did you mean {close[0]}?" if close else "."
        raise ConfigError(f"no preset {name!r}{hint} The presets are {', '.join(PRESETS)}.\n{USAGE}")
    return PRESETS[name]()


def load(path: str | Path) -> RunConfig:
    """A configuration from the JSON that `dump` wrote.  Unknown keys and wrong values end like a wrong flag."""
    try:
        values = read_object(Path(path))
    except ValueError as error:
        raise ConfigError(f"--config {error}") from error
    try:
        return _tyro(list(_flags(values)), RunConfig())
    except ConfigError as error:
        raise ConfigError(f"--config {path}: {error}") from error
    except SystemExit:  # the parser has said what is wrong with the value
        print(f"error: --config {path} has this value", file=sys.stderr)
        raise


def dump(config: RunConfig) -> str:
    """The configuration as JSON that `load` reads back to an equal one."""
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def _flags(values: dict[str, Any], prefix: str = "--"):
    """One flag a field, so that a saved file is checked by the same parser as the command line."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flags(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            yield from (f"{prefix}{name}", *map(str, value))
        else:
            yield f"{prefix}{name}={value}" if isinstance(value, str) else f"{prefix}{name}={value!r}"


def _tyro(arguments: list[str], default: RunConfig, program: str = "train.py") -> RunConfig:
    _refuse_unknown(arguments)
    return tyro.cli(
        RunConfig,
        args=arguments,
        default=default,
        prog=program,
        description=USAGE,
        config=(tyro.conf.FlagConversionOff,),
    )


def _refuse_unknown(arguments: list[str]) -> None:
    """Raises ConfigError for a field that doesn't exist, naming the section where one of that name stands, or a close one."""
    known = _fields(RunConfig(), "")
    for argument in arguments:
        name = argument.removeprefix("--").partition("=")[0].replace("-", "_")
        if not argument.startswith("--") or name in known or name in ("help", "tyro_print_completion"):
            continue
        leaf = name.rpartition(".")[2]
        leaves = [f.rpartition(".")[2] for f in known]
        alike = [leaf] if leaf in leaves else difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.7)
        close = [f for f, own in zip(known, leaves, strict=True) if own in alike]
        close = close or difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {' or '.join('--' + f for f in close)}?" if close else ""
        raise ConfigError(f"unknown option --{name}{hint}\n(train.py --help lists all)")


def _fields(config, prefix: str) -> list[str]:
    names = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        names += _fields(value, f"{prefix}{field.name}.") if dataclasses.is_dataclass(value) else [prefix + field.name]
    return names


def fail(error: Exception) -> int:
    """Prints what is wrong with the configuration or the data, for exit code 2."""
    print(f"error: {error}", file=sys.stderr)
    return 2
