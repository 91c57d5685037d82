"""`python -m moex.checkpoint ls|show|verify RUN`: the checkpoints of a run, what is in one, whether it is whole."""

import dataclasses
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from moex import cli
from moex.checkpoint.look import entries, listed, verify


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ls:
    """Lists a run's checkpoints."""

    run: tyro.conf.Positional[Path]
    """The run folder."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Show:
    """Says what is in a checkpoint: every array's name, shape, dtype and bytes."""

    run: tyro.conf.Positional[Path]
    """The run folder."""
    step: int | None = None
    """Which checkpoint, by its step; the newest otherwise."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verify:
    """Reads a checkpoint and compares it with what was saved and with config.json; exit code 1 when something differs."""

    run: tyro.conf.Positional[Path]
    """The run folder."""
    step: int | None = None
    """Which checkpoint, by its step; the newest otherwise."""


_COMMANDS = (
    Annotated[Ls, tyro.conf.subcommand("ls")]
    | Annotated[Show, tyro.conf.subcommand("show")]
    | Annotated[Verify, tyro.conf.subcommand("verify")]
)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; exit code 2 with the reason when there is no such run or checkpoint."""
    command = tyro.cli(_COMMANDS, args=arguments, prog="python -m moex.checkpoint")
    try:
        if isinstance(command, Verify):
            problems = list(verify(command.run, command.step))
            print("\n".join(problems) if problems else "every array is what was saved, and fits config.json")
            return int(bool(problems))
        print(_show(command) if isinstance(command, Show) else _list(command.run))
    except ValueError as error:
        return cli.fail(error)
    return 0


def _list(run: Path) -> str:
    lines = []
    for one in listed(run):
        count, devices, kind, mesh = (
            one.facts.get(n, "?") for n in ("processes", "num_devices", "device_kind", "mesh")
        )
        where = f"{count} processes, {devices} x {kind}, {mesh}" if one.facts else "nothing is known of its run"
        lines.append(f"step {one.step:>8,}  {one.saved} UTC  {one.num_bytes / 2**20:10,.1f} MiB  {where}")
    return "\n".join(lines)


def _show(command: Show) -> str:
    found, totals = entries(command.run, command.step), defaultdict(int)
    width = max(len(one.name) for one in found)
    lines = []
    for one in found:
        totals[one.name.partition(".")[0]] += one.num_bytes
        lines.append(f"{one.name:<{width}}  {one.dtype:<8}  {list(one.shape)}")
    sizes = ", ".join(f"{name} {size / 2**20:,.2f} MiB" for name, size in totals.items() if size >= 2**10)
    return "\n".join([*lines, f"{len(found)} arrays: {sizes}"])


if __name__ == "__main__":
    sys.exit(main())
