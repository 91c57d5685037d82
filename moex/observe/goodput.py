"""Where a run's time went: steps that count, and all that isn't them, from its log alone.

Seconds. What passes before a process's first line (its start, imports, reading the corpus) is not in the log; between two
launches it counts as idle.
"""

import numpy as np

from moex.observe.run import Run, as_number

CATEGORIES = {
    "steps": "training steps that count",
    "data": "waiting for a batch (a device may have been at work meanwhile)",
    "compile": "compiling",
    "evaluate": "evaluating",
    "save": "starting checkpoints (the writing goes on beside the steps)",
    "lost": "steps done again after a restart",
    "idle": "between the end of one launch and the first line of the next",
    "other": "everything else: start-up, sampling, reading numbers",
}


def ledger(run: Run) -> dict[str, float]:
    """Seconds by category, in the order of `CATEGORIES`; together the time from the log's first line to its last."""
    if len(run.alive_at) < 2:
        return dict.fromkeys(CATEGORIES, 0.0)
    wall = float(run.alive_at[-1] - run.alive_at[0])
    in_steps, waited = float(np.nansum(run["step_s"])), float(np.nansum(run["data_s"]))
    waited = min(waited, in_steps)
    logged = lambda kind: sum(as_number(event.get("seconds")) or 0.0 for event in run.events_of(kind))
    seconds = dict(
        steps=in_steps - waited, data=waited, compile=logged("compile"), evaluate=float(np.nansum(run["eval_s"])),
        save=logged("checkpoint"), lost=run.superseded_s, idle=_idle(run),
    )  # fmt: skip
    return seconds | dict(other=max(0.0, wall - sum(seconds.values())))


def goodput(run: Run) -> float | None:
    """Share of the whole time that went into steps that count, 0 to 1; None before there is any."""
    seconds = ledger(run)
    total = sum(seconds.values())
    return seconds["steps"] / total if total > 0 else None


def _idle(run: Run) -> float:
    """A launch logs its data first; the time since the last sign of life before that is idle."""
    begun = [time for event in run.events_of("data") if (time := as_number(event.get("time"))) is not None]
    gaps = 0.0
    for time in begun[1:]:
        before = run.alive_at[run.alive_at < time]
        gaps += time - float(before[-1]) if len(before) else 0.0
    return gaps
