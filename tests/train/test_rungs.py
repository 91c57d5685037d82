"""Which buffer sizes there are, and which one a step runs with."""

import dataclasses

import pytest

from moex.config import ParallelConfig, RunConfig
from moex.train.rungs import MANY, WINDOW, Rungs, ladder


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


def test_only_the_step_that_overflowed_is_raised():
    rungs = Rungs(3)
    assert [rungs.of(step) for step in range(3)] == [0, 0, 0]
    assert rungs.overflowed(1, 0) == 1
    assert [rungs.of(step) for step in range(3)] == [0, 1, 0]
    assert rungs.overflowed(1, 1) == 2
    assert (rungs.of(1), rungs.of(2)) == (2, 0)
    with pytest.raises(RuntimeError, match="step 1 overflowed the worst-case buffers"):
        rungs.overflowed(1, 2)


def test_many_retries_raise_the_usual_size_and_few_do_not():
    often, seldom = Rungs(3), Rungs(3)
    for i in range(MANY):
        often.overflowed(10 * i, often.of(10 * i))
        seldom.overflowed(WINDOW * i, seldom.of(WINDOW * i))
    assert (often.of(1000), seldom.of(1000)) == (1, 0)
    for i in range(4 * MANY):
        if often.of(1000 + i) < often.last:
            often.overflowed(1000 + i, often.of(1000 + i))
    assert often.of(2000) == 2, "never above the last"
