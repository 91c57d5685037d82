"""The report of a run, or of several side by side: one HTML page written from the run folders alone.

`python -m moex.observe.report RUN` writes RUN/report.html, with more folders it writes `--out` (compare.html); exits 2 when
there is nothing to report on.
"""

import argparse
import sys
import time
from pathlib import Path

from moex.observe import page, plots
from moex.observe.compare import write_comparison
from moex.observe.goodput import CATEGORIES, ledger
from moex.observe.health import MAX_LOAD, end_loads, judge
from moex.observe.heatmap import heat_maps, load_by_expert
from moex.observe.jsonl import replace_file
from moex.observe.moe import layers, lost_pairs
from moex.observe.run import Run, read_run
from moex.observe.svg import plot_style
from moex.observe.tiles import key_numbers, state


def write_report(run_dir: str | Path) -> Path:
    """Writes report.html into the run folder, atomically, and returns its path.

    Reads metrics.jsonl, events.jsonl, config.json and env.json there; only the first must exist. Log the "finish" event
    before calling, or the page says that the run stopped.
    Raises: FileNotFoundError when there is no such folder; ValueError when it has no steps or a log line is broken.
    """
    run = read_run(run_dir)
    path = Path(run_dir) / "report.html"
    replace_file(path, render(run).encode("utf-8"))
    return path


def render(run: Run) -> str:
    """The page as text."""
    written = f"written {page.format_time(time.time())} UTC"
    with plot_style(salt="moex"):
        figures = [*_loss_figures(run), *_optimiser_figures(run), *_expert_figures(run)]
    start = {name: value for name, value in run.last_event("start").items() if name not in ("kind", "time")}
    problems = dict(problem.split(" ", 1) for problem in run.problems)
    body = [
        page.header(run.name, state(run), run.finished, written, judge(run)),
        page.tiles(key_numbers(run)),
        f'<div class="figures">{"".join(figures)}</div>',
        page.routing_table(layers(run), lost_pairs(run), MAX_LOAD),
        page.time_ledger(ledger(run), CATEGORIES),
        page.samples(run.events_of("sample")),
        page.fields("Configuration", run.config, f"config.json {problems.get('config.json', 'is empty')}."),
        page.fields("Derived numbers", start, "the run logged no start event."),
        page.events_table(run.events, run.superseded),
        page.fields("Environment", run.env, f"env.json {problems.get('env.json', 'is empty')}."),
    ]
    return page.document(f"{run.name}: {state(run)}", body)


def _loss_figures(run: Run) -> list[str]:
    band = " The band is the range within each bin of steps." if len(run.steps) > plots.MAX_POINTS else ""
    return [
        page.figure(
            "Loss",
            plots.loss(run),
            "Healthy: falls fast, then slowly, without jumps; passes below the unigram entropy (the loss of guessing "
            "tokens by their frequency alone) early; held-out points stay close to the training curve." + band,
            wide=True,
            missing="no step has a finite loss.",
        ),
        page.figure(
            "Parts of the loss",
            plots.loss_parts(run),
            "Healthy: the language-model loss falls; the load-balance loss settles quickly and stays level; the z-loss "
            "stays small and does not grow.",
            wide=True,
            missing="no step has a finite part of the loss.",
        ),
    ]


def _optimiser_figures(run: Run) -> list[str]:
    return [
        page.figure(
            "Learning rate",
            plots.learning_rate(run),
            "Healthy: the schedule that was asked for, warm-up and decay included, without breaks at a resume.",
            missing="no step has a learning rate.",
        ),
        page.figure(
            "Gradient norm",
            plots.grad_norm(run),
            "Before clipping, logarithmic. Healthy: high at first, then level; single spikes are harmless, a steady "
            "rise is not.",
            missing="no step has a finite gradient norm above zero.",
        ),
        page.figure(
            "Throughput",
            plots.tokens_per_s(run),
            "All devices together. Healthy: level after the first step, which compiles; a lasting drop has a cause.",
            missing="no step has a throughput.",
        ),
    ]


def _expert_figures(run: Run) -> list[str]:
    loads = end_loads(run).tolist()
    missing = "no step has expert counts (a dense model has none)."
    _, _, width = load_by_expert(run)
    binned = f" A column is {width} steps." if width > 1 else ""
    return [
        page.figure(
            "Expert load by layer",
            plots.layer_load(run),
            f"Busiest expert over the mean; 1 (dashed) is perfect balance. Healthy: below {MAX_LOAD:g} (dotted) after "
            "warm-up in every layer. By layer at the end:",
            missing=missing,
            extra=page.layer_chips(loads, MAX_LOAD) if loads else "",
        ),
        page.figure(
            "Expert load by expert",
            heat_maps(run),
            "Share of the layer's tokens that each expert gets, relative to a uniform share: red is busy, blue is "
            "starved. Healthy: close to the neutral colour everywhere; a row that stays at the blue end of the scale "
            "is a dead expert, one at the red end takes too much." + binned,
            wide=True,
            missing=missing,
        ),
    ]


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m moex.observe.report", description="Writes the report of runs.")
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run folders, those with metrics.jsonl")
    parser.add_argument("--out", default="", help="the page that compares several; compare.html otherwise")
    parsed = parser.parse_args(arguments)
    try:
        if len(parsed.runs) > 1:
            print(write_comparison(parsed.runs, parsed.out or "compare.html"))
        elif parsed.out:
            raise ValueError(f"--out {parsed.out} has no effect with one run, whose page is RUN/report.html")
        else:
            print(write_report(parsed.runs[0]))
    except (FileNotFoundError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
