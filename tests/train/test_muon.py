"""Muon: which numbers are one matrix, its direction by hand, and the same step on every mesh."""

import dataclasses

import jax
import numpy as np
import pytest

from moex.config import OptimizerConfig
from moex.layers import param
from moex.models.decoder import Decoder
from moex.train.muon import matrix_dims
from moex.train.optim import optimizer
from tests.train.folded import Case
from tests.train.tiny import MODELS, Harness, one_step, tiny_config

CONFIG = OptimizerConfig(name="muon", weight_decay=0, clip_norm=0, muon_rms=0.2)


def polynomial(x):
    """Five quintic Newton-Schulz steps of one matrix, in float64."""
    turned = x.shape[0] > x.shape[1]
    x = np.float64(x.T if turned else x)
    x = x / np.linalg.norm(x)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if turned else x


def slices(name, value):
    """Each matrix of a parameter, [in, out], by hand."""
    for layer in value:
        for one in layer if ".experts." in name else [layer]:
            if name.endswith("gate_up"):
                yield from (one[:, 0], one[:, 1])
            elif name.endswith("attention.out"):
                yield one.reshape(-1, one.shape[-1])
            else:
                yield one.reshape(one.shape[0], -1)


@pytest.mark.parametrize("model", ["gqa", "mla"])
def test_each_matrix_is_made_orthogonal_by_itself(model):
    declarations = Decoder(MODELS[model]).declarations
    draw = np.random.default_rng(0)
    shapes = param.abstract(declarations)
    params = jax.tree.map(lambda x: draw.normal(size=x.shape).astype(np.float32), shapes)
    gradients = jax.tree.map(lambda x: draw.normal(size=x.shape).astype(np.float32), shapes)
    tx, adam = optimizer(CONFIG, declarations), optimizer(dataclasses.replace(CONFIG, name="adamw"), declarations)
    updates, _ = jax.jit(tx.update)(gradients, tx.init(params), params)
    others, _ = jax.jit(adam.update)(gradients, adam.init(params), params)
    matrices = []

    def compare(name, d, got, gradient, other):
        if matrix_dims(name, d) is None:
            np.testing.assert_allclose(got, other, rtol=1e-6)
            return
        matrices.append(name)
        for update, one in zip(slices(name, np.asarray(got)), slices(name, gradient), strict=True):
            want = -0.2 * max(one.shape) ** 0.5 * polynomial(one)
            np.testing.assert_allclose(update, want, atol=2e-5 * np.abs(want).max())

    param.named_map(compare, declarations, updates, gradients, others)
    assert not any("norm" in name or name.startswith("ends") for name in matrices)
    assert {"moe_layers.moe.router.weight", "moe_layers.moe.experts.down", "moe_layers.attention.out"} <= set(matrices)


def test_step_equals_one_device():
    """Orthogonalising magnifies rounding where singular values are small: 1e-4 of the largest change."""
    case = Case((2, 2, 2), (1, 4, 2), "alltoall", "gqa", zero=3, accumulation=1)
    optimizer = dataclasses.replace(CONFIG, peak_lr=1.0, warmup_steps=0, schedule="constant")
    config = tiny_config(MODELS["gqa"], parallel=case.parallel, optimizer=optimizer)
    here, there = one_step(config, 8), one_step(Harness.on_one_device(config), 1)

    def compare(path, ours, theirs):
        name = jax.tree_util.keystr(path)
        if "norm" in name or "'ends'" in name:
            return  # AdamW's, whose first step is the sign of a gradient
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * np.abs(theirs).max(), err_msg=name)

    jax.tree_util.tree_map_with_path(compare, here.change, there.change)
    assert int(here.after.step) == 1
