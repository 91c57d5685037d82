"""The dashboard of a run, from its folder alone: what it says while the run goes on, when it is silent, when it is done."""

import contextlib
import io
import json
import time

import numpy as np
import pytest
from rich.console import Console

from moex.observe.run import read_run
from moex.watch import dashboard, main, sparkline
from tests.observe.conftest import write_run
from tests.odd import changed


def screen(folder, later_s: float = 0.0) -> str:
    run = read_run(folder)
    console = Console(width=100, file=io.StringIO(), color_system=None)
    console.print(dashboard(run, float(run.alive_at[-1]) + later_s))
    return console.file.getvalue()


def test_a_run_under_way_shows_where_it_is_and_whether_it_is_well(tmp_path):
    shown = screen(write_run(tmp_path, num_steps=60, finish=False), later_s=3)
    assert "step 60 of 60" in shown and "last sign 3s ago" in shown and "silent" not in shown
    assert "The loss falls" in shown and "experts balanced" in shown
    lines = {line.split()[1]: line for line in shown.splitlines() if line.startswith("│ ")}
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert f"{last['loss']:.3f}" in lines["loss"] and "█" in lines["loss"] and "▁" in lines["loss"]
    assert {"0", "1"} <= lines.keys()  # a row a MoE layer
    assert "nothing dropped" in shown and "resume" in shown


def test_a_run_without_a_sign_of_life_is_called_silent(tmp_path):
    assert ": silent" in screen(write_run(tmp_path, finish=False), later_s=120)
    assert "silent" not in screen(write_run(tmp_path, finish=True), later_s=120)


def test_what_is_wrong_is_told(tmp_path):
    def dead(record):
        record["expert_counts"] = [[4096, *[0] * 7], [512] * 8]
        record["dropped"] = 2

    shown = screen(write_run(tmp_path, change=dead))
    assert "7 dead experts" in shown and "120 pairs: beyond a capacity" in shown


def test_a_dense_run_has_no_routing(tmp_path):
    shown = screen(write_run(tmp_path, change=lambda record: record.update(expert_counts=[])))
    assert "routing" not in shown and "curves" in shown


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "config.json"])
def test_every_wrong_field_is_refused_or_shown(tmp_path, name):
    """A fifth of all fields and values: a line's field may be of any kind, and any line the one."""
    folder = write_run(tmp_path, num_steps=4)
    lines = (folder / name).read_text().splitlines()
    parsed = [json.loads(line) for line in lines]
    records = parsed[-1:] if name == "metrics.jsonl" else parsed
    broken = [new for _, new in changed(records)][::5]
    assert len(broken) > 20
    for new in broken:
        written = [*parsed[: -len(records)], *new] if isinstance(new, list) else []
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in written))
        with contextlib.suppress(ValueError):
            run = read_run(folder)
            Console(width=100, file=io.StringIO(), color_system=None).print(dashboard(run, 1.8e9))


def test_sparkline():
    assert sparkline(np.arange(8.0), 8) == "▁▂▃▄▅▆▇█"
    assert sparkline(np.arange(800.0), 4) == "▁▃▆█"
    assert sparkline(np.array([1.0, np.nan, 1.0]), 3) == "▁ ▁"
    assert sparkline(np.array([np.nan]), 3) == ""


def test_a_picture_is_the_same_each_time(tmp_path):
    run = write_run(tmp_path / "run")
    for name in ("a.svg", "b.svg"):
        assert main([str(run), "--svg", str(tmp_path / name)]) == 0
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    picture = (tmp_path / "a.svg").read_text()
    assert "busiest" in picture and "url(http" not in picture


def test_following_ends_with_the_run(tmp_path, capsys, monkeypatch):
    """A run that is finished between two looks."""
    run = write_run(tmp_path, finish=False)

    def finish(seconds):
        with (run / "events.jsonl").open("a") as file:
            file.write('{"kind": "finish", "time": 1.8e9}\n')

    monkeypatch.setattr(time, "sleep", finish)
    assert main([str(run)]) == 0
    assert "finished at step 59" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"), [((), "is not a folder"), (("--every", "0"), "every=0.0 must be above 0")]
)
def test_what_cannot_be_shown_exits_with_2(tmp_path, capsys, arguments, message):
    folder = write_run(tmp_path / "run") if arguments else tmp_path / "missing"
    assert main([str(folder), *arguments]) == 2
    assert message in capsys.readouterr().err
