"""`python -m moex.hf import DIR RUN [flags]`, `export RUN DIR [options]` and `upcycle RUN NEW [flags]`.

import: a public checkpoint becomes a run folder that `train.py --config RUN/config.json` continues from, on any mesh.
export: a run's checkpoint becomes a folder that public libraries load.
upcycle: the newest checkpoint of a dense run becomes a run of experts that computes the same.
Exit codes: 0 done, 2 when folder, configuration or devices don't fit, with the reason.
"""

import dataclasses
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

import tyro

from moex import cli
from moex.hf.save import SHARD_BYTES

USAGE = """usage: python -m moex.hf import DIR RUN [--section.field VALUE ...]
       python -m moex.hf upcycle RUN NEW --model.router.num_experts E --model.expert_width F [--section.field VALUE ...]
       python -m moex.hf export RUN DIR [--step N] [--family NAME] [--dtype bfloat16|float32|float16]"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export:
    """Writes a run's checkpoint as a public one."""

    run: tyro.conf.Positional[Path]
    """The run folder."""
    folder: tyro.conf.Positional[Path]
    """Where to write; it must not exist or be empty."""
    step: int | None = None
    """Checkpoint to write, by its step; the newest otherwise."""
    family: str = ""
    """Public family to write as; by default the one the run was imported from, or the first that can express the model."""
    dtype: str = ""
    """Format of the weights; by default each tensor's at import, or the run's compute format."""
    shard_bytes: int = SHARD_BYTES
    """Most bytes of a file of weights."""


class Report:
    """Prints how far a transfer is, a line for each twentieth, and the process's largest memory."""

    def __init__(self, what: str):
        self.what, self.shown = what, 0

    def __call__(self, name: str, number: int, count: int) -> None:
        twentieth = 20 * number // count
        if twentieth > self.shown:
            self.shown = twentieth
            print(f"{self.what} {number:>7,}/{count:,}  {peak_bytes() / 2**30:6.2f} GiB at most  {name}", flush=True)


def peak_bytes() -> int:
    """Most memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    command, rest = (given[0] if given else ""), given[1:]
    two_folders = len(rest) >= 2 and not rest[0].startswith("-") and not rest[1].startswith("-")
    if command in ("-h", "--help") or (command in ("import", "upcycle") and rest in (["-h"], ["--help"])):
        print(f"{__doc__}\n{USAGE}")
        return 0
    try:
        if command == "import" and two_folders:
            from moex.hf.run import import_run

            import_run(Path(rest[0]), Path(rest[1]), rest[2:], Report("read"))
            return 0
        if command == "upcycle" and two_folders:
            from moex.hf.upcycle import upcycle_run

            upcycle_run(Path(rest[0]), Path(rest[1]), rest[2:])
            return 0
        if command == "export":
            from moex.hf.run import export_run

            asked = tyro.cli(Export, args=rest, prog="python -m moex.hf export")
            options = dict(step=asked.step, family=asked.family, dtype=asked.dtype, shard_bytes=asked.shard_bytes)
            export_run(asked.run, asked.folder, Report("wrote"), **options)
            return 0
    except (ValueError, OSError) as error:
        return cli.fail(error)
    print(USAGE, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
