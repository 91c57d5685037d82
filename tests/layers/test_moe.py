"""The MoE block against a float64 loop over tokens and experts, forward and backward; masked tokens; idle experts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from mesh import ALONE, build_mesh, fold, sharded
from mesh.vma import vary, varying
from moex.config import ModelConfig, ParallelConfig, RouterConfig
from moex.layers import param
from moex.layers.experts import expert_mlp
from moex.layers.moe import MoE, Steering
from moex.precision.recipes import Precision
from tests.layers import oracle
from tests.quick import quick_jit

B, S, D, F, E = 2, 8, 16, 12, 8

SOFTMAX = ModelConfig(d_model=D, expert_width=F, router=RouterConfig(num_experts=E, top_k=2))
CONFIGS = {
    "softmax": SOFTMAX,
    "softmax over all": dataclasses.replace(
        SOFTMAX, router=RouterConfig(num_experts=E, top_k=3, renormalize=False)
    ),
    "sigmoid with groups, bias and shared expert": dataclasses.replace(
        SOFTMAX,
        shared_width=20,
        router=RouterConfig(
            num_experts=E, top_k=2, score_function="sigmoid", scaling_factor=2.5, num_groups=4, top_groups=2,
            bias_rate=1e-3,
        ),
    ),
}  # fmt: skip
# What only training does, with float32 oracles elsewhere: here every mesh must do the same.
BASE = CONFIGS["sigmoid with groups, bias and shared expert"]
TRAINING = {
    name: dataclasses.replace(BASE, router=dataclasses.replace(BASE.router, **fields))
    for name, fields in {
        "dropping by probability, jitter": dict(capacity_factor=1.0, jitter=0.05, sequence_coefficient=0.1),
        "dropping by position, padded": dict(capacity_factor=1.25, capacity_policy="position", pad_to_capacity=True),
        "sinkhorn": dict(selection="sinkhorn", num_groups=1, top_groups=1, score_function="softmax", renormalize=False),
        "quantile, square root of softplus": dict(
            selection="quantile", num_groups=1, top_groups=1, score_function="sqrtsoftplus", global_coefficient=0.1
        ),
        "forced skew": dict(forced="skew", num_groups=1, top_groups=1),
    }.items()
}
REAL = np.arange(B * S).reshape(B, S) % 5 != 3


@functools.cache
def given(name):
    """(module, parameters, input, bias or None, cotangent)."""
    config = (CONFIGS | TRAINING)[name]
    values = param.initial_values(param.declarations(MoE(config)), 3, 0.4, 1)
    x, cotangent = jax.random.normal(jax.random.key(8), (2, B, S, D))
    bias = np.linspace(-0.3, 0.3, E).astype(np.float32) if config.router.bias_rate else None
    return config, values, x, bias, cotangent


def weighed(config, parallel, values, x, bias, real, cotangent, folded):
    """sum(output * cotangent), (output, statistics)."""
    y, stats = nnx.merge(nnx.graphdef(MoE(config, parallel)), values)(x, bias, real, folded)
    return (y * cotangent).sum(), (y, stats)


def trained(config, parallel, values, x, bias, segments, index, cotangent, folded):
    """The same in training, with every loss beside the output."""
    steering = Steering(bias, jnp.arange(E, dtype=jnp.int32), jax.random.key(9))
    moe = nnx.merge(nnx.graphdef(MoE(config, parallel)), values)
    y, stats = moe(x, steering, segments, folded, index_BS=index, training=True)
    # A loss of the whole batch, equal on all devices, is counted once by the sum of what each holds.
    losses = (stats.balance_loss + stats.sequence_loss + stats.global_loss + stats.z_loss) / folded.num_devices
    return (y * cotangent).sum() + vary(losses, varying(y)), (y, stats)


@functools.partial(quick_jit, static_argnums=0)
def alone(config, values, x, bias, real, cotangent):
    loss = lambda values, x: weighed(config, ParallelConfig(), values, x, bias, real, cotangent, ALONE)
    (_, (y, stats)), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(values, x)
    return y, stats, grads


@functools.cache
def loop(name):
    """Output and gradients of the float64 loop."""
    config, values, x, bias, cotangent = given(name)
    with jax.enable_x64(True):
        wide = lambda tree: jax.tree.map(lambda a: jnp.asarray(np.asarray(a), jnp.float64), tree)
        values, flat = wide(values), wide(x).reshape(-1, D)
        function = lambda values, x: oracle.moe(values, x, bias, REAL.reshape(-1), config)
        y, pull = jax.vjp(function, values, flat)
        grads = pull(wide(cotangent).reshape(-1, D))
        return jax.device_get((y.reshape(B, S, D), (grads[0], grads[1].reshape(B, S, D))))


def assert_close(got, want, tolerance=3e-6):
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * np.abs(want).max())


@pytest.mark.parametrize("name", CONFIGS)
def test_output_and_gradients_equal_the_loop(name):
    config, values, x, bias, cotangent = given(name)
    y, stats, grads = alone(config, values, x, bias, REAL, cotangent)
    want_y, want_grads = loop(name)
    assert_close(y, want_y)
    jax.tree.map(assert_close, grads, want_grads)
    assert int(stats.counts_E.sum()) == REAL.sum() * config.router.top_k
    assert int(stats.overflow) == 0


def test_masked_tokens_go_nowhere_and_learn_nothing():
    config, values, x, _, cotangent = given("softmax")
    y, stats, (weights, dx) = alone(config, values, x, None, REAL, cotangent)
    np.testing.assert_array_equal(np.asarray(y)[~REAL], 0)
    np.testing.assert_array_equal(np.asarray(dx)[~REAL], 0)
    other = jnp.where(REAL[..., None], x, 100.0)
    again_y, again_stats, (again_weights, _) = alone(config, values, other, None, REAL, cotangent)
    np.testing.assert_array_equal(np.asarray(y)[REAL], np.asarray(again_y)[REAL])
    jax.tree.map(np.testing.assert_array_equal, (stats, weights), (again_stats, again_weights))


def test_all_tokens_masked():
    config, values, x, _, cotangent = given("softmax")
    y, stats, grads = alone(config, values, x, None, np.zeros_like(REAL), cotangent)
    for leaf in jax.tree.leaves((y, stats, grads)):
        np.testing.assert_array_equal(leaf, np.zeros(leaf.shape))


def test_an_expert_without_tokens_gets_exactly_no_gradient():
    name = "sigmoid with groups, bias and shared expert"
    config, values, x, bias, cotangent = given(name)
    y, stats, (weights, _) = alone(config, values, x, np.where(np.arange(E) == 5, -9, bias), REAL, cotangent)
    assert int(stats.counts_E[5]) == 0
    assert np.isfinite(y).all()
    for leaf in jax.tree.leaves(weights["experts"]):
        np.testing.assert_array_equal(leaf[5], 0)
        assert all(np.abs(leaf[e]).max() > 0 for e in range(E) if stats.counts_E[e])
    np.testing.assert_array_equal(np.asarray(weights["router"]["weight"])[:, 5], 0)


def test_counts_and_losses_are_of_real_tokens():
    config, values, x, _, cotangent = given("softmax")
    _, stats, _ = alone(config, values, x, None, REAL, cotangent)
    logits = np.asarray(x, np.float64)[REAL] @ np.asarray(values["router"]["weight"], np.float64)
    picked = np.argsort(-logits, axis=-1)[:, :2]
    np.testing.assert_array_equal(stats.counts_E, np.bincount(picked.reshape(-1), minlength=E))
    chosen = np.exp(np.take_along_axis(logits, picked, axis=-1))
    weights = chosen / chosen.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(stats.gates_E, np.bincount(picked.reshape(-1), weights.reshape(-1), E), rtol=1e-5)
    p = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    share = np.bincount(picked.reshape(-1), minlength=E) / picked.size
    np.testing.assert_allclose(stats.balance_loss, E * (share * p.mean(axis=0)).sum(), rtol=1e-6)
    np.testing.assert_allclose(stats.z_loss, (np.log(np.exp(logits).sum(axis=-1)) ** 2).mean(), rtol=1e-5)


SPLITS = {
    "local": (dict(dp=2, cp=2, tp=2), dict(edp=8), dict(transport="local")),
    "local etp2": (dict(dp=2, cp=2, tp=2), dict(edp=4, etp=2), dict(transport="local")),
    "alltoall ep8": (dict(dp=2, cp=2, tp=2), dict(ep=8), dict(transport="alltoall")),
    "alltoall ep2 etp2": (dict(dp=2, tp=4), dict(edp=2, ep=2, etp=2), dict(transport="alltoall")),
    "allgather ep4": (dict(dp=2, cp=2, tp=2), dict(edp=2, ep=4), dict(transport="allgather")),
}
CLONES = dict(echo_slots=1, echo_cap=1.0)
SPLITS |= {
    "clones, alltoall ep8": (dict(dp=2, cp=2, tp=2), dict(ep=8), dict(transport="alltoall", **CLONES)),
    "clones, allgather ep2 etp2": (dict(dp=2, tp=4), dict(edp=2, ep=2, etp=2), dict(transport="allgather", **CLONES)),
    "clones, alltoall ep4, spill": (
        dict(dp=2, cp=2, tp=2), dict(edp=2, ep=4),
        dict(transport="alltoall", cell_factor=1.0, spill_factor=4.0, echo_slots=2, echo_cap=1.0),
    ),
}  # fmt: skip


def on_split(split, config, loss, arrays, devices):
    """Output, statistics and gradients of `loss(parallel, values, x, *arrays, folded)` on eight devices."""
    dense, expert, settings = SPLITS[split]
    folded, parallel = fold(dense, expert), ParallelConfig(**settings)
    declared = param.declarations(MoE(config, parallel))
    places = param.placements(declared, folded)
    specs = jax.tree.map(lambda p: p.spec, places)
    parts = P(folded.dense.dp, folded.dense.sequence)

    def local(shards, x, *rest):
        def whole(shards, x):
            return loss(parallel, param.enter(declared, places, shards, jnp.float32, Precision()), x, *rest, folded)

        (_, (y, stats)), grads = jax.value_and_grad(whole, argnums=(0, 1), has_aux=True)(shards, x)
        return y, stats, grads

    in_specs, out_specs = (specs, *[parts] * (len(arrays) - 1)), (parts, P(), (specs, parts))
    return quick_jit(sharded(local, build_mesh(folded, devices), in_specs, out_specs))(*arrays)


@pytest.mark.parametrize("split", SPLITS)
def test_every_split_of_tokens_and_experts_gives_the_same(split, devices):
    """Output, input gradient, every parameter's gradient, statistics: eight devices against one."""
    config, values, x, bias, cotangent = given("sigmoid with groups, bias and shared expert")
    loss = lambda parallel, values, x, real, cotangent, folded: weighed(
        config, parallel, values, x, bias, real, cotangent, folded
    )
    y, stats, grads = on_split(split, config, loss, (values, x, REAL, cotangent), devices)
    want_y, want_stats, want_grads = alone(config, values, x, bias, REAL, cotangent)
    assert_close(y, want_y)
    jax.tree.map(assert_close, grads, want_grads)
    np.testing.assert_array_equal(stats.counts_E, want_stats.counts_E)
    np.testing.assert_allclose(stats.gates_E, want_stats.gates_E, rtol=1e-5)
    np.testing.assert_array_equal(stats.overflow, 0)
    assert (stats.clones > 0) == split.startswith("clones")
    np.testing.assert_allclose(stats.balance_loss, want_stats.balance_loss, rtol=1e-6)
    np.testing.assert_allclose(stats.z_loss, want_stats.z_loss, rtol=1e-6)


