"""`python -m moex.launch slurm|k8s PRESET [--section.field VALUE ...] [--gpus h100:1024]`: a job's file from the plan.

Prints the file; a comment in its head says whether the plan fits. Exit code 2 for a configuration that the GPUs don't take.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from moex.cli import GPUS, fail, parse
from moex.launch.scripts import jobset, slurm
from moex.plan.cache import cached
from moex.plan.compiled import compiler_flags
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
        config = parse(rest).config
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
    told = dict(verdict=_verdict(config, target), flags=compiler_flags(config))
    if options.scheduler == "slurm":
        text = slurm(config.name, rest, target, **told, per=options.per, hours=options.hours)
    else:
        text = jobset(config.name, rest, target, **told, image=options.image, volume=options.volume)
    if options.out:
        options.out.write_text(text)
    else:
        print(text, end="")
    return 0


def _verdict(config, target: Target) -> str:
    """What the plan says, where the step was compiled for these GPUs before."""
    step = cached(config, target)
    if step is None:
        return "Not planned: `python -m moex.plan` with the same arguments tells whether it fits."
    fits = "fits" if step.peak_bytes <= target.usable_bytes else "DOES NOT FIT"
    return f"Planned: {fits}, {step.peak_bytes / 1e9:.1f} of {target.usable_bytes / 1e9:.0f} GB a GPU."


if __name__ == "__main__":
    sys.exit(main())
