"""A run's progress: one live display on a terminal, plain lines everywhere else.

Everything shown comes from the step records (moex.observe.metrics); a value that is null is shown as "-", NaN as nan.
"""

import math
import sys
from collections import deque
from collections.abc import Mapping
from numbers import Real
from typing import Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from moex.observe.load import worst_load

_PACE_STEPS = 200  # the ETA looks back over this many steps, evaluations and saves among them included


def format_duration(seconds: float | None) -> str:
    """Seconds as 45s, 1m20s, 2h05m or 3d04h; "-" for None, negative or non-finite values."""
    if seconds is None or not math.isfinite(seconds) or seconds < 0:
        return "-"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def _number(value: object, spec: str) -> str:
    return format(value, spec) if isinstance(value, Real) else "-"


def printable(text: str, encoding: str | None) -> str:
    """Text that cannot steer a terminal (a model may sample escape codes) and that the stream can encode."""
    safe = "".join(c if c in "\n\t" or c.isprintable() else f"\\x{ord(c):02x}" for c in text)
    encoding = encoding or "utf-8"
    return safe.encode(encoding, "backslashreplace").decode(encoding)


class Pace:
    """Seconds still to go, by the wall clock of the records, so that the first step, which compiles, is left out."""

    def __init__(self, total_steps: int):
        self.total_steps = total_steps
        self._seen: deque[tuple[int, float]] = deque(maxlen=_PACE_STEPS)

    def update(self, record: Mapping) -> float | None:
        """Takes in a step record; None when neither the clock nor `step_s` tells how long a step takes."""
        step, now, step_s = record["step"], record.get("time"), record.get("step_s")
        left = self.total_steps - step - 1
        if now is not None:
            self._seen.append((step, now))
        if len(self._seen) > 1:
            (first, began), (last, ended) = self._seen[0], self._seen[-1]
            if last > first and ended > began:
                return left * (ended - began) / (last - first)
        return None if step_s is None else left * step_s


class Progress:
    """Shows a run's steps; a context manager.

    Args: total_steps: steps of the whole run. first_step: the first step of this process (> 0 after a resume).
    stream: where to write, sys.stdout if None: a live display on a terminal, else plain lines without ANSI codes.
    every: off a terminal, steps between lines; the run's last step always has one. unigram_entropy: nats a token of
    guessing by frequency alone; a note is printed when the loss first passes below it. console: a rich Console to
    use instead of `stream`. Raises ValueError when `every` is below 1.
    """

    def __init__(
        self,
        total_steps: int,
        first_step: int = 0,
        *,
        stream: TextIO | None = None,
        every: int = 10,
        unigram_entropy: float | None = None,
        console: Console | None = None,
    ):
        if every < 1:
            raise ValueError(f"every = {every}: lines are printed every so many steps, at least 1")
        self.total_steps = total_steps
        self.every = every
        self.unigram_entropy = unigram_entropy
        self._stream = stream if stream is not None else sys.stdout
        self._held_out: float | None = None
        self._was_above = False
        self._pace = Pace(total_steps)
        self._live: Live | None = None
        if console is None and self._stream.isatty():
            console = Console(file=self._stream)
        if console is not None and console.is_terminal:
            self._make_live(console, first_step)
        elif console is not None:
            self._stream = console.file

    def _make_live(self, console: Console, first_step: int) -> None:
        self._bar = RichProgress(
            TextColumn("step {task.completed:,.0f}/{task.total:,.0f}"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TextColumn("ETA {task.fields[eta]}"),
            console=console,
            expand=True,
            auto_refresh=False,
        )
        self._task = self._bar.add_task("", total=self.total_steps, completed=first_step, eta="-")
        self._numbers = Text("waiting for the first step: it compiles the program", style="dim")
        self._live = Live(get_renderable=lambda: Group(self._bar, self._numbers), console=console)

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live:
            self._live.stop()

    def update(self, record: Mapping) -> None:
        """Shows the step just done. `record` is a step record; only `step` must be there and not null."""
        done = record["step"] + 1
        if record.get("eval_loss") is not None:
            self._held_out = record["eval_loss"]
        eta = format_duration(self._pace.update(record))
        self._note_unigram(record)
        if self._live:
            self._bar.update(self._task, completed=done, eta=eta)
            self._numbers = Text("  ".join(self._fields(record)), overflow="ellipsis", no_wrap=True)
        elif done % self.every == 0 or done == self.total_steps:
            self._print("  ".join([f"step {done}/{self.total_steps}", *self._fields(record), f"ETA {eta}"]))

    def note(self, text: str) -> None:
        """Prints a text above the display, or as plain lines off a terminal; control characters are made visible."""
        if self._live:
            text = printable(text, self._live.console.encoding)
            self._live.console.print(text, markup=False, highlight=False, emoji=False)
        else:
            self._print(printable(text, getattr(self._stream, "encoding", None)))

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def _fields(self, record: Mapping) -> list[str]:
        fields = [
            f"loss {_number(record.get('loss'), '.3f')}",
            f"held-out {_number(self._held_out, '.3f')}",
            f"grad {_number(record.get('grad_norm'), '.2f')}",
            f"lr {_number(record.get('lr'), '.2e')}",
            f"tok/s {_number(record.get('tokens_per_s'), ',.0f')}",
            f"load {_number(worst_load(record.get('expert_counts')), '.2f')}",
        ]
        if record.get("dropped"):
            fields.append(f"dropped {_number(record['dropped'], ',.0f')}")
        return fields + [flag for flag in ("overflow", "skipped") if record.get(flag)]

    def _note_unigram(self, record: Mapping) -> None:
        loss = record.get("lm_loss")
        if self.unigram_entropy is None or loss is None or not math.isfinite(loss):
            return
        if loss >= self.unigram_entropy:
            self._was_above = True
        elif self._was_above:
            self._was_above = False
            entropy, self.unigram_entropy = self.unigram_entropy, None
            self.note(f"step {record['step'] + 1}: loss {loss:.3f} is below the unigram entropy {entropy:.3f}")
