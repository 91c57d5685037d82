"""Recipes of a run: `python -m moex.precision show PRESET`, `operands RUN`, `compare RUN --recipes fp8_block mxfp8`.

`show` takes what train.py takes and prints each product's formats; `operands` says what quantisation did to each product's
operands when the run last measured; `compare` starts every recipe from a run's newest
checkpoint and says what the loss, the gradients and the choices of experts lose by it.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from mesh import distributed
from moex import compare_recipes as comparing
from moex.cli import fail, parse
from moex.compare_recipes import BASE, NULL, Compared
from moex.layers import param
from moex.models.decoder import Decoder
from moex.observe import gaps, operands
from moex.precision import table
from moex.precision.recipes import RECIPES, resolve
from moex.validate import ConfigError, check


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if given[:1] == ["show"]:
            return _show(given[1:])
        a = _parser().parse_args(given)
        return _operands(a.run) if a.command == "operands" else _compare(a)
    except ConfigError as error:
        return fail(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m moex.precision", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, dest="command")
    commands.add_parser("show", help="formats of every product; takes a preset and flags as train.py does")
    add = commands.add_parser(
        "operands", help="what quantisation did to a run's operands, as last measured"
    ).add_argument
    add("run", type=Path, help="run folder")
    add = commands.add_parser("compare", help="paired warm starts from a run's newest checkpoint").add_argument
    add("run", type=Path, help="run folder")
    add("--recipes", nargs="+", choices=list(RECIPES), default=list(RECIPES), help="recipes beside BF16 and its null")
    add("--steps", type=int, default=50, help="steps of each")
    add("--lr", type=float, help="learning rate, constant; the run's at its checkpoint otherwise")
    add("--figure", type=Path, help="write gaps and gradients' directions to this SVG file")
    add("--json", type=Path, help="write all numbers to this file")
    return parser


def _show(flags: Sequence[str]) -> int:
    config = parse(flags).config
    check(config)
    weights: Counter[str] = Counter()
    declared = Decoder(config.model, config.parallel, config.memory, config.precision).declarations
    add = lambda d: weights.update({d.product: int(np.prod(d.full_shape))}) if d.product else None
    param.tree_map(add, declared)
    columns = ("product", "weights", "recipe", "multiplication", "operand", "format", "kept", "bytes")
    drawn = Table(*columns, title=f"{config.name}: products and formats")
    last = None
    for row in table.rows(resolve(config.precision), weights, config.precision.compute_dtype):
        first = (row.product, f"{row.weights / 1e6:,.1f}M", row.recipe) if row.product != last else ("", "", "")
        kept = "codes" if row.kept and row.recipe != "compute" else "yes" if row.kept else ""
        drawn.add_row(*first, row.multiplication, row.operand, row.format, kept, f"{row.bytes_per_number:.3f}")
        last = row.product
    Console(width=120).print(drawn)
    print(f"float32 always: {', '.join(table.KEPT_HIGH)}")
    print(f"{config.precision.compute_dtype} always: {', '.join(table.WITHOUT_RECIPE)}")
    return 0


def _operands(run: Path) -> int:
    try:
        step, found = operands.newest(run)
    except ValueError as error:
        return fail(error)
    columns = ("product", "operand", "not finite", "saturated", "became zero", "scales")
    drawn = Table(*columns, title=f"{run}, step {step}: the worst of all layers")
    last = None
    for name, operand, one in found:
        scales = "none" if one.scale_low is None else f"2^{one.scale_low} to 2^{one.scale_high}"
        shares = f"{one.not_finite:,.0f}", f"{one.saturated:.2%}", f"{one.vanished:.2%}"
        drawn.add_row(name if name != last else "", operand, *shares, scales)
        last = name
    Console(width=120).print(drawn)
    return 0


def _compare(a: argparse.Namespace) -> int:
    if a.steps < 1:
        raise ConfigError(f"--steps {a.steps} must be at least 1")
    if a.lr is not None and not a.lr > 0:
        raise ConfigError(f"--lr {a.lr} must be above 0")
    for path in filter(None, (a.figure, a.json)):  # known before hours of work, not after
        if not path.parent.is_dir():
            raise ConfigError(f"{path}: there is no folder {path.parent}")
    if not (a.run / "config.json").is_file():
        raise ConfigError(f"{a.run} is no run folder: it has no config.json")
    try:
        distributed.initialise()
        start = comparing.open_run(a.run, a.lr, a.steps)
        found = comparing.compare(start, a.recipes, a.steps)
    except (OSError, ValueError) as error:
        return fail(error)
    base = found[BASE]
    rate = start.config.optimizer.peak_lr
    print(f"{a.steps} steps from step {start.step} at lr {rate:g}; loss in BF16 {base.losses.mean():.4f}")
    print(f"{'':12}{'loss gap from BF16':>26}{'':5}{'gradients against float32':>27}{'':3}experts")
    print(f"{'':12}{'mean':>9}{'last 20':>9}{'sd':>8}{'':5}{'error':>9}{'cosine':>9}{'worst':>9}{'':3}changed")
    for name, one in found.items():
        off = one.losses - base.losses
        error, cosine = np.median(list(one.errors.values())), list(one.cosines.values())
        print(
            f"{name:12}{off.mean():+9.4f}{off[-20:].mean():+9.4f}{off.std():8.4f}{'':5}{error:9.3f}{np.median(cosine):9.4f}"
            f"{min(cosine):9.4f}{one.changed:10.2%}"
        )
    if a.figure:
        a.figure.write_text(gaps.figure(_curves(found), {n: one.cosines for n, one in found.items() if n != NULL}))
        print(f"figure  {a.figure}")
    if a.json:
        values = {name: one._asdict() | dict(losses=one.losses.tolist()) for name, one in found.items()}
        a.json.write_text(json.dumps(values, indent=1) + "\n")
    return 0


def _curves(found: Mapping[str, Compared]) -> dict[str, np.ndarray]:
    return {name: one.losses - found[BASE].losses for name, one in found.items() if name != BASE}


if __name__ == "__main__":
    sys.exit(main())
