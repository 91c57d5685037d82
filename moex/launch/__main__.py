"""`python -m moex.launch slurm|k8s PRESET [--section.field VALUE ...] [--gpus h100:1024]`: a job's file from the plan.

Prints the file; a comment in its head says whether the plan fits. Exit code 2 for a configuration that the GPUs don't take.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from moex.cli import GPUS, fail, parse
from moex.launch.scripts import jobset, slurm
from moex.plan.cache import cached
from moex.plan.target import KINDS, Target, parse_target
from moex.validate import ConfigError, check, check_on, resolve_fold


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m moex.launch",
        usage="python -m moex.launch slurm|k8s PRESET [--section.field VALUE ...] [--gpus KIND:COUNT] [options]",
        description=__doc__.splitlines()[2],
        allow_abbrev=False,
    )
    parser.add_argument("scheduler", choices=("slurm", "k8s"))
    parser.add_argument("--gpus", help="as of python -m moex.plan; those of the preset without")
    parser.add_argument(
        "--per", choices=("node", "gpu"), default="node", help="slurm: a process for each host or each GPU"
    )
    parser.add_argument("--hours", type=int, default=24, help="slurm: time limit")
    parser.add_argument("--image", default="REGISTRY/moex:TAG", help="k8s: image with the checkout in /moex")
    parser.add_argument("--volume", default="moex-runs", help="k8s: claim of a volume that all pods can write")
    parser.add_argument("--out", type=Path, help="write the file there in place of printing it")
    options, rest = parser.parse_known_args(sys.argv[1:] if arguments is None else arguments)
    try:
        _check_names(options)
        config = parse(rest).config
        if not re.fullmatch(_NAME, config.name):
            raise ConfigError(f"--name {config.name!r}: a job's name has letters, digits, dots, _ and - only")
        if not (given := options.gpus or GPUS.get(config.name)):
            raise ConfigError(
                f"--gpus is missing: {config.name} is laid out for no certain GPUs; add --gpus h100:16 or the like"
            )
        target = parse_target(given)
        if target.num_gpus % target.gpus_per_host:
            raise ConfigError(f"--gpus {given}: hosts have {target.gpus_per_host} GPUs each; take a multiple")
        check(config)
        check_on(config, resolve_fold(config.parallel, target.num_gpus), device_kind=KINDS[target.name])
    except ConfigError as error:
        return fail(error)
    verdict = _verdict(config, target)
    if options.scheduler == "slurm":
        text = slurm(config.name, rest, target, verdict=verdict, per=options.per, hours=options.hours)
    else:
        text = jobset(config.name, rest, target, verdict=verdict, image=options.image, volume=options.volume)
    if options.out is None:
        print(text, end="")
        return 0
    try:
        options.out.write_text(text)
    except OSError as error:
        return fail(error)
    return 0


_NAME = r"[A-Za-z0-9._-]+"


def _check_names(options: argparse.Namespace) -> None:
    """Raises ConfigError for what would end a line, or a word, of the file that it stands in."""
    if options.hours < 1:
        raise ConfigError(f"--hours {options.hours} must be at least 1")
    for name, pattern in dict(image=r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", volume=r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?").items():
        if not re.fullmatch(pattern, value := getattr(options, name)):
            raise ConfigError(f"--{name} {value!r} is no name of one: it must match {pattern}")


def _verdict(config, target: Target) -> str:
    """What the plan says, where the step was compiled for these GPUs before."""
    step = cached(config, target)
    if step is None:
        return "Not planned: `python -m moex.plan` with the same arguments tells whether it fits."
    fits = "fits" if step.peak_bytes <= target.usable_bytes else "DOES NOT FIT"
    return f"Planned: {fits}, {step.peak_bytes / 1e9:.1f} of {target.usable_bytes / 1e9:.0f} GB a GPU."


if __name__ == "__main__":
    sys.exit(main())
