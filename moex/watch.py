"""A run on a terminal, live, from its folder alone: `python -m moex.watch RUN`, on any machine that sees the folder.

N steps, L MoE layers.
"""

import dataclasses
import io
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tyro
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from moex import cli
from moex.observe.goodput import CATEGORIES, goodput, ledger
from moex.observe.health import MAX_LOAD, judge
from moex.observe.moe import CAUSES, layers, lost_pairs
from moex.observe.progress import format_duration
from moex.observe.run import Run, as_number, read_run
from moex.observe.tiles import find_number, key_numbers, state

_BLOCKS = "▁▂▃▄▅▆▇█"
_COLOURS = dict(good="green", unsure="yellow", bad="red")
_MAX_LAYERS, _NUM_EVENTS, _WIDTH = 12, 6, 100
STALLED_FACTOR = 10
"""A run is called silent when its last step is this many median steps old."""


def dashboard(run: Run, now: float, width: int = _WIDTH) -> RenderableType:
    """Everything that the folder tells, as one screen.  now: seconds since the epoch."""
    sides = [_numbers(run), _time(run)]
    return Group(
        _head(run, now),
        Panel(_curves(run, width - 24), title="curves", title_align="left", border_style="dim"),
        Columns(
            [Panel(side, title=title, title_align="left", border_style="dim") for title, side in sides], expand=True
        ),
        *(
            [Panel(_routing(run), title="routing by layer", title_align="left", border_style="dim")]
            if layers(run)
            else []
        ),
        Panel(_events(run), title="events", title_align="left", border_style="dim"),
    )


def _head(run: Run, now: float) -> RenderableType:
    verdict, last = judge(run), int(run.steps[-1]) + 1
    total = int(find_number(run.last_event("start") or run.last_event("resume"), ("total_steps",)) or last)
    seconds = run["step_s"][-50:]
    typical = float(np.nanmedian(seconds)) if np.isfinite(seconds).any() else None
    table = Table.grid(padding=(0, 2))
    age = now - float(run.alive_at[-1]) if len(run.alive_at) else None
    status = Text(state(run) if run.finished else f"step {last:,} of {total:,}", style="bold")
    if not run.finished and typical and age is not None:
        silent = age > max(STALLED_FACTOR * typical, 60)
        status.append(
            f"   last sign {format_duration(age)} ago" + (": silent" if silent else ""), "red" if silent else "dim"
        )
        status.append(f"   about {format_duration((total - last) * typical)} to go", "dim")
    table.add_row(Text(run.name, style="bold cyan"), status)
    whole = Table.grid(expand=True)  # a bar alone ends no line
    for row in (table, ProgressBar(total=total, completed=last)):
        whole.add_row(row)
    whole.add_row(Text("● ", style=_COLOURS[verdict.level]).append(verdict.text, style="default"))
    return whole


def sparkline(values: np.ndarray, width: int) -> str:
    """Means of consecutive stretches as blocks, lowest to highest finite value; spaces where there is none."""
    finite = np.isfinite(values)
    if not finite.any():
        return ""
    parts = np.array_split(np.arange(len(values)), min(width, len(values)))
    means = [values[part][finite[part]].mean() if finite[part].any() else np.nan for part in parts]
    low, high = np.nanmin(means), np.nanmax(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if np.isnan(m) else _BLOCKS[round((m - low) * scale)] for m in means)


def _curves(run: Run, width: int) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    rows = (("loss", "loss", ".3f"), ("held-out", "eval_loss", ".3f"), ("gradient", "grad_norm", ".2f"))
    rows += (("rate", "lr", ".1e"), ("tokens/s", "tokens_per_s", ",.0f"))
    for label, field, form in rows:
        values = run[field]
        values = values[np.isfinite(values)] if field == "eval_loss" else values
        seen = values[np.isfinite(values)]
        if len(seen):
            table.add_row(Text(label, style="dim"), f"{seen[-1]:{form}}", Text(sparkline(values, width), style="blue"))
    return table


