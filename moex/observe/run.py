"""A run folder as arrays: what the report is made of.

N steps, L MoE layers, E experts.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from moex.observe.jsonl import iter_lines, read_jsonl, read_object
from moex.observe.load import counts_array

_CONTINUES = ("start", "resume", "finish")


@dataclass(frozen=True, kw_only=True)
class Run:
    """`values[name]` is a field of the step records, float64 [N], NaN where null or absent; the rest is as on disk."""

    name: str
    steps: np.ndarray  # int64 [N], increasing
    values: dict[str, np.ndarray]
    counts: np.ndarray  # tokens by expert, float32 [N, L, E], NaN where a step or layer has none
    non_finite_steps: np.ndarray  # bool [N]
    # Heaviest expert's weights over the mean, float32 [N, L], NaN where a step or layer has none.
    gate_loads: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    events: list[dict] = field(default_factory=list)  # without the superseded steps
    superseded: int = 0
    superseded_s: float = 0.0  # seconds of steps that were done again
    alive_at: np.ndarray = field(
        default_factory=lambda: np.zeros(0)
    )  # times at which the run is known to have lived, sorted
    config: dict | None = None
    env: dict | None = None
    problems: list[str] = field(default_factory=list)  # files that are missing or broken, in words

    def __getitem__(self, name: str) -> np.ndarray:
        return self.values.get(name, np.full(len(self.steps), np.nan))

    def events_of(self, kind: str) -> list[dict]:
        """All events of a kind, in order."""
        return [event for event in self.events if event.get("kind") == kind]

    def last_event(self, kind: str) -> dict:
        """The latest event of a kind; empty when there is none."""
        return next((event for event in reversed(self.events) if event.get("kind") == kind), {})

    @property
    def finished(self) -> bool:
        """Whether the last start or resume was followed by a finish."""
        kinds = [event.get("kind") for event in self.events if event.get("kind") in _CONTINUES]
        return bool(kinds) and kinds[-1] == "finish"

    @property
    def unigram_entropy(self) -> float | None:
        """Nats a token, from the data event."""
        return as_number(self.last_event("data").get("unigram_entropy"))


def as_number(value: object) -> float | None:
    """The finite number `value` is, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def read_run(run_dir: str | Path) -> Run:
    """Reads a run folder; of a step logged twice the later line counts.

    Raises: FileNotFoundError when there is no such folder; ValueError when it has no steps or, naming file and line,
    for a broken line that is not a torn last one. A missing or broken config.json or env.json is told in `problems`.
    """
    folder = Path(run_dir)
    if not folder.is_dir():
        raise FileNotFoundError(f"{run_dir} is not a folder; give the run folder, the one with metrics.jsonl")
    metrics = folder / "metrics.jsonl"
    records = _read_steps(metrics) if metrics.exists() else []
    if not records:
        raise ValueError(f"{metrics} {'has no steps' if metrics.exists() else 'is missing'}; nothing to report yet")
    problems: list[str] = []
    config, env = (_read_object(folder / name, problems) for name in ("config.json", "env.json"))
    events = read_jsonl(folder / "events.jsonl") if (folder / "events.jsonl").exists() else []
    kept = [event for event in events if event.get("kind") != "superseded_step"]
    records_of = (event.get("record") for event in events if event.get("kind") == "superseded_step")
    undone = [record for record in records_of if isinstance(record, dict)]
    name = (config or {}).get("name")
    return Run(
        name=name if isinstance(name, str) and name else folder.resolve().name,
        steps=np.array([record["step"] for record in records], np.int64),
        values=_columns(records),
        counts=_stack_counts([record["expert_counts"] for record in records]),
        gate_loads=_stack_rows([record["gate_load"] for record in records]),
        non_finite_steps=np.array([bool(record.get("non_finite")) for record in records]),
        events=kept,
        superseded=len(events) - len(kept),
        superseded_s=sum(as_number(old.get("step_s")) or 0.0 for old in undone),
        alive_at=_times([*records, *kept, *undone]),
        config=config,
        env=env,
        problems=problems,
    )


def _read_steps(path: Path) -> list[dict]:
    """Records by increasing step, counts as arrays at once: as lists they would take several times the memory."""
    by_step = {}
    for line in iter_lines(path):
        record = line.record
        step = record.get("step")
        if not isinstance(step, int) or not 0 <= step < 2**53:
            raise ValueError(f"{path}, line {line.number}: no step number")
        try:
            record["expert_counts"] = counts_array(record.get("expert_counts")).astype(np.float32)
            record["gate_load"] = np.asarray(record.get("gate_load") or [], np.float32).reshape(-1)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {line.number}: no numbers of experts by layer ({error})") from error
        by_step[step] = record
    return [by_step[step] for step in sorted(by_step)]


def _read_object(path: Path, problems: list[str]) -> dict | None:
    if not path.exists():
        problems.append(f"{path.name} is missing")
        return None
    try:
        return read_object(path)
    except ValueError as error:
        problems.append(f"{path.name} is broken ({error})")
        return None


def _times(records: list[dict]) -> np.ndarray:
    return np.sort([time for record in records if (time := as_number(record.get("time"))) is not None])


def _columns(records: list[dict]) -> dict[str, np.ndarray]:
    """Every field that is a number or flag somewhere, as float64 with NaN elsewhere."""

    def number(value: object) -> float:
        return float(value) if isinstance(value, bool | int | float) else math.nan

    arrays = ("expert_counts", "gate_load")
    names = dict.fromkeys(name for record in records for name in record if name not in arrays)
    columns = {name: np.array([number(record.get(name)) for record in records]) for name in names}
    return {name: column for name, column in columns.items() if not np.isnan(column).all()}


def _stack_rows(rows: list[np.ndarray]) -> np.ndarray:
    stacked = np.full((len(rows), max(map(len, rows))), np.nan, np.float32)
    for index, row in enumerate(rows):
        stacked[index, : len(row)] = row
    return stacked


def _stack_counts(rows: list[np.ndarray]) -> np.ndarray:
    shape = tuple(max(row.shape[i] for row in rows) for i in (0, 1))
    stacked = np.full((len(rows), *shape), np.nan, np.float32)
    for index, row in enumerate(rows):
        stacked[index, : row.shape[0], : row.shape[1]] = row
    return stacked
