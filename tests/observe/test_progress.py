"""Progress off a terminal (plain lines) and on one (rich)."""

import io
import math

import numpy as np
import pytest
from rich.console import Console

from moex.observe.progress import Progress, format_duration


def record(step: int, **changes) -> dict:
    values = {
        "step": step,
        "loss": 2.3451,
        "lm_loss": 2.3,
        "grad_norm": 0.812,
        "lr": 1e-3,
        "tokens_per_s": 12345.4,
        "expert_counts": [[10, 10], [13, 7]],
        "time": 1000.0 + 2.0 * step,
        "step_s": 1.9,
    }
    return values | changes


def shown(records, total=600, **options) -> list[str]:
    stream = io.StringIO()
    with Progress(total, stream=stream, **options) as progress:
        for item in records:
            progress.update(item)
    return stream.getvalue().splitlines()


def test_a_plain_line_has_every_number():
    records = [record(step, eval_loss=2.3009 if step == 99 else None) for step in range(120)]
    lines = shown(records)
    assert len(lines) == 12
    assert lines[-1] == (
        "step 120/600  loss 2.345  held-out 2.301  grad 0.81  lr 1.00e-03  tok/s 12,345  load 1.30  ETA 16m00s"
    )


def test_lines_come_every_so_many_steps_and_for_the_last():
    lines = shown([record(step) for step in range(7)], total=7, every=3)
    assert [line.split("  ")[0] for line in lines] == ["step 3/7", "step 6/7", "step 7/7"]
    assert lines[-1].endswith("ETA 0s")


def test_no_escape_codes_off_a_terminal(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    with Progress(2, stream=stream, every=1) as progress:
        progress.update(record(0))
        progress.note("a sample with \x1b[31mred\x1b[0m and é")
    assert "\x1b" not in stream.getvalue()
    assert "a sample with \\x1b[31mred\\x1b[0m and é\n" in stream.getvalue()


def test_text_that_the_stream_cannot_encode_is_escaped():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    with Progress(2, stream=stream) as progress:
        progress.note("né \udc80")
    assert raw.getvalue() == b"n\\xe9 \\xdc80\n"


def test_null_absent_and_non_finite_values_are_shown():
    empty = dict.fromkeys(record(0)) | {"step": 0}
    assert shown([empty], total=1) == ["step 1/1  loss -  held-out -  grad -  lr -  tok/s -  load -  ETA -"]
    assert shown([{"step": 0}], total=1)[0].startswith("step 1/1  loss -")
    assert "loss nan" in shown([record(0, loss=math.nan)], total=1)[0]
    assert "load -" in shown([record(0, expert_counts=[])], total=1)[0]
    assert "load 2.00" in shown([record(0, expert_counts=np.array([[4, 0]]))], total=1)[0]
    flagged = shown([record(0, dropped=12, overflow=True, skipped=True)], total=1)[0]
    assert "load 1.30  dropped 12  overflow  skipped  ETA" in flagged


def test_the_eta_leaves_out_the_compiling_first_step_and_falls_back_to_step_s():
    records = [record(0, step_s=300.0), record(1, time=1004.0), record(2, time=1008.0)]
    assert shown(records, total=12, every=3)[0].endswith("ETA 36s")
    assert shown([record(0, step_s=3.0)], total=11, every=1)[0].endswith("ETA 30s")


def test_passing_below_the_unigram_entropy_is_noted_once():
    losses = [3.0, 2.4, 2.6, 2.3]
    records = [record(step, lm_loss=loss) for step, loss in enumerate(losses)]
    lines = shown(records, total=4, every=4, unigram_entropy=2.5)
    assert lines[0] == "step 2: loss 2.400 is below the unigram entropy 2.500"
    assert len(lines) == 2
    assert len(shown(records[1:2], unigram_entropy=2.5)) == 0


def test_the_live_display_shows_numbers_and_notes():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=110)
    with Progress(20, first_step=10, console=console) as progress:
        progress.note("resumed [at] 10")
        for step in range(10, 20):
            progress.update(record(step, eval_loss=2.2))
    text = stream.getvalue()
    assert "\x1b" in text
    for part in ("resumed [at] 10", "step 20/20", "100%", "loss 2.345", "held-out 2.200", "load 1.30", "ETA", "12,345"):
        assert part in text


def test_a_terminal_stream_gets_the_live_display():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    with Progress(1, stream=stream) as progress:
        progress.update({"step": 0, "loss": None})
    assert "loss -" in stream.getvalue()


def test_every_must_be_positive():
    with pytest.raises(ValueError, match="every = 0"):
        Progress(1, every=0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.7, "1m00s"), (80, "1m20s"), (7500, "2h05m"), (273600, "3d04h"), (None, "-"), (math.nan, "-")],
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text