def test_clones_change_no_result_and_gradients_by_sums_of_weights_only(devices):
    """Beside the same mesh without clones: every output bit, and gradients within 1e-6 of their largest."""
    config, values, x, bias, cotangent = given("sigmoid with groups, bias and shared expert")
    loss = lambda parallel, values, x, real, cotangent, folded: weighed(
        config, parallel, values, x, bias, real, cotangent, folded
    )
    run = lambda split: on_split(split, config, loss, (values, x, REAL, cotangent), devices)
    (y, stats, grads), (want_y, _, want_grads) = run("clones, alltoall ep8"), run("alltoall ep8")
    assert stats.clones > 0
    np.testing.assert_array_equal(y, want_y)
    jax.tree.map(lambda ours, theirs: assert_close(ours, theirs, 1e-6), grads, want_grads)


SEGMENTS = np.where(REAL, 1 + np.arange(S)[None] // 5, 0).astype(np.int32)
ORDER = np.stack([np.random.default_rng(b).permutation(S) for b in range(B)]).astype(np.int32)


@functools.cache
def trained_alone(name):
    config, values, x, bias, cotangent = given(name)

    @quick_jit
    def run(values, x):
        loss = lambda values, x: trained(config, ParallelConfig(), values, x, bias, SEGMENTS, ORDER, cotangent, ALONE)
        (_, (y, stats)), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(values, x)
        return y, stats, grads

    return run(values, x)


@pytest.mark.parametrize("split", ["local etp2", "alltoall ep2 etp2", "allgather ep4"])
@pytest.mark.parametrize("name", TRAINING)
def test_what_only_training_does_is_the_same_on_every_split(name, split, devices):
    config, values, x, bias, cotangent = given(name)
    loss = lambda parallel, values, x, segments, index, cotangent, folded: trained(
        config, parallel, values, x, bias, segments, index, cotangent, folded
    )
    y, stats, grads = on_split(split, config, loss, (values, x, SEGMENTS, ORDER, cotangent), devices)
    want_y, want_stats, want_grads = trained_alone(name)
    assert_close(y, want_y)
    jax.tree.map(assert_close, grads, want_grads)
    for field, ours, theirs in zip(stats._fields, stats, want_stats, strict=True):
        if theirs is not None and field not in ("need", "clones", "load"):  # these depend on what a device holds
            np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=1e-7, err_msg=field)
    assert (stats.dropped > 0) == (config.router.capacity_factor > 0)
    assert stats.overflow == 0


