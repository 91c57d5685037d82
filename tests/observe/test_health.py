"""The verdict: each way in which a run can be unwell, and the numbers behind it."""

import numpy as np
import pytest

from moex.observe.health import dead_experts, end_loads, end_window, judge
from moex.observe.load import counts_array, max_over_mean, relative_load, worst_load
from moex.observe.run import Run


def make_run(loss, *, counts=(50, 50), entropy=None, eval_loss=None, broken=()) -> Run:
    loss = np.asarray(loss, float)
    num_steps = len(loss)
    values = {"loss": loss, "lm_loss": loss}
    if eval_loss is not None:
        values["eval_loss"] = np.asarray(eval_loss, float)
    non_finite = np.zeros(num_steps, bool)
    non_finite[list(broken)] = True
    events = [{"kind": "data", "unigram_entropy": entropy}] if entropy is not None else []
    by_step = np.broadcast_to(np.atleast_2d(np.asarray(counts, np.float32)), (num_steps, *np.atleast_2d(counts).shape))
    steps = np.arange(num_steps)
    return Run(name="r", steps=steps, values=values, counts=by_step, non_finite_steps=non_finite, events=events)


FALLING = 1 + 3 * np.exp(-np.arange(200) / 30) + np.tile([0.02, -0.02], 100)


def test_a_healthy_run():
    verdict = judge(make_run(FALLING, counts=[[50, 50], [60, 40]], entropy=2.5))
    assert verdict.level == "good"
    first, last = FALLING[:20].mean(), FALLING[-20:].mean()
    assert verdict.text == (
        f"The loss falls ({first:.2f} to {last:.2f} nats, {2.5 - last:.2f} below the unigram entropy); "
        "experts balanced (max/mean load at most 1.20)."
    )


def test_a_dense_run_says_nothing_about_experts():
    verdict = judge(make_run(FALLING, counts=np.zeros((0, 0))))
    assert verdict.level == "good"
    assert "expert" not in verdict.text


def test_a_loss_that_does_not_fall():
    noise = np.random.default_rng(0).normal(size=200)
    verdict = judge(make_run(5 + 0.1 * noise))
    assert verdict.level == "bad"
    assert verdict.text.startswith("The loss does not fall (4.98 to ")
    assert judge(make_run(FALLING[::-1])).level == "bad"
    assert judge(make_run(np.full(200, 5.0))).level == "bad"


def test_a_loss_that_rises_again():
    verdict = judge(make_run(np.concatenate([FALLING, np.linspace(1, 2, 60)])))
    assert verdict.level == "bad"
    assert "risen again (best 1.0" in verdict.text


def test_a_loss_above_the_unigram_entropy():
    verdict = judge(make_run(FALLING, entropy=0.5))
    assert verdict.level == "unsure"
    assert "not yet below the unigram entropy (0.50)" in verdict.text


def test_non_finite_steps_come_first_and_are_left_out_of_the_trend():
    loss = FALLING.copy()
    loss[[30, 199]] = np.nan
    verdict = judge(make_run(loss, broken=[30, 199]))
    assert verdict.level == "bad"
    assert verdict.text.startswith("2 steps with non-finite numbers (first: step 30); the loss falls (")
    assert "no step has a finite loss" in judge(make_run(np.full(50, np.nan))).text.lower()


@pytest.mark.parametrize("num_steps", [1, 2, 19])
def test_too_few_steps(num_steps):
    verdict = judge(make_run(FALLING[:num_steps]))
    assert verdict.level == "unsure"
    assert verdict.text.startswith(f"Too early to tell: {num_steps} step")


def test_unbalanced_experts():
    one = judge(make_run(FALLING, counts=[[50, 50, 50, 50], [140, 20, 20, 20]]))
    assert one.level == "bad"
    assert one.text.startswith("Experts unbalanced: max/mean load 2.80 (layer 1); ")
    two = judge(make_run(FALLING, counts=[[130, 30, 20, 20], [140, 20, 20, 20]]))
    assert "2.80 (2 layers, worst layer 1)" in two.text


def test_dead_experts_are_named_only_when_they_should_have_had_tokens():
    run = make_run(FALLING, counts=[[40, 40, 40, 0], [30, 30, 30, 30]])
    assert dead_experts(run) == [(0, 3)]
    assert judge(run).text.startswith("1 dead expert (3 of layer 0); ")
    assert dead_experts(make_run(FALLING[:40], counts=[[2, 2, 2, 0]])) == []


def test_held_out_loss_that_rises():
    held_out = np.full(200, np.nan)
    held_out[[40, 80, 120, 160, 199]] = [2.0, 1.5, 1.6, 1.7, 1.8]
    verdict = judge(make_run(FALLING, eval_loss=held_out))
    assert verdict.level == "unsure"
    assert "held-out loss rises since step 80 (1.50 to 1.80 nats)" in verdict.text
    held_out[199] = 1.51
    assert judge(make_run(FALLING, eval_loss=held_out)).level == "good"


def test_the_end_is_a_tenth_and_at_most_100_steps():
    assert [end_window(n) for n in (1, 9, 50, 5000)] == [1, 1, 5, 100]
    run = make_run(FALLING)
    counts = np.array(run.counts)
    counts[:180] = [100, 0]
    changed = Run(name="r", steps=run.steps, values=run.values, counts=counts, non_finite_steps=run.non_finite_steps)
    assert end_loads(changed).tolist() == [1.0]


def test_load_of_layers_with_different_numbers_of_experts():
    counts = counts_array([[3, 1], [2, 2, 2, 6], [0, 0]])
    np.testing.assert_allclose(max_over_mean(counts), [1.5, 2.0, np.nan])
    np.testing.assert_allclose(relative_load(counts)[0], [1.5, 0.5, np.nan, np.nan])
    assert worst_load([[3, 1], [2, 2, 2, 6]]) == 2.0
    assert worst_load([]) is worst_load(None) is worst_load([[0, 0]]) is None
