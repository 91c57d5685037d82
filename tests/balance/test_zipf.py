"""What balancing promises on a skewed stream of 64 experts: the numbers that docs/routing.md gives for the figure."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

from docs import balance_figure as figure
from moex.observe.load import max_over_mean

DOCS = Path(figure.__file__).parent
STREAM = figure.Stream()
NONE, BIAS, QUANTILES = "none", "bias, rate 0.001", "quantiles, decay 0.9"


def run(names, steps):
    routers = {name: figure.balancers()[name] for name in names}
    counts = figure.simulate(routers, dataclasses.replace(STREAM, steps=steps))
    return {name: max_over_mean(counts_NE) for name, counts_NE in counts.items()}


def test_bias_balances_within_150_steps_and_stays_there_and_without_balancing_nothing_changes():
    load = run([NONE, BIAS], 210)
    assert load[NONE].min() > 3
    assert load[BIAS][0] > 3
    smoothed_N = figure.smooth(load[BIAS])
    assert smoothed_N[149:].max() < figure.LIMIT
    # The load of even choices at random: what swings about the limit would lie above it.
    assert load[BIAS][160:].mean() < figure.by_chance(STREAM, 64, 4, draws=20) + 0.03


def test_quantiles_balance_within_60_steps_and_stay_there():
    load = run([QUANTILES], 75)[QUANTILES]
    assert load[0] > 3
    assert figure.smooth(load)[59:].max() < figure.LIMIT


@pytest.fixture(scope="module")
def counts():
    """Of all balancers in a few small steps."""
    stream = dataclasses.replace(STREAM, steps=3, num_tokens=256, num_rows=8, num_micros=2)
    return figure.simulate(figure.balancers(), stream)


def test_each_balancer_runs_and_centring_chooses_the_same(counts):
    for counts_NE in counts.values():
        np.testing.assert_array_equal(counts_NE.sum(axis=1), 4 * 256)
    np.testing.assert_array_equal(counts[BIAS], counts[f"{BIAS}, centred"])


def test_judge_smooths_and_asks_for_good():
    load_N = np.concatenate([np.full(30, 2.0), np.full(100, 1.0), np.full(1, 9.0), np.full(100, 1.1)])
    verdict = figure.judge(load_N)
    # A window of 20 holds the step of 9 until step 150 (counted from 1): 1 + 8 / 20 is above the limit.
    assert verdict.since == 151
    assert verdict.worst == pytest.approx(1.1)
    assert (verdict.first, verdict.last, verdict.peak) == (2.0, pytest.approx(1.1), pytest.approx(1.1))
    assert figure.judge(np.full(100, 1.4)).since is None


def test_the_committed_figure_and_the_documented_table_are_of_the_present_settings():
    described = re.search(r"<desc>(.*?)</desc>", (DOCS / "balance.svg").read_text(), re.DOTALL)
    assert described
    settings, *table = described[1].splitlines()
    assert settings == figure.settings(STREAM, figure.balancers()), "run docs/balance_figure.py"
    page = (DOCS / "routing.md").read_text()
    assert [line for line in table if line not in page] == []


def test_the_figure_is_drawn_the_same_twice(counts):
    assert figure.svg(counts, 1.1, "text") == figure.svg(counts, 1.1, "text")
