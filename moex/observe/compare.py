"""Several runs side by side on one page: their key numbers, their curves together, and the settings that differ."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moex.observe import page
from moex.observe.goodput import goodput
from moex.observe.health import judge
from moex.observe.jsonl import replace_file
from moex.observe.load import max_over_mean
from moex.observe.run import Run, read_run
from moex.observe.series import bin_steps
from moex.observe.svg import INK, inline, legend, log_axis, new_figure, plot_style
from moex.observe.tiles import key_numbers, state

MAX_RUNS = 5  # colours that can be told apart
_COLOURS = ("blue", "orange", "green", "purple", "red")
_MAX_POINTS = 300


def write_comparison(run_dirs: Sequence[str | Path], out: str | Path) -> Path:
    """Writes the page, atomically, and returns its path.

    Raises: as `read_run`, and ValueError for fewer than 2 or more than MAX_RUNS runs.
    """
    if not 2 <= len(run_dirs) <= MAX_RUNS:
        raise ValueError(f"{len(run_dirs)} runs: a page compares 2 to {MAX_RUNS}")
    names = distinct_names([Path(folder) for folder in run_dirs])
    path = Path(out)
    replace_file(path, render([read_run(folder) for folder in run_dirs], names).encode("utf-8"))
    return path


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths by which all differ."""
    parts = [folder.resolve().parts for folder in folders]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    raise ValueError("a run is named twice")


def render(runs: Sequence[Run], names: Sequence[str]) -> str:
    """The page as text."""
    written = f"written {page.format_time(time.time())} UTC"
    with plot_style(salt="moex"):
        figures = _figures(runs, names)
    verdicts = [page.verdict_line(judge(run), f"{name}, {state(run)}") for name, run in zip(names, runs, strict=True)]
    body = [
        page.title_line("Runs side by side", written),
        *verdicts,
        page.grid("Key numbers", ["", *names], _key_rows(runs)),
        f'<div class="figures">{"".join(figures)}</div>',
        page.grid("Settings that differ", ["", *names], differing(runs)),
    ]
    return page.document(f"{', '.join(names)}", body)


def _key_rows(runs: Sequence[Run]) -> list[list[str]]:
    by_run = [
        {tile.label: f"{tile.value} ({tile.note})" if tile.note else tile.value for tile in key_numbers(run)}
        for run in runs
    ]
    labels = dict.fromkeys(label for one in by_run for label in one)
    rows = [[label, *(one.get(label, "–") for one in by_run)] for label in labels]
    shares = [goodput(run) for run in runs]
    return [*rows, ["Goodput", *("–" if share is None else f"{share:.1%}" for share in shares)]]


def differing(runs: Sequence[Run]) -> list[list[str]]:
    """[name, value in each run] of the settings that are not the same in all; a missing one is a dash."""
    flat = [dict(page.flatten(run.config or {})) for run in runs]
    names = dict.fromkeys(name for one in flat for name in one)
    rows = [[name, *(one.get(name, "–") for one in flat)] for name in names if name not in ("name", "folder")]
    return [row for row in rows if len(set(row[1:])) > 1]


def _figures(runs: Sequence[Run], names: Sequence[str]) -> list[str]:
    worst = lambda run: _worst_layer(run.counts)
    plots: list[tuple[str, str, Callable[[Run], np.ndarray], bool, bool]] = [
        ("Training loss", "loss", lambda run: run["loss"], False, True),
        ("Held-out loss", "held-out loss", lambda run: run["eval_loss"], False, True),
        (
            "Gradient norm",
            "gradient norm",
            lambda run: np.where(run["grad_norm"] > 0, run["grad_norm"], np.nan),
            True,
            False,
        ),
        ("Learning rate", "learning rate", lambda run: run["lr"], False, False),
        ("Tokens a second", "tokens a second", lambda run: run["tokens_per_s"], False, False),
        ("Worst expert load", "busiest expert / mean, worst layer", worst, False, False),
    ]
    figures = []
    for title, label, values_of, log, wide in plots:
        drawn = _overlay(runs, names, title, label, values_of, log=log, wide=wide)
        figures.append(page.figure(title, drawn, "", wide=wide, missing="no run has it."))
    return figures


def _worst_layer(counts: np.ndarray) -> np.ndarray:
    ratios = max_over_mean(counts)
    return np.fmax.reduce(ratios, axis=-1) if ratios.shape[-1] else np.full(len(ratios), np.nan)


def _overlay(
    runs: Sequence[Run], names: Sequence[str], title: str, label: str, values_of: Callable[[Run], np.ndarray], *,
    log: bool, wide: bool,
) -> str | None:  # fmt: skip
    figure, (ax,) = new_figure(11.2 if wide else 5.5, 3.3 if wide else 2.9)
    drawn = False
    for run, name, colour in zip(runs, names, _COLOURS, strict=False):
        values = values_of(run)
        seen = np.isfinite(values)
        if not seen.any():
            continue
        binned = bin_steps(run.steps[seen], values[seen], _MAX_POINTS)
        marker: dict[str, Any] = dict(marker="o", markersize=3) if len(binned.steps) < 40 else {}
        ax.plot(binned.steps, binned.mean, color=INK[colour], label=name, **marker)
        drawn = True
    if not drawn:
        return None
    if log:
        log_axis(ax)
    ax.set_xlabel("step")
    ax.set_ylabel(label)
    legend(ax)
    return inline(figure, title.lower().replace(" ", "-"), f"{title} of each run by step")
