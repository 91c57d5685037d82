"""Learning rate by step, decay of matrices only, clipping, frozen and scaled parameters, moments in bfloat16."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from moex.config import OptimizerConfig
from moex.layers import param
from moex.models.decoder import Decoder
from moex.train.muon import matrix_dims
from moex.train.optim import learning_rate, optimizer, rates, without_frozen
from tests.quick import quick_jit


@pytest.mark.parametrize(
    ("step", "rate"),
    [
        (0, 0.0),
        (1, 1e-4),
        (9, 9e-4),
        (10, 1e-3),
        (40, 7.7500e-4),
        (41, 7.6126e-4),
        (55, 5.5e-4),
        (80, 2.0528e-4),
        (100, 1e-4),
    ],
)
def test_cosine_with_warm_up(step, rate):
    config = OptimizerConfig(peak_lr=1e-3, final_lr=1e-4, warmup_steps=10)
    np.testing.assert_allclose(learning_rate(config, 100)(jnp.int32(step)), rate, rtol=2e-5)


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize(("warmup_steps", "step", "rate"), [(0, 0, 1.0), (4, 0, 0.0), (4, 1, 0.25), (4, 4, 1.0)])
def test_warm_up_starts_at_zero_and_no_warm_up_at_the_peak(schedule, warmup_steps, step, rate):
    config = OptimizerConfig(peak_lr=1.0, final_lr=0.1, warmup_steps=warmup_steps, schedule=schedule)
    assert learning_rate(config, 1000)(jnp.int32(step)) == rate


def test_constant_rate_stays():
    rate = learning_rate(OptimizerConfig(peak_lr=0.5, warmup_steps=4, schedule="constant"), 1000)
    assert rate(jnp.int32(5)) == rate(jnp.int32(999)) == 0.5


@pytest.fixture(scope="module", params=["gqa", "mla"])
def model(harness, request):
    declarations = Decoder(harness.MODELS[request.param]).declarations
    return declarations, param.initial_values(declarations, 0, 0.1, 2)


def test_decay_shrinks_matrices_and_leaves_norms(model):
    declarations, params = model
    tx = optimizer(OptimizerConfig(weight_decay=0.1), declarations)
    direction, _ = quick_jit(tx.update)(jax.tree.map(np.zeros_like, params), tx.init(params), params)

    def check(path, value, change):
        after, name = value + np.float32(0.1) * change, jax.tree_util.keystr(path)
        wanted = value if "norm" in name else 0.99 * value
        np.testing.assert_allclose(after, wanted, rtol=2e-7 if "norm" not in name else 0, err_msg=name)

    jax.tree_util.tree_map_with_path(check, params, direction)


def test_decay_list_names_each_matrix_once(model):
    declarations, _ = model
    names = []
    param.named_map(lambda name, d: names.append((name, d.decays)), declarations)
    assert len(names) == len(dict(names))
    assert {name for name, decays in names if not decays} == {name for name, _ in names if "norm" in name}


def test_moments_are_float32_and_clipping_scales_all_by_the_global_norm(model):
    declarations, params = model
    config = OptimizerConfig(name="sgd", weight_decay=0, clip_norm=2.0)
    tx = optimizer(config, declarations)
    ones = jax.tree.map(jnp.ones_like, params)
    root = sum(x.size for x in jax.tree.leaves(params)) ** 0.5
    direction, _ = tx.update(ones, tx.init(params), params)
    jax.tree.map(lambda x: np.testing.assert_allclose(x, -2.0 / root, rtol=1e-5), direction)
    small = jax.tree.map(lambda x: x / root, ones)  # norm 1: not touched
    direction, _ = tx.update(small, tx.init(params), params)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, -b), direction, small)
    adam = optimizer(dataclasses.replace(config, name="adamw"), declarations).init(params)
    assert {x.dtype for x in jax.tree.leaves(adam)} == {jnp.dtype("float32"), jnp.dtype("int32")}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_adds_up_old_directions(model, momentum):
    """Two steps against b = momentum b + g (Sutskever et al. 2013 as PyTorch and optax write it); frozen ones stay."""
    declarations, params = model
    config = OptimizerConfig(name="sgd", weight_decay=0, clip_norm=0, sgd_momentum=momentum, freeze=("ends.embedding",))
    tx = optimizer(config, declarations)
    state, kept = tx.init(params), 0.0
    for g in (0.3, -0.1):
        direction, state = tx.update(jax.tree.map(lambda x, g=g: jnp.full_like(x, g), params), state, params)
        kept = momentum * kept + g
        expected = lambda name, _, kept=kept: 0.0 if name == "ends.embedding" else -kept
        expected = param.named_map(expected, declarations)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), direction, expected)
    frozen = params["ends"]["embedding"].size
    num_kept = sum(x.size for x in jax.tree.leaves(state))
    assert num_kept == (sum(x.size for x in jax.tree.leaves(params)) - frozen if momentum else 0)


def test_adam_is_adam(model):
    """Two steps on scalars against the formulas of arXiv 1711.05101, in float64."""
    declarations, params = model
    config = OptimizerConfig(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, clip_norm=0)
    tx = optimizer(config, declarations)
    gradients = [0.3, -0.1]
    state, value, m, v = tx.init(params), params, 0.0, 0.0
    expected = jax.tree.map(lambda x: x.astype(np.float64), jax.device_get(params))
    for t, g in enumerate(gradients, 1):
        direction, state = tx.update(jax.tree.map(lambda x, g=g: jnp.full_like(x, g), params), state, value)
        value = jax.tree.map(lambda p, d: p + np.float32(0.01) * d, value, direction)
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        change = (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)) ** 0.5 + 1e-8)
        move = lambda d, p, change=change: p - 0.01 * (change + (0.1 * p if d.decays else 0))
        expected = param.tree_map(move, declarations, expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), value, expected)


@pytest.mark.parametrize(
    ("step", "rate"), [(0, 0.0), (5, 0.5), (10, 1.0), (79, 1.0), (80, 1.0), (90, 0.55), (100, 0.1), (150, 0.1)]
)
def test_warm_up_stable_decay(step, rate):
    config = OptimizerConfig(peak_lr=1.0, final_lr=0.1, warmup_steps=10, schedule="wsd", cooldown_steps=20)
    np.testing.assert_allclose(learning_rate(config, 100)(jnp.int32(step)), rate, rtol=1e-6)


def test_a_schedule_can_be_longer_than_the_run():
    config = OptimizerConfig(peak_lr=1e-3, final_lr=1e-4, warmup_steps=10, schedule_steps=100)
    for steps in (42, 100, 1000):
        np.testing.assert_allclose(learning_rate(config, steps)(jnp.int32(41)), 7.6126e-4, rtol=2e-5)
    np.testing.assert_allclose(learning_rate(config, 1000)(jnp.int32(500)), 1e-4, rtol=1e-6)


def leaves_by_name(tree):
    return {".".join(str(k.key) for k in path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_frozen_parameters_have_no_moments_no_decay_and_count_in_no_norm(model, name):
    """All experts frozen: nothing of them moves, and the norm is that of the others."""
    declarations, params = model
    config = OptimizerConfig(name=name, freeze=("*.experts.*",), clip_norm=1.0, weight_decay=0.1)
    ones = jax.tree.map(jnp.ones_like, params)
    gradients = without_frozen(config, declarations, ones)
    trained = sum(x.size for name, x in leaves_by_name(params).items() if ".experts." not in name)
    assert float(optax.tree.norm(gradients)) == pytest.approx(trained**0.5, rel=1e-6)
    tx = optimizer(config, declarations)
    state = tx.init(params)
    moments = sum(x.size for x in jax.tree.leaves(state) if x.ndim)
    matrices = lambda name, d, x: x.size if matrix_dims(name, d) and ".experts." not in name else 0
    by_muon = sum(jax.tree.leaves(param.named_map(matrices, declarations, params))) if name == "muon" else 0
    assert moments == 2 * trained - by_muon  # one average of a gradient in place of two
    direction, _ = tx.update(gradients, state, params)
    for which, change in leaves_by_name(direction).items():
        assert (np.abs(change).max() == 0) == (".experts." in which), which


def test_scaled_rates_multiply_the_change(model):
    declarations, params = model
    plain = OptimizerConfig(weight_decay=0.1)
    scaled = dataclasses.replace(plain, lr_scales=("ends.embedding=0.25", "*.router.*=2", "ends.*=0.5"))
    gradients = jax.tree.map(lambda x: 0.1 * jnp.ones_like(x), params)
    change = lambda config: leaves_by_name(
        (tx := optimizer(config, declarations)).update(gradients, tx.init(params), params)[0]
    )
    ours, theirs = change(scaled), change(plain)
    for name in ours:
        wanted = (
            0.25 if name == "ends.embedding" else 0.5 if name.startswith("ends.") else 2 if ".router." in name else 1
        )
        np.testing.assert_allclose(ours[name], wanted * theirs[name], rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("field", [dict(freeze=("*.expert.*",)), dict(lr_scales=("embedding=1.5",))])
def test_a_pattern_that_matches_nothing_is_refused(model, field):
    with pytest.raises(ValueError, match=r"no parameter matches .*; there are .*ends\.embedding"):
        rates(OptimizerConfig(**field), model[0])


def test_bfloat16_moments_follow_the_float32_ones(model):
    """Both moments are kept in 2 bytes, and 20 steps of random gradients go the same way to within their 8 bits."""
    declarations, params = model
    make = lambda kept: optimizer(OptimizerConfig(moments=kept, clip_norm=0, weight_decay=0), declarations)
    ends = {}
    for kept in ("float32", "bfloat16"):
        tx = make(kept)
        state, draw = tx.init(params), np.random.default_rng(0)
        update = quick_jit(tx.update)
        for _ in range(20):
            gradients = jax.tree.map(lambda x: np.float32(1 + draw.normal(size=x.shape)), params)  # noqa: B023
            direction, state = update(gradients, state, params)
        dtypes = {x.dtype.name for x in jax.tree.leaves(state) if x.ndim}
        assert dtypes == {kept}
        ends[kept] = direction
    worst = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), *ends.values())
    assert 0 < max(jax.tree.leaves(worst)) < 0.05
