"""The benchmark of all foldings is what it says: its product is whole, and a fault in a step makes it fail."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import invariance
from tests.foldings import FOLDINGS
from tests.train import folded, tiny
from tests.train.test_foldings import CASES


def test_the_product_is_whole():
    """2 transports, 2 ZeRO, 2 recomputes, 3 accumulations on each (folding, model, context) that can run."""
    cases = invariance.product()
    assert len(set(map(str, cases))) == len(cases) == 24 * 41
    assert {(case.dense, case.expert) for case in cases} == set(FOLDINGS)
    assert len(FOLDINGS) == 10
    per_model = {model: {(c.dense, c.expert, c.context) for c in cases if c.model == model} for model in ("gqa", "mla")}
    # Five foldings don't split the sequence; five do, in three ways where heads divide, and in a fourth from cp 4 on.
    assert {model: len(found) for model, found in per_model.items()} == dict(gqa=5 + 5 * 2 + 2 + 2, mla=5 + 5 * 3 + 2)
    for model, found in invariance.MODELS.items():
        assert found.router.bias_rate, f"{model} cannot be skewed"


def test_the_cases_of_ci_are_in_the_product():
    """All that lie on one of its foldings, but for models, transports and ways to recompute that it leaves out."""
    left_out = [
        c
        for c in CASES
        if c.transport == "local" or c.recompute not in ((), ("layer",)) or c.model not in invariance.MODELS
    ]
    among = [c for c in CASES if (c.dense, c.expert) in FOLDINGS and c not in left_out]
    assert len(among) >= 4
    assert {case._replace(skewed=True) for case in among} <= set(invariance.product())


def test_shards_are_the_whole_and_samples_are_the_same_each_time():
    cases = invariance.product()
    parts = [invariance.chosen(cases, shard=(i, 5)) for i in range(1, 6)]
    assert sorted(str(case) for part in parts for case in part) == sorted(map(str, cases))
    assert invariance.chosen(cases, sample=12) == invariance.chosen(cases, sample=12)
    assert all("ring" in str(case) for case in invariance.chosen(cases, only="ring", sample=5))
    with pytest.raises(ValueError, match="shard 3/2"):
        invariance.part_of("3/2")


@pytest.mark.parametrize(
    "spoilt, says",
    [
        (dict(), "0 failed"),
        (dict(change=2e-5), "w']: off by 2.0e-05"),
        (dict(loss=2e-6), "loss: off by 2.0e-06"),
        (dict(counts=1), "expert_counts"),
        (dict(before=1e-7), "1 failed"),
    ],
)
def test_a_step_that_differs_fails(spoilt, says, monkeypatch, capsys):
    def step(config, num_devices, skewed):
        """Of one parameter and no model; on eight devices one number is spoilt."""
        off = spoilt if num_devices == 8 else {}
        before = dict(w=np.array([1 + off.get("before", 0), 2], np.float64))
        after = dict(w=before["w"] + np.array([1 + off.get("change", 0), -1]))
        counts = np.array([[1, 3 + off.get("counts", 0)]])
        metrics = dict.fromkeys(folded.METRICS, np.float64(1)) | dict.fromkeys(folded.COUNTS, 1)
        metrics |= dict(loss=np.float64(1 + off.get("loss", 0)), expert_counts=counts)
        state = lambda params: SimpleNamespace(params=params, router_bias=np.zeros(2))
        return tiny.Step(state(before), state(after), metrics, ())

    monkeypatch.setattr(folded, "one_step", step)
    monkeypatch.setattr(invariance, "start", lambda: None)
    monkeypatch.setattr(sys, "argv", ["invariance.py", "--sample", "1"])
    assert invariance.main() == (1 if spoilt else 0)
    assert says in capsys.readouterr().out
