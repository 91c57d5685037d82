"""The ledger of time: a made-up log whose seconds are known to the last."""

import json

import pytest

from moex.observe.goodput import CATEGORIES, goodput, ledger
from moex.observe.jsonl import encode
from moex.observe.run import read_run

# Two launches: the first dies in step 3 at 20 s, having saved step 2; the second begins at 30 s and does step 2 again.
EVENTS = [
    {"kind": "data", "time": 0.0},
    {"kind": "start", "time": 1.0},
    {"kind": "compile", "time": 6.0, "seconds": 5.0},
    {"kind": "checkpoint", "time": 14.0, "seconds": 0.5},
    {"kind": "data", "time": 30.0},
    {"kind": "superseded_step", "time": 31.0, "step": 2, "record": {"step": 2, "step_s": 4.0, "time": 20.0}},
    {"kind": "resume", "time": 31.0, "step": 2},
    {"kind": "compile", "time": 33.0, "seconds": 2.0},
    {"kind": "finish", "time": 46.0},
]
STEPS = [
    dict(step=0, step_s=3.0, data_s=1.0, time=9.0),
    dict(step=1, step_s=2.0, data_s=0.0, time=11.0, eval_s=2.5),
    dict(step=2, step_s=4.0, data_s=0.5, time=37.0),
    dict(step=3, step_s=4.0, data_s=0.0, time=41.0, eval_s=3.5),
]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(
        b"".join(encode(dict(loss=1.0, expert_counts=[]) | step) for step in STEPS)
    )
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in EVENTS))
    return tmp_path


def test_every_second_has_one_place(folder):
    run = read_run(folder)
    seconds = ledger(run)
    assert list(seconds) == list(CATEGORIES)
    expected = dict(steps=11.5, data=1.5, compile=7.0, evaluate=6.0, save=0.5, lost=4.0, idle=10.0)
    assert seconds == pytest.approx(expected | dict(other=46.0 - sum(expected.values())))
    assert sum(seconds.values()) == pytest.approx(46.0)
    assert goodput(run) == pytest.approx(11.5 / 46)


def test_a_log_without_times_has_no_goodput(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(dict(line, time=None)) + "\n" for line in lines))
    (folder / "events.jsonl").unlink()
    assert goodput(read_run(folder)) is None
