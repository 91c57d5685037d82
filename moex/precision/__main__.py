"""Recipes of a run, shown and compared: `python -m moex.precision show PRESET` and `compare RUN --recipes fp8_block mxfp8`.

`show` takes what train.py takes and prints each product's formats; `compare` starts every recipe from a run's newest
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
from moex import compare as comparing
from moex.cli import fail, parse
from moex.compare import BASE, NULL, Compared
from moex.layers import param
from moex.models.decoder import Decoder
from moex.observe import gaps
from moex.precision import table
from moex.precision.recipes import RECIPES, resolve
from moex.validate import ConfigError, check


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if given[:1] == ["show"]:
            return _show(given[1:])
        return _compare(_parser().parse_args(given))
    except ConfigError as error:
        return fail(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m moex.precision", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, dest="command")
    commands.add_parser("show", help="formats of every product; takes a preset and flags as train.py does")
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
    return 0


def _compare(a: argparse.Namespace) -> int:
    if a.steps < 1:
        raise ConfigError(f"--steps {a.steps} must be at least 1")
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
