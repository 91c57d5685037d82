"""A model without experts in a run that folds for them: clipping, saving and the step itself find nothing missing."""

import dataclasses

import jax
import numpy as np

from moex.checkpoint import open_step, save_weights
from moex.config import OptimizerConfig, ParallelConfig
from tests.train.tiny import MODELS, Harness, one_step, tiny_config

DENSE = dataclasses.replace(MODELS["gqa"], num_dense_layers=2, dense_width=32)
CLIPPED = OptimizerConfig(peak_lr=1e-2, warmup_steps=0, schedule="constant", clip_norm=1e-3)


def test_norm_and_step_are_those_of_one_device(tmp_path):
    config = tiny_config(DENSE, parallel=ParallelConfig(dp=8, ep=8, transport="alltoall"), optimizer=CLIPPED)
    here, there = one_step(config, 8), one_step(Harness.on_one_device(config), 1)
    assert here.metrics["expert_counts"].shape == (0, 8)
    np.testing.assert_allclose(here.metrics["grad_norm"], there.metrics["grad_norm"], rtol=1e-5)
    # AdamW's first step is the sign of a gradient: equal but where a gradient is nothing but rounding.
    equal = [
        np.mean(np.isclose(a, b, rtol=1e-3))
        for a, b in zip(*map(jax.tree.leaves, (here.change, there.change)), strict=True)
    ]
    assert min(equal) > 0.99
    save_weights(tmp_path, here.state.params, here.state.router_bias)
    jax.tree.map(np.testing.assert_array_equal, open_step(tmp_path)["params"], here.after.params)
