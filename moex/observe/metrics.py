"""The log of a run: metrics.jsonl, one line a training step, and events.jsonl, everything else that happened.

One process writes (process 0 of a multi-host run). L MoE layers, E experts.
"""

import difflib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from moex.observe.jsonl import Line, decode, encode, iter_lines, read_jsonl, replace_file
from moex.observe.trackers import Tracker, scalars

__all__ = ["OPTIONAL_FIELDS", "STEP_FIELDS", "TIMED", "RunLog", "check_step", "read_jsonl"]

STEP_FIELDS = {
    "step": "number of the step just done, from 0",
    "loss": "what was minimised, nats a token",
    "lm_loss": "cross entropy alone, nats a token",
    "aux_loss": "load-balance loss",
    "z_loss": "router z-loss",
    "grad_norm": "global norm of the gradient before clipping",
    "lr": "learning rate of this step",
    "valid_tokens": "tokens that counted in the loss",
    "tokens_per_s": "tokens a second, all devices together",
    "model_tflops": "model TFLOP/s a device",
    "mfu": "share of the listed peak, 0 to 1; null where the device has no listed peak",
    "expert_counts": "tokens each expert was given, [L][E]",
    "dropped": "(token, choice) pairs that a capacity dropped",
    "overflow": "rows that found no room in the transport's budget; such a step is not applied",
    "router_not_finite": "tokens, summed over MoE layers, with a router logit that is not finite",
    "skipped": "whether the update was left out",
    "step_s": "seconds the step took",
    "time": "wall clock when the step was done, seconds since the epoch",
}
OPTIONAL_FIELDS = {
    "sequence_loss": "balance loss of each document by itself",
    "global_loss": "balance loss with the choices of the step's earlier micro-batches",
    "mtp_loss": "share of the loss that is of multi-token prediction",
    "max_logits": "largest attention logit of any head before the update, [L]; with QK-clip",
    "need_cell": "rows that the fullest all-to-all cell needed, in units of balanced routing",
    "need_spill": "rows that were over their cells, of one device, in units of balanced routing",
    "need_rows": "rows that the fullest expert buffer needed, in units of balanced routing",
    "need_stash": "rows of the stash that the device with most used, in units of balanced routing",
    "clones": "clones of hot experts, summed over MoE layers and micro-batches; with parallel.echo=report, would-be ones",
    "echo_load": "rows of the busiest rank over the mean with clones, largest of all MoE layers and micro-batches",
    "rung": "which of the rising buffer sizes the step ran with, 0 the smallest",
    "gate_load": "largest sum of an expert's weights over the layer's mean, [L]: load by what counts, not by tokens",
    "eval_loss": "cross entropy on the held-out text, nats a token",
    "eval_tokens": "held-out tokens behind eval_loss",
    "eval_loss_ema": "the same of the average of the parameters",
    "eval_s": "seconds that the evaluation after this step took",
    "rows": "rows of the step's batch",
    "data_s": "seconds that the loop waited for this step's batch",
    "sample_ids": "numbers of the rows in the batch, [micro-batches][rows]",
}
TIMED = ("time", "step_s", "data_s", "eval_s", "tokens_per_s", "model_tflops", "mfu")
"""Fields that differ between two runs of the same steps."""
METRICS, PER_STEP = "metrics.jsonl", ("metrics.jsonl", "precision.jsonl")
"""The step's log, and all files of a run that have lines of steps."""


def check_step(record: Mapping[str, object]) -> None:
    """Raises ValueError naming the fields when one is missing or unknown, or when `step` is not a whole number >= 0."""
    problems = [f"missing field '{name}' ({STEP_FIELDS[name]})" for name in STEP_FIELDS if name not in record]
    known = [*STEP_FIELDS, *OPTIONAL_FIELDS]
    for name in record:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            problems.append(f"unknown field '{name}'" + (f" (did you mean '{close[0]}'?)" if close else ""))
    if "step" in record and not _is_step(record["step"]):
        problems.append(f"field 'step' must be a whole number >= 0, not {record['step']!r}")
    if problems:
        raise ValueError("step record: " + "; ".join(problems))


def _is_step(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= 0)