def test_losses_and_counts_are_of_choices_whatever_is_dropped():
    config, values, x, bias, cotangent = given("sigmoid with groups, bias and shared expert")
    _, stats, _ = alone(config, values, x, bias, REAL, cotangent)
    _, dropping, _ = trained_alone("dropping by position, padded")
    assert dropping.dropped > 0 == stats.dropped
    np.testing.assert_array_equal(dropping.counts_E, stats.counts_E)
    np.testing.assert_allclose(dropping.balance_loss, stats.balance_loss, rtol=1e-6)


# --- the experts' function ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 3e-6), (jnp.bfloat16, 2e-2)])
def test_experts_by_rows(dtype, tolerance):
    """Sizes with an empty expert and rows past the last one, which come out zero."""
    sizes, rows = np.array([3, 0, 5, 1], np.int32), 12
    key = jax.random.split(jax.random.key(0), 4)
    x, gate_up = jax.random.normal(key[0], (rows, D), dtype), jax.random.normal(key[1], (4, D, 2, F), dtype) / 4
    down, weights = jax.random.normal(key[2], (4, F, D), dtype) / 4, jax.random.uniform(key[3], (rows,))
    got = expert_mlp(x, weights, sizes, gate_up.reshape(4, D, 2 * F), down)
    assert got.dtype == dtype
    wide = [np.asarray(a, np.float64) for a in (x, gate_up, down)]
    expert = np.repeat(np.arange(4), sizes)
    want = [float(weights[r]) * oracle.mlp(wide[0][r], wide[1][e], wide[2][e]) for r, e in enumerate(expert)]
    assert_close(np.asarray(got, np.float64)[: len(expert)], np.array(want), tolerance)
    np.testing.assert_array_equal(np.asarray(got, np.float32)[len(expert) :], 0)


def test_no_two_experts_start_equal():
    _, values, *_ = given("softmax")
    for leaf in jax.tree.leaves(values["experts"]):
        assert len({np.asarray(one).tobytes() for one in leaf}) == E
