"""`python -m moex.balance simulate`: loads of recorded routing on other numbers of ranks."""

import json

import numpy as np
import pytest

from moex.balance.__main__ import draws, main, simulate


@pytest.fixture
def run(tmp_path):
    """Two steps of two layers: even, and one expert with half of all tokens."""
    even, hot = [10] * 8, [70, *[10] * 7]
    lines = [dict(step=n, expert_counts=[even, hot]) for n in range(2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_loads_by_hand(run):
    found = simulate(draws(run, 0), 4, slots=1, hot_per_home=2, cap=1.0)
    np.testing.assert_allclose(found.before, [1, 80 / 35] * 2)
    np.testing.assert_allclose(found.after, [1, 1] * 2)
    assert found.clones.tolist() == [0, 3] * 2


def test_the_table(run, capsys):
    assert main(["simulate", str(run), "--ep", "1", "4", "--cap", "1.0", "--first-step", "1"]) == 0
    text = capsys.readouterr().out
    assert "8 experts, 2 draws" in text
    assert [line.split()[0] for line in text.splitlines()[-2:]] == ["1", "4"]
    assert text.splitlines()[-1].split()[3] == "2.29"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--ep", "3"], "8 experts don't divide by 3 ranks"),
        (["--ep", "0"], "8 experts don't divide by 0 ranks"),
        (["--slots", "0"], "--slots 0"),
        (["--first-step", "9"], "no tokens of experts from step 9 on"),
    ],
)
def test_what_does_not_fit_exits_2_with_a_sentence(run, capsys, arguments, message):
    assert main(["simulate", str(run), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_no_run_folder(tmp_path, capsys):
    assert main(["simulate", str(tmp_path)]) == 2
    assert "is no run folder" in capsys.readouterr().err
