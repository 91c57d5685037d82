"""One step over pipeline stages is the step of one device: loss, statistics, bias, every parameter's gradient."""

import dataclasses

import jax
import numpy as np
import pytest

from moex.config import ParallelConfig
from tests.pipeline.staged import DEEP, Staged
from tests.train.folded import differences
from tests.train.tiny import one_step

PLAIN = ParallelConfig(pp=2, dp=2, tp=2, ep=4, transport="alltoall")
CASES = dict(
    plain=Staged(PLAIN),
    interleaved=Staged(dataclasses.replace(PLAIN, virtual_pp=2)),
    overlapped=Staged(dataclasses.replace(PLAIN, overlap=True)),
    # Each layer gathers its weights in each tick, a slot of the second stage is empty, random numbers belong to a
    # micro-batch and layer.
    gathering=Staged(ParallelConfig(pp=2, dp=2, tp=2, etp=2, edp=2, zero=3), "three", recompute=("layer",)),
    # A dense layer, two with experts, one that looks further: stages of two and of one, and another on all ranks.
    further=Staged(
        ParallelConfig(
            pp=2, cp=2, tp=2, edp=2, ep=2, transport="allgather", layout="Ett|tmL", overlap=True
        ),
        "further", accumulation=2, recompute=("attention", "experts"),
    ),
    # One stage: a micro-batch's forward pass beside the backward pass of the one before.
    alone=Staged(
        ParallelConfig(dp=4, tp=2, edp=2, ep=2, etp=2, transport="alltoall", zero=3, overlap=True),
        recompute=("qkv", "router", "expert_rows"),
    ),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_step_equals_one_device(name):
    assert not differences(CASES[name], DEEP).problems()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["interleaved", "overlapped"])
def test_virtual_stages_and_overlap_change_no_bit(name):
    plain, other = (one_step(CASES[which].config(), 8) for which in ("plain", name))
    jax.tree.map(np.testing.assert_array_equal, plain.after, other.after)
    jax.tree.map(np.testing.assert_array_equal, plain.metrics, other.metrics)