def _numbers(run: Run) -> tuple[str, RenderableType]:
    table = Table.grid(padding=(0, 2))
    for tile in key_numbers(run):
        table.add_row(Text(tile.label, style="dim"), Text(tile.value, style="bold"))
    return "numbers", table


def _time(run: Run) -> tuple[str, RenderableType]:
    seconds, share = ledger(run), goodput(run)
    table, total = Table.grid(padding=(0, 2)), max(sum(seconds.values()), 1e-9)
    for name in CATEGORIES:
        if seconds[name] > 0:
            bar = ProgressBar(total=total, completed=seconds[name], width=16)
            table.add_row(Text(name, style="dim"), format_duration(seconds[name]), bar)
    return f"time (goodput {share:.0%})" if share is not None else "time", table


def _routing(run: Run) -> RenderableType:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for name in ("MoE layer", "busiest / mean", "idlest / mean", "entropy", "gate mass", "dead experts"):
        table.add_column(name, justify="right")
    found = sorted(layers(run), key=lambda one: -one.load)
    for one in found[:_MAX_LAYERS]:
        style = "red" if one.load > MAX_LOAD or one.dead else ""
        numbers = (
            f"{one.load:.2f}",
            f"{one.least:.2f}",
            f"{one.entropy:.3f}",
            f"{one.gates:.2f}",
            str(len(one.dead) or "none"),
        )
        table.add_row(str(one.layer), *numbers, style=style)
    rest = len(found) - _MAX_LAYERS
    notes = [f"{number:,} pairs: {CAUSES[name]}" for name, number in lost_pairs(run).items()] or ["nothing dropped"]
    notes += [f"{rest} more layers, all less loaded"] if rest > 0 else []
    return Group(table, Text("; ".join(notes), style="dim"))


def _events(run: Run) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for event in run.events[-_NUM_EVENTS:]:
        at, step = as_number(event.get("time")), as_number(event.get("step"))
        moment = "" if at is None or not 0 <= at < 2**40 else time.strftime("%H:%M:%S", time.gmtime(at))
        table.add_row(Text(moment, style="dim"), str(event.get("kind")), "" if step is None else f"step {step:,}")
    return table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Shows a run live: loss, health, routing, time. Ends with the run, or with Ctrl-C."""

    run: tyro.conf.Positional[Path]
    """The run folder."""
    every: float = 2.0
    """Seconds between looks at the folder."""
    once: bool = False
    """Print one screen and end."""
    svg: str = ""
    """Write one screen as an SVG picture to this file and end."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; exit code 2 with the reason where there is no run to show."""
    args = tyro.cli(Arguments, args=arguments, prog="python -m moex.watch")
    try:
        if args.every <= 0:
            raise ValueError(f"every={args.every} must be above 0")
        run = read_run(args.run)
        if args.svg:
            console = Console(record=True, width=_WIDTH, file=io.StringIO(), force_terminal=True)
            console.print(dashboard(run, _last_sign(run)))
            drawn = console.export_svg(title=f"python -m moex.watch {args.run.name}", unique_id="watch")
            # A picture fetches nothing: without rich's fonts from the network it takes a monospaced one that is there.
            Path(args.svg).write_text(re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL))
        elif args.once:
            Console(width=_WIDTH).print(dashboard(run, time.time()))
        else:
            _follow(args.run, run, args.every)
    except (ValueError, FileNotFoundError) as error:
        return cli.fail(error)
    except KeyboardInterrupt:
        pass
    return 0


def _last_sign(run: Run) -> float:
    return float(run.alive_at[-1]) if len(run.alive_at) else 0.0


def _follow(folder: Path, run: Run, every: float) -> None:
    console = Console()
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            live.update(dashboard(run, time.time(), console.width), refresh=True)
            if run.finished:
                break
            began = time.perf_counter()
            time.sleep(every)
            run = read_run(folder)
            every = max(every, 10 * (time.perf_counter() - began - every))  # a long log takes a while to read
    if console.is_terminal:  # the live screen is gone with the run
        console.print(dashboard(run, time.time(), console.width))


if __name__ == "__main__":
    sys.exit(main())
