"""Gate and up products with their activation against NumPy in float64, and the activation's gradients against autodiff."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul.specs import Spec, pattern
from pallas_kernels.quantize import dequantize
from pallas_kernels.scaled_grouped_matmul import Config
from pallas_kernels.scaled_grouped_matmul.specs import draw
from pallas_kernels.swiglu import GPT_OSS, SWIGLU, Activation, backward, gate_up, implementations
from pallas_kernels.swiglu.specs import arguments
from tests.pallas_kernels.interpreter import interpreted

SPEC = Spec(rows=272, groups=4, inner=384, outer=128)  # 3 steps of the summed dim, more than the ring's 2 slots
SMALL = Config(columns=128, stages=2, num_sms=2)
ACTIVATIONS = pytest.mark.parametrize("activation", [SWIGLU, GPT_OSS], ids=["swiglu", "gpt_oss"])


@functools.cache
def drawn():
    """Arguments whose products are of order one, so that some pass GPT-OSS' limit of 7; and biases."""
    rng = np.random.default_rng(1)
    lhs, lhs_scales, rhs, rhs_scales, _, _ = draw(arguments(SPEC.rows, SPEC.inner, SPEC.outer, SPEC.groups), 0)
    weights = rng.uniform(0, 1, SPEC.rows).astype(np.float32)
    biases = rng.normal(size=(SPEC.groups, 2, SPEC.outer)).astype(np.float32)
    return tuple(map(np.asarray, (lhs, lhs_scales * 1e-4, rhs, rhs_scales * 0.5, weights))), biases


def with_nan(args, used):
    """Codes, scales and weights of the rows past the groups replaced."""
    lhs, lhs_scales, rhs, rhs_scales, weights = args
    dirty = [np.array(x) for x in (lhs, lhs_scales, weights)]
    for x in dirty:
        x[used:] = np.nan
    return dirty[0], dirty[1], rhs, rhs_scales, dirty[2]


def sums(args, sizes, biases):
    """float64 [R, 2, F]: gate and up before the activation; zero past the groups."""
    lhs, lhs_scales, rhs, rhs_scales, _ = (np.asarray(x).astype(np.float64) for x in args)
    lhs = lhs * np.repeat(lhs_scales, 128, axis=1)
    rhs = rhs * np.repeat(np.repeat(rhs_scales, 128, axis=2), 128, axis=3)
    out, start = np.zeros((len(lhs), 2, SPEC.outer)), 0
    for e, size in enumerate(sizes):
        rows = slice(start, start + size)
        out[rows] = np.einsum("rk,gfk->rgf", lhs[rows], rhs[e]) + (0 if biases is None else biases[e])
        start += size
    return out


def by_hand(activation, gate, up):
    """The published formulas, in float64."""
    if activation == SWIGLU:
        return gate / (1 + np.exp(-gate)) * up
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)


def check(found, args, sizes, biases, activation):
    hidden, gate, up = found
    used, want = sizes.sum(), sums(args, sizes, biases)
    as_float = lambda x: np.asarray(x).astype(np.float64)
    for got, index in ((gate, 0), (up, 1)):
        assert np.abs(as_float(got) - want[:, index]).max() <= 4e-3 * np.abs(want).max() + 1e-9
    # From here on the rounded sums are the given ones: a sum on the border of two bfloat16 numbers may go either way.
    value = (
        by_hand(activation, as_float(gate), as_float(up)) * np.where(np.arange(len(gate)) < used, args[4], 0)[:, None]
    )
    largest = np.abs(value).max(axis=1)
    with np.errstate(divide="ignore"):
        scale = np.where(largest > 0, np.exp2(np.ceil(np.log2(largest / 448))), 1.0)
    np.testing.assert_allclose(np.asarray(hidden.scales)[:, 0], scale, rtol=1e-6)
    codes = as_float(hidden.codes)
    exact = value / scale[:, None]
    nearest = as_float(np.asarray(exact, np.float32).astype(hidden.codes.dtype))
    assert (codes == nearest).mean() >= 0.999
    step = np.exp2(np.floor(np.log2(np.maximum(np.abs(exact), 2.0**-6))) - 3)
    assert (np.abs(codes - nearest) <= step * 1.001).all()
    assert not codes[used:].any()
    assert not as_float(gate)[used:].any()


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@ACTIVATIONS
def test_plain_implementations_equal_the_formulas(activation, implementation):
    args, biases = drawn()
    for name in ("uneven", "none", "around_128"):
        sizes = pattern(name, SPEC)
        dirty = with_nan(args, sizes.sum())
        found = gate_up(*dirty, sizes, biases_EgF=biases, activation=activation, implementation=implementation)
        check(found, args, sizes, biases, activation)