class RunLog:
    """Appends to the two files of a run folder; every line is flushed, so a killed process loses at most the last one.

    Trackers get every step's numbers, too. Opening makes the folder and mends what a killed process left: a torn last
    line of a file of `PER_STEP` moves to events.jsonl as text (kind "superseded_step"); one of events.jsonl becomes an event
    of kind "torn_line".
    """

    def __init__(self, run_dir: str | Path, trackers: Sequence[Tracker] = ()):
        self.trackers = tuple(trackers)
        folder = Path(run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.metrics_path = folder, folder / METRICS
        self.events_path = folder / "events.jsonl"
        _mend_events(self.events_path)
        self._events = self.events_path.open("ab")
        for name in PER_STEP:
            self._move_torn_step(folder / name)
        self._metrics = self.metrics_path.open("ab")

    def step(self, record: Mapping[str, object]) -> None:
        """Writes one step's line. `record` has every field of STEP_FIELDS and any of OPTIONAL_FIELDS, on the host.

        Raises: ValueError naming a missing or unknown field, or when the log is closed; TypeError naming a field
        without a JSON form. Nothing is written then.
        """
        check_step(record)
        _append(self._metrics, encode(record))
        step: Any = record["step"]
        for tracker in self.trackers:
            tracker.step(step, scalars(record))

    def event(self, kind: str, /, **fields: object) -> None:
        """Writes one event with the wall clock as `time`. Raises ValueError for a field the log itself writes."""
        for name in ("kind", "time"):
            if name in fields:
                raise ValueError(f"event '{kind}': field '{name}' is written by the log itself; choose another name")
        _append(self._events, encode({"kind": kind, "time": time.time(), **fields}))

    def resume(self, step: int) -> int:
        """Makes room for a rerun from `step`, the first step to be done again, and returns the number of lines moved.

        Lines of the files of `PER_STEP` with that step or a later one go to events.jsonl as kind "superseded_step" with
        the old line as `record`, and `file` where it isn't metrics.jsonl. They are there before their file is replaced: a
        kill in between repeats but never loses.
        Raises: ValueError for a negative step or, naming file and line, for a broken line or one without a step.
        """
        if not _is_step(step):
            raise ValueError(f"resume: step must be a whole number >= 0, not {step!r}")
        found = {path: _parted(path, step) for path in (self.folder / name for name in PER_STEP) if path.exists()}
        for path, (_, moved) in found.items():
            beside = {} if path == self.metrics_path else dict(file=path.name)
            for line in moved:
                self.event("superseded_step", step=line.record["step"], record=line.record, **beside)
        os.fsync(self._events.fileno())
        self._metrics.close()
        for path, (kept, moved) in found.items():
            if moved:
                replace_file(path, b"".join(line.raw for line in kept))
        self._metrics = self.metrics_path.open("ab")
        return sum(len(moved) for _, moved in found.values())

    def rungs(self) -> list[int]:
        """The buffer size that each step ended on, as far as lines tell."""
        return [line.record["rung"] for line in iter_lines(self.metrics_path) if "rung" in line.record]

    def close(self) -> None:
        """Closes both files and the trackers; a second call does nothing."""
        self._metrics.close()
        self._events.close()
        for tracker in self.trackers:
            tracker.close()
        self.trackers = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _move_torn_step(self, path: Path) -> None:
        whole, torn = _split_torn(path)
        if torn:
            self.event("superseded_step", text=torn.decode("utf-8", "replace"))
            os.fsync(self._events.fileno())
        if whole is not None:
            replace_file(path, whole)


def _parted(path: Path, step: int) -> tuple[list[Line], list[Line]]:
    """The lines of steps before this one, and the others."""
    before, after = [], []
    for line in iter_lines(path):
        if not _is_step(line.record.get("step")):
            raise ValueError(f"{path}, line {line.number}: no step number")
        (after if line.record["step"] >= step else before).append(line)
    return before, after


def _append(file, line: bytes) -> None:
    file.write(line)
    file.flush()


def _split_torn(path: Path) -> tuple[bytes | None, bytes]:
    """(what the file should be, the torn last line); None in the first place when the file may stay as it is."""
    if not path.exists() or not path.stat().st_size:
        return None, b""
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        if file.read() == b"\n":
            return None, b""
    content = path.read_bytes()
    cut = content.rfind(b"\n") + 1
    try:
        decode(content[cut:])
    except ValueError:
        return content[:cut], content[cut:]
    return content + b"\n", b""


def _mend_events(path: Path) -> None:
    whole, torn = _split_torn(path)
    if torn and whole is not None:
        whole += encode({"kind": "torn_line", "time": time.time(), "text": torn.decode("utf-8", "replace")})
    if whole is not None:
        replace_file(path, whole)
