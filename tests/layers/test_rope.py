"""Rotary positions and YaRN against the papers' formulas; norms against float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moex.config import RopeConfig
from moex.layers import param
from moex.layers.norm import RMSNorm, rms_norm
from moex.layers.rope import feature_scale, frequencies, rotate, softmax_scale, yarn_scale

DEEPSEEK = RopeConfig(interleaved=True, factor=40.0, original_context=4096, mscale=1.0, mscale_all_dim=1.0)


@pytest.mark.parametrize("dim, theta", [(64, 1e4), (128, 1e6), (8, 10.0)])
def test_plain_frequencies(dim, theta):
    want = [1 / theta ** (2 * i / dim) for i in range(dim // 2)]
    np.testing.assert_allclose(frequencies(dim, RopeConfig(theta=theta)), want, rtol=1e-7)


def test_yarn_frequencies_of_deepseek_v3():
    """64 rotated features, 4096 stretched 40 times: pairs 0-10 as they were, 23 and up slowed 40 times, a ramp between."""
    got = frequencies(64, DEEPSEEK)
    plain = np.array([1e4 ** (-i / 32) for i in range(32)])
    slowed = np.clip((np.arange(32) - 10) / 13, 0, 1)
    np.testing.assert_allclose(got, plain * (1 - slowed) + plain / 40 * slowed, rtol=1e-6)
    np.testing.assert_allclose(got[:11], plain[:11], rtol=1e-6)
    np.testing.assert_allclose(got[23:], plain[23:] / 40, rtol=1e-6)


@pytest.mark.parametrize(
    "factor, original, fast, slow, dim", [(4.0, 32, 32, 1, 8), (8.0, 8192, 32, 1, 128), (2.0, 64, 8, 2, 16)]
)
def test_yarn_frequencies_by_turns(factor, original, fast, slow, dim):
    """The paper's rule, pair by pair: r = context / wavelength turns decide between old and slowed frequency."""
    config = RopeConfig(factor=factor, original_context=original, beta_fast=fast, beta_slow=slow)
    pair_turning = lambda turns: dim / 2 * math.log(original / (2 * math.pi * turns)) / math.log(1e4)
    low, high = max(math.floor(pair_turning(fast)), 0), min(math.ceil(pair_turning(slow)), dim - 1)
    for i, got in enumerate(frequencies(dim, config)):
        plain = 1e4 ** (-2 * i / dim)
        kept = 1 - min(max((i - low) / max(high - low, 0.001), 0), 1)
        assert got == pytest.approx(plain * kept + plain / factor * (1 - kept), rel=1e-6)


def test_yarn_scales():
    grown = 0.1 * math.log(40) + 1
    assert yarn_scale(40) == pytest.approx(grown)
    assert yarn_scale(1.0) == yarn_scale(0.5) == 1.0
    assert feature_scale(RopeConfig(factor=40.0)) == pytest.approx(grown)
    assert feature_scale(DEEPSEEK) == 1.0  # the two corrections cancel
    unequal = RopeConfig(factor=40.0, mscale=1.0, mscale_all_dim=0.707)
    assert feature_scale(unequal) == pytest.approx(grown / (0.0707 * math.log(40) + 1))
    assert softmax_scale(192, DEEPSEEK) == pytest.approx(192**-0.5 * grown**2)
    assert softmax_scale(128, RopeConfig(factor=40.0)) == softmax_scale(128, RopeConfig()) == pytest.approx(128**-0.5)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_rotation_pair_by_pair(interleaved, factor):
    config = RopeConfig(interleaved=interleaved, factor=factor, original_context=64)
    x = np.random.default_rng(0).normal(size=(2, 5, 3, 8)).astype(np.float32)
    positions = np.array([[0, 1, 2, 3, 4], [7, 0, 1, 300, 2]], np.int32)
    turn, scale = frequencies(8, config).astype(np.float64), feature_scale(config)
    want = np.zeros(x.shape)
    for b, s, n, i in np.ndindex(2, 5, 3, 4):
        a, c = (x[b, s, n, 2 * i], x[b, s, n, 2 * i + 1]) if interleaved else (x[b, s, n, i], x[b, s, n, i + 4])
        cos, sin = math.cos(positions[b, s] * turn[i]), math.sin(positions[b, s] * turn[i])
        want[b, s, n, i], want[b, s, n, i + 4] = (a * cos - c * sin) * scale, (c * cos + a * sin) * scale
    np.testing.assert_allclose(rotate(x, positions, config), want, atol=2e-5)


def test_products_depend_on_the_distance_only():
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 6, 1, 16))
    product = lambda shift: jnp.einsum(
        "bsnh,btnh->bst",
        rotate(q, jnp.arange(6)[None] + shift, DEEPSEEK),
        rotate(k, jnp.arange(6)[None] + shift, DEEPSEEK),
    )
    np.testing.assert_allclose(product(0), product(100), atol=1e-4)


def test_rotation_keeps_the_dtype_and_computes_in_float32():
    x = jax.random.normal(jax.random.key(1), (1, 4, 1, 8))
    positions = jnp.array([[0, 5, 1000, 4095]])
    got = rotate(x.astype(jnp.bfloat16), positions, RopeConfig())
    assert got.dtype == jnp.bfloat16
    want = rotate(x.astype(jnp.bfloat16).astype(jnp.float32), positions, RopeConfig())
    np.testing.assert_array_equal(got, want.astype(jnp.bfloat16))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_rms_norm(dtype, scale):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 5, 32)) * scale, dtype)
    weight = jnp.linspace(0.5, 2, 32)
    wide = np.asarray(x, np.float64)
    want = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + 1e-6) * np.asarray(weight, np.float64)
    got = rms_norm(x, weight, 1e-6)
    assert got.dtype == dtype
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2**-8 if dtype == jnp.bfloat16 else 2e-6)


def test_rms_norm_of_zeros_is_zero_with_a_finite_gradient():
    value, grad = jax.value_and_grad(lambda x: rms_norm(x, jnp.ones(4), 1e-6).sum())(jnp.zeros((2, 4)))
    assert float(value) == 0
    np.testing.assert_allclose(grad, 1e3, rtol=1e-5)


def test_norm_weights_are_float32_ones_without_decay():
    module = RMSNorm(8, 1e-5)
    (declared,) = jax.tree.leaves(param.declarations(module), is_leaf=param.is_declaration)
    assert declared.float32
    assert not declared.decays
    x = jnp.ones((2, 8), jnp.bfloat16)
    np.testing.assert_allclose(np.asarray(param.materialise(module)(x), np.float32), 1.0, rtol=1e-2)
    assert isinstance(param.materialise(module).weight, nnx.Param)
