"""Several runs on one page: names that tell them apart, numbers of each, and the settings that differ."""

import json
from pathlib import Path

import pytest

from moex.observe.compare import differing, distinct_names
from moex.observe.report import main
from moex.observe.run import read_run


def test_two_runs_on_one_page(write_run, tmp_path, capsys):
    one, two = write_run(tmp_path / "a" / "run"), write_run(tmp_path / "b" / "run", num_steps=40)
    config = json.loads((two / "config.json").read_text())
    config["optim"]["lr"] = 5e-4
    (two / "config.json").write_text(json.dumps(config))
    out = tmp_path / "both.html"
    assert main([str(one), str(two), "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    page = out.read_text()
    assert page.count("<svg") == 6 and "<script" not in page
    assert all(
        name in page for name in ("a/run, finished at step 59", "b/run, finished at step 39", "optim.lr", "0.0005")
    )
    assert differing([read_run(one), read_run(two)]) == [["optim.lr", "0.001", "0.0005"]]


@pytest.mark.parametrize(
    ("paths", "names"), [(("/r/a", "/r/b"), ["a", "b"]), (("/x/r", "/y/r"), ["x/r", "y/r"]), (("/r", "/x/r"), None)]
)
def test_names_are_as_short_as_they_can_be(paths, names):
    found = distinct_names([Path(path) for path in paths])
    assert found == names or (names is None and len(set(found)) == 2)


def test_what_cannot_be_compared_exits_with_2(write_run, tmp_path, capsys):
    run = str(write_run(tmp_path / "run"))
    assert main([run, run]) == 2
    assert "a run is named twice" in capsys.readouterr().err
    assert main([run] * 6) == 2
    assert "6 runs: a page compares 2 to 5" in capsys.readouterr().err
    assert main([run, "--out", "x.html"]) == 2
    assert "has no effect with one run" in capsys.readouterr().err
