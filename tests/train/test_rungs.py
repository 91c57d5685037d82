"""Which buffer sizes there are, and which one a step runs with."""

import dataclasses

import jax
import numpy as np
import pytest

from moex.config import MemoryConfig, ParallelConfig, RunConfig
from moex.train.rungs import WINDOW, Rungs, ladder, usual_of
from tests.train.tiny import ADAMW, packed_rows, place_state, program_of, put, tiny_config


def factors(config):
    return config.parallel.cell_factor, config.parallel.spill_factor, config.parallel.row_factor


def test_sizes_double_and_end_in_the_worst_case():
    parallel = ParallelConfig(ep=2, transport="alltoall", cell_factor=1.0, spill_factor=0.5, row_factor=1.25, rungs=4)
    config = RunConfig(parallel=parallel)
    found = ladder(config)
    assert [factors(c) for c in found] == [(1, 0.5, 1.25), (2, 1, 2.5), (4, 2, 5), (0, 0, 0)]
    same = [dataclasses.replace(c, parallel=parallel) for c in found]
    assert same == [config] * 4


def test_the_worst_case_is_one_size():
    assert ladder(RunConfig()) == (RunConfig(),)


def test_a_stash_grows_with_the_buffers():
    memory = MemoryConfig(stash=("experts",), stash_factor=1.25)
    found = ladder(RunConfig(memory=memory))
    assert [c.memory.stash_factor for c in found] == [1.25, 2.5, 0]
    parallel = ParallelConfig(ep=2, transport="alltoall", cell_factor=1.0, waves=4)
    found = ladder(RunConfig(memory=memory, parallel=parallel))
    assert [c.memory for c in found][-1] == MemoryConfig(), "waves keep no rows"
    assert [c.memory.stash for c in found][:-1] == [("experts",)] * 2
    assert ladder(RunConfig(memory=dataclasses.replace(memory, stash_factor=0.0)))[1:] == ()


def test_clones_may_be_for_retries():
    parallel = ParallelConfig(ep=2, transport="alltoall", row_factor=1.0, echo_slots=1)
    assert [c.parallel.echo for c in ladder(RunConfig(parallel=parallel))] == ["always"] * 3
    parallel = dataclasses.replace(parallel, echo="retry")
    assert [c.parallel.echo for c in ladder(RunConfig(parallel=parallel))] == ["report", "always", "always"]


def test_only_the_step_that_overflowed_is_raised():
    rungs = Rungs(3, 0.05)
    assert [rungs.of(step) for step in range(3)] == [0, 0, 0]
    assert rungs.overflowed(1, 0) == 1
    assert [rungs.of(step) for step in range(3)] == [0, 1, 0]
    assert rungs.overflowed(1, 1) == 2
    assert (rungs.of(1), rungs.of(2)) == (2, 0)
    with pytest.raises(RuntimeError, match="step 1 overflowed the worst-case buffers"):
        rungs.overflowed(1, 2)


@pytest.mark.parametrize("tail, often", [(0.0, 1), (0.02, 2), (0.05, 3), (0.9, 46)])
def test_more_overflows_than_the_tail_raise_the_usual_size(tail, often):
    """Of fifty steps, a share `tail` may overflow; one more, and all steps begin larger."""
    rungs = Rungs(3, tail)
    for i in range(often):
        assert rungs.usual == 0
        rungs.overflowed(i, rungs.of(i))
    assert rungs.usual == 1
    seldom = Rungs(3, tail)
    for step in range(0, 3 * often * WINDOW, WINDOW):
        if seldom.of(step) < seldom.last:
            seldom.overflowed(step, seldom.of(step))
    assert seldom.usual == (0 if tail >= 0.02 else 2), "never above the last"


def test_a_quiet_window_lowers_it_again_and_each_mistake_makes_that_rarer():
    rungs = Rungs(3, 0.0)
    step, until_lower = 0, []
    for _ in range(3):
        rungs.overflowed(step, rungs.of(step))
        assert rungs.usual == 1
        rungs.applied(step, 1)
        first = step
        while rungs.usual:
            step += 1
            rungs.applied(step, rungs.of(step))
        until_lower.append(step - first + 1)
    assert until_lower == [2 * WINDOW, 4 * WINDOW, 8 * WINDOW]


def test_a_run_goes_on_with_the_size_its_last_steps_needed():
    assert usual_of([], 0.05) == 0
    assert usual_of([2] * 100 + [0] * WINDOW, 0.05) == 0
    assert usual_of([0] * 48 + [2, 1], 0.05) == 0
    assert usual_of([0] * 47 + [2, 1, 1], 0.05) == 1
    assert usual_of([0] * 46 + [2] * 4, 0.05) == 2
    assert usual_of([0] * 49 + [1], 0.0) == 1
    assert Rungs(2, 0.05, usual=2).of(7) == 1, "a run with fewer sizes now"


def trained(configs, hot_until, steps):
    """Losses, overflows, dropped pairs and the last state of steps whose routing is forced to expert 1 at first.

    A step that finds no room is run again with the next of the programs, as the training loop does.
    """
    programs, rungs, lines, retries = [program_of(c, 8) for c in configs], Rungs(len(configs), 0.05), [], 0
    state, rows = programs[0].initial_state(), [packed_rows(configs[0], seed=seed) for seed in range(3)]
    for step in range(steps):
        if step in (0, hot_until):
            values = jax.device_get(state)
            bias = np.zeros_like(values.router_bias)
            bias[:, 1] = 10 if step < hot_until else 0
            state = place_state(programs[0], values._replace(router_bias=bias))
        while True:
            rung = rungs.of(step)
            state, metrics = programs[rung].train(state, put(programs[rung], rows[step % 3], step))
            metrics = jax.device_get(metrics)
            if metrics["applied"]:
                break
            rungs.overflowed(step, rung)
            retries += 1
        rungs.applied(step, rung)
        lines.append((float(metrics["loss"]), int(metrics["dropped"]), metrics["expert_counts"].tolist(), rung))
    return lines, retries, jax.device_get(state)


def test_routing_forced_to_one_expert_for_ten_steps_then_freed():
    """Bit by bit the run with worst-case buffers: no token is dropped while one expert gets half of all pairs, nor after."""
    tight = dict(cell_factor=1.0, spill_factor=0.25, row_factor=1.0)
    parallel = ParallelConfig(ep=8, transport="alltoall", **tight)
    adamw = dataclasses.replace(ADAMW, peak_lr=1e-3)
    configs = ladder(tiny_config("mla", parallel=parallel, optimizer=adamw))
    got, retries, state = trained(configs, 10, 15)
    want, none, worst = trained(configs[-1:], 10, 15)
    assert none == 0 < retries
    assert [line[:3] for line in got] == [line[:3] for line in want]
    assert all(dropped == 0 for _, dropped, *_ in got)
    jax.tree.map(np.testing.assert_array_equal, state, worst)
    share = [np.array(counts)[0, 1] / np.sum(counts[0]) for *_, counts, _ in got]
    assert min(share[:10]) == 0.5 > max(share[10:])
    assert {rung for *_, rung in got} - {0}, "some steps needed more room"
