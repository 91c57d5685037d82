"""Estimates against published speeds: constants chosen on one half of the rows, judged on the other."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from moex.plan.cache import compiled_for
from moex.plan.hlo import Module, parse
from moex.plan.memory import sizes
from moex.plan.plan import estimate
from moex.plan.published import LEFT, ROWS, Row
from moex.plan.rates import DEFAULT, Shares
from moex.plan.target import Target, parse_target
from moex.plan.timeline import replay
from moex.validate import resolve_fold

_FACTORS = (0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.4)


class Case(NamedTuple):
    """A published row with its compiled program."""

    row: Row
    target: Target
    module: Module

    def tflops(self, shares: Shares) -> float:
        """Model TFLOP/s of a GPU by these rates."""
        config = self.row.config()
        fold = resolve_fold(config.parallel, self.target.num_gpus)
        timeline = replay(self.module, self.target, shares, fold=fold, row_share=sizes(config, fold).row_share)
        return estimate(config, self.target, timeline).model_flops_per_s / 1e12


class Outcome(NamedTuple):
    """stated, fitted: TFLOP/s predicted by the stated shares and by those chosen on the rows marked `fit`."""

    row: Row
    stated: float
    fitted: float


def cases(*, tell: Callable[[str], None] = lambda _: None, rows: Sequence[Row] = ROWS) -> list[Case]:
    """Compiles every row, or finds it compiled.  Raises CompileError."""
    found = []
    for row in rows:
        target = parse_target(row.gpus)
        found.append(Case(row, target, parse(compiled_for(row.config(), target, tell=tell).text)))
    return found


def scaled(shares: Shares, compute: float, links: float) -> Shares:
    """Shares of kernels and of links by a factor each, never above what the hardware has."""
    by = lambda factor, *names: {name: min(1.0, factor * getattr(shares, name)) for name in names}
    return dataclasses.replace(shares, **by(compute, "matmul", "kernel", "memory"), **by(links, "nvlink", "network"))


def fit(known: Sequence[Case], shares: Shares = DEFAULT) -> Shares:
    """The two factors, of kernels and of links, that come closest to the rows marked `fit`, by squared log ratios."""
    chosen = [c for c in known if c.row.fold == "fit"]
    miss = lambda s: sum(math.log(c.tflops(s) / c.row.tflops) ** 2 for c in chosen)
    return min((scaled(shares, *pair) for pair in itertools.product(_FACTORS, _FACTORS)), key=miss)


def outcomes(known: Sequence[Case], fitted: Shares) -> list[Outcome]:
    return [Outcome(c.row, c.tflops(DEFAULT), c.tflops(fitted)) for c in known]


def error(predicted: float, row: Row) -> float:
    """Relative, positive where the estimate is too fast."""
    return predicted / row.tflops - 1


def table(found: Sequence[Outcome], fitted: Shares) -> str:
    """Markdown: every row, the median and the worst error of either half, and the rows that are left out."""
    lines = [
        "| run | GPUs | source | published TFLOP/s | stated shares | error | fitted shares | error | rows |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for o in found:
        row = o.row
        cells = row.name, row.gpus, row.source, f"{row.tflops:.1f}", f"{o.stated:.1f}", f"{error(o.stated, row):+.0%}"
        lines.append(f"| {' | '.join(cells)} | {o.fitted:.1f} | {error(o.fitted, row):+.0%} | {row.fold} |")
    lines += ["", *_judged(found), ""]
    values = [f"{n} {value:.2f}" for n, value in dataclasses.asdict(fitted).items() if not n.endswith("_s")]
    lines += [
        f"Fitted shares: {', '.join(values)}.",
        "",
        "Not comparable yet:",
        "",
        "| run | source | missing |",
        "|---|---|---|",
    ]
    lines += [f"| {left.name} | {left.source} | {left.missing} |" for left in LEFT]
    return "\n".join(lines) + "\n"


def _judged(found: Sequence[Outcome]) -> list[str]:
    """Median and worst error of either half, by either shares."""
    lines = []
    for half, name in (("fit", "constants chosen on"), ("judge", "judged on")):
        for kind in ("stated", "fitted"):
            missed = [abs(error(getattr(o, kind), o.row)) for o in found if o.row.fold == half]
            if missed:
                middle = statistics.median(missed)
                lines.append(
                    f"- {name} ({len(missed)} rows), {kind} shares: median error {middle:.0%}, worst {max(missed):.0%}"
                )
    return lines
