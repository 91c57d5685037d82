"""`python -m moex.plan PRESET --gpus h100:1024`: the step compiled for GPUs that aren't here, and read.

Exit codes: 0 planned; 1 not compiled, or `--audit` has found a fault; 2 wrong configuration.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from moex.cli import GPUS, dump, fail, parse
from moex.config import RunConfig
from moex.config.compute import Recipe
from moex.plan import calibrate, report
from moex.plan.as_json import as_json
from moex.plan.compiled import CompileError
from moex.plan.page import page
from moex.plan.plan import Plan, make_plan
from moex.plan.recipes import recipes_text
from moex.plan.remedies import Remedy, measured
from moex.plan.search import search
from moex.plan.target import Target, parse_target
from moex.validate import ConfigError

_ROOT = Path(__file__).resolve().parents[2]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m moex.plan",
        usage="python -m moex.plan PRESET [--section.field VALUE ...] [--gpus KIND:COUNT[:PER_DOMAIN]] [options]",
        description="Compiles a run's training step for GPUs that need not be here; tells what the program holds and sends.",
        allow_abbrev=False,
    )
    parser.add_argument("--gpus", help="a100, h100, h200, b200, gb200, gb300 with a count, such as h100:1024")
    parser.add_argument(
        "--folder-out", type=Path, metavar="FOLDER", help="write plan.txt, plan.json, plan.html and schedule.txt there"
    )
    parser.add_argument("--schedule", action="store_true", help="print one layer's schedule, too")
    parser.add_argument(
        "--audit", action="store_true", help="exit with 1 when the step doesn't fit or the audit finds a fault"
    )
    parser.add_argument("--remedies", action="store_true", help="compile remedies although it fits")
    parser.add_argument(
        "--search", action="store_true", help="look for a faster layout, compile the best three by formula"
    )
    parser.add_argument(
        "--recipes", nargs="+", choices=get_args(Recipe), default=(), metavar="RECIPE",
        help="--search: recipes of products that it may choose (compute, fp8_block, ...); the configuration's own otherwise",
    )  # fmt: skip
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="--search: write the best configuration for train.py --config"
    )
    parser.add_argument(
        "--memory", action="store_true", help="what layers keep, by name, and each recipe's price; compile nothing"
    )
    parser.add_argument("--calibrate", action="store_true", help="compare estimates with published speeds, and stop")
    parser.add_argument(
        "--install", action="store_true", help="make .venv-aot, the environment that compiles, and stop"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options, rest = _parser().parse_known_args(sys.argv[1:] if arguments is None else arguments)
    if options.install:
        return _install()
    try:
        if options.calibrate:
            return _calibrate()
        config = parse(rest).config
        target = parse_target(_gpus(options.gpus, config))
        if options.memory:
            print(recipes_text(config, target), end="")
            return 0
        if options.search:
            return _search(config, target, options.save, options.recipes)
        if unused := [name for name in ("save", "recipes") if getattr(options, name)]:
            raise ConfigError(f"--{', --'.join(unused)} has no effect without --search")
        plan = make_plan(config, target, tell=_tell)
        wanted = options.remedies or not plan.fits
        remedies = measured(config, plan.target, tell=_tell) if wanted else []
    except ConfigError as error:
        return fail(error)
    except CompileError as error:
        print(f"not compiled: {error}", file=sys.stderr)
        return 1
    told = report.text(plan, remedies=remedies, colour=sys.stdout.isatty())
    print(told, end="")
    if options.schedule:
        print(report.schedule_text(plan), end="")
    if options.folder_out:
        _write(options.folder_out, plan, remedies)
    return int(options.audit and (not plan.fits or any(f.level == "fault" for f in plan.findings)))


def _install() -> int:
    script = _ROOT / "scripts/setup_aot.sh"
    if not script.exists():
        return fail(ConfigError(f"--install needs a checkout of moex: {script} is missing"))
    return subprocess.call([str(script), str(_ROOT / ".venv-aot")])


def _calibrate() -> int:
    known = calibrate.cases(tell=_tell)
    fitted = calibrate.fit(known)
    print(calibrate.table(calibrate.outcomes(known, fitted), fitted), end="")
    return 0


def _search(config: RunConfig, target: Target, save: Path | None, recipes: Sequence[Recipe]) -> int:
    """The table of compiled layouts, one line a rejected family, and the best as a file. 1 when none fits."""
    found = search(config, target, recipes=recipes, tell=_tell)
    print(report.search_text(found), end="")
    best = found.plans[0] if found.plans else None
    if best is None or not best.fits:
        print("no layout that was compiled fits", file=sys.stderr)
        return 1
    if save:
        save.write_text(dump(best.config))
        print(f"written: {save} (python train.py --config {save})")
    return 0


def _gpus(given: str | None, config: RunConfig) -> str:
    """The GPUs asked for, or those that the preset is laid out for."""
    if given or config.name in GPUS:
        return given or GPUS[config.name]
    raise ConfigError(
        f"--gpus is missing: {config.name} is laid out for no certain GPUs; add --gpus h100:16 or the like"
    )


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _write(folder: Path, plan: Plan, remedies: Sequence[Remedy]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    values = as_json(plan, remedies)
    (folder / "plan.json").write_text(json.dumps(values, indent=1) + "\n")
    (folder / "plan.txt").write_text(report.text(plan, remedies=remedies))
    (folder / "schedule.txt").write_text(report.schedule_text(plan))
    (folder / "plan.html").write_text(page(values))
    _tell(f"written: {folder}/plan.txt, plan.json, plan.html, schedule.txt")


if __name__ == "__main__":
    sys.exit(main())