@pytest.mark.parametrize("activation, biased", [(SWIGLU, False), (GPT_OSS, True)], ids=["swiglu", "gpt_oss"])
def test_the_kernels_equal_the_formulas(activation, biased):
    """One program for all patterns; rows past the groups hold NaN, in codes, scales and router weights."""
    args, biases = drawn()
    traced = []

    @jax.jit
    def run(*args):
        traced.append(args)
        options = dict(biases_EgF=biases if biased else None, activation=activation, config=SMALL)
        return gate_up(*args, **options, implementation="mosaic")

    with interpreted():
        for name in ("one_row", "uneven", "none"):
            sizes = pattern(name, SPEC)
            check(run(*with_nan(args, sizes.sum()), sizes), args, sizes, biases if biased else None, activation)
    assert len(traced) <= 2  # the interpreter's first call in a process changes JAX's context, hence a second trace


@ACTIVATIONS
def test_gradients_are_those_of_autodiff(activation):
    rng = np.random.default_rng(0)
    gate, up, grad = (jnp.asarray(rng.normal(size=(60, 40)) * 5, jnp.float32) for _ in range(3))
    result, dgate, dup = activation.backward(gate, up, grad)
    want, pull = jax.vjp(activation, gate, up)
    np.testing.assert_allclose(result, want, rtol=1e-6, atol=1e-6)
    assert activation.limit is None or (np.asarray(gate) > activation.limit).any()
    for got, expected in zip((dgate, dup), pull(grad), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("implementation", ["xla", "reference", "mosaic"])
@ACTIVATIONS
def test_quantised_gradients(activation, implementation):
    """Every output is within its format's error of float64; weights past the groups are NaN and tell on nothing."""
    rng, rows, width, used = np.random.default_rng(0), 256, 128, 200
    inside = (np.arange(rows) < used)[:, None]

    def draw():
        """Nothing exactly on a limit: autodiff passes half a gradient there."""
        x = np.asarray(jnp.asarray(np.where(inside, rng.normal(size=(rows, width)) * 3, 0), jnp.bfloat16))
        return jnp.asarray(np.where(np.abs(x.astype(np.float32)) == 7, 6, x.astype(np.float32)), jnp.bfloat16)

    gate, up, grad = draw(), draw(), draw()
    weights = np.where(inside[:, 0], rng.uniform(0.1, 1, rows), np.nan).astype(np.float32)
    with interpreted() if implementation == "mosaic" else contextlib.nullcontext():
        found = backward(
            grad, gate, up, weights, np.array([60, 140], np.int32), activation=activation, implementation=implementation
        )
    real = np.where(inside, weights[:, None], 0)
    value, pull = jax.vjp(activation, gate.astype(jnp.float32), up.astype(jnp.float32))
    dgate, dup = pull(grad.astype(jnp.float32) * real)
    both = np.concatenate([dgate, dup], axis=1)
    for quantised, want in ((found.rows, both), (found.columns, both.T), (found.hidden, (np.asarray(value) * real).T)):
        got = np.asarray(dequantize(quantised))
        blocks = np.abs(want).reshape(len(want), -1, 128).max(axis=2).repeat(128, axis=1)
        assert (np.abs(got - want) <= (2**-4 + 2**-8) * np.abs(want) + 2**-9 * blocks + 1e-12).all()
    dweights = (np.asarray(grad, np.float64) * np.asarray(value, np.float64)).sum(axis=1)
    np.testing.assert_allclose(found.weights_R, dweights, rtol=1e-4, atol=1e-3)


def test_quantised_results_refuse_to_be_differentiated():
    args, _ = drawn()
    sizes = pattern("even", SPEC)
    loss = lambda weights: gate_up(*args[:4], weights, sizes, implementation="xla").hidden.scales.sum()
    with pytest.raises(TypeError, match=r"use swiglu\.backward"):
        jax.grad(loss)(args[4])


def test_what_does_not_fit_is_named():
    args, biases = drawn()
    sizes = pattern("even", SPEC)
    with pytest.raises(ValueError, match=r"rhs \[E, 2, F, K\] with the same K"):
        gate_up(args[0][:, :128], *args[1:], sizes)
    with pytest.raises(ValueError, match=r"biases must be float32 \[4, 2, 128\], got float32 \[4, 256\]"):
        gate_up(*args, sizes, biases_EgF=biases.reshape(4, -1))
    with pytest.raises(ValueError, match="1 x 128 tiles"):
        gate_up(*args, sizes, format="e4m3_128x128")
    with pytest.raises(ValueError, match="multiples of 128, got"):
        backward(*(jnp.zeros((100, 128), jnp.bfloat16),) * 3, jnp.zeros(100), sizes)
    with pytest.raises(ValueError, match="must be positive"):
        Activation(limit=0.0)
    with pytest.raises(NotImplementedError, match="Hopper GPUs"):
        gate_up(*args, sizes, implementation="mosaic")
    assert implementations()["xla"] == ""
