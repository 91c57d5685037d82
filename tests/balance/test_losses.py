"""Balance losses of samples and of steps: against plain loops, on packed rows, and split over devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mesh import build_mesh, fold, sharded
from moex.balance import balance_loss, plain_counts, scores, sequence_balance_loss
from moex.config import RouterConfig
from tests.quick import quick_jit

FUNCTIONS = ["softmax", "sigmoid", "sqrtsoftplus"]
SIXTEEN = RouterConfig(num_experts=16, top_k=3)
sequence_loss = jax.jit(sequence_balance_loss, static_argnums=2, static_argnames="num_segments")


def test_sqrt_softplus_and_its_slope():
    x = np.concatenate([np.linspace(-60, 60, 241), [-80.0, 200.0]])
    softplus = np.logaddexp(0, x)
    config = RouterConfig(num_experts=len(x), top_k=1, score_function="sqrtsoftplus")
    value, slope = jax.vjp(lambda l: scores(l, config), jnp.asarray(x[None], jnp.float32))
    np.testing.assert_allclose(value[0], np.sqrt(softplus), rtol=1e-6)
    want = 1 / (1 + np.exp(-x)) / (2 * np.sqrt(softplus))
    np.testing.assert_allclose(slope(jnp.ones((1, len(x))))[0][0], want, rtol=2e-6)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("num_experts, top_k", [(8, 2), (32, 8), (12, 5)])
def test_zero_logits_lose_exactly_one(function, num_experts, top_k):
    config, zeros = RouterConfig(num_experts=num_experts, top_k=top_k, score_function=function), (60, num_experts)
    logits, segments = jnp.zeros(zeros), jnp.repeat(jnp.arange(1, 4), 20)
    exact = dict(rtol=0 if num_experts in (8, 32) and function != "sqrtsoftplus" else 1e-6)
    np.testing.assert_allclose(sequence_loss(logits, segments, config, num_segments=4), 1, **exact)
    seen = plain_counts(logits, None, config)
    np.testing.assert_allclose(balance_loss(logits, None, config, counts_E=3 * seen), 1, **exact)


def loop(logits, config):
    """E/k sum_e f_e P_e of one sample, float64, as in the papers."""
    logits = np.asarray(logits, np.float64)
    functions = dict(
        softmax=np.exp,
        sigmoid=lambda x: 1 / (1 + np.exp(-x)),
        sqrtsoftplus=lambda x: np.sqrt(np.logaddexp(0, x)),
    )
    s = functions[config.score_function](logits)
    p = s / s.sum(axis=1, keepdims=True)
    picked = np.argsort(-p, axis=1, kind="stable")[:, : config.top_k]
    f = np.bincount(picked.reshape(-1), minlength=config.num_experts) / len(logits)
    return config.num_experts / config.top_k * (f * p.mean(axis=0)).sum()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_sample_counts_once_whatever_its_length(function):
    """Samples of 20, 12 and 1 tokens, padding between them, in mixed order."""
    config = RouterConfig(num_experts=16, top_k=3, score_function=function)
    logits = jax.random.normal(jax.random.key(0), (48, 16)) * 2
    segments = np.random.default_rng(0).permutation(np.repeat([1, 2, 3, 0], [20, 12, 1, 15])).astype(np.int32)
    want = np.mean([loop(logits[segments == s], config) for s in (1, 2, 3)])
    np.testing.assert_allclose(sequence_loss(logits, segments, config, num_segments=5), want, rtol=1e-5)
    one = lambda x: sequence_loss(x, jnp.ones(len(x), int), config, num_segments=1)
    alone = [one(logits[segments == s]) for s in (1, 2, 3)]
    np.testing.assert_allclose(np.mean(alone), want, rtol=1e-5)
    np.testing.assert_allclose(balance_loss(logits[segments == 1], None, config), alone[0], rtol=1e-6)


def test_without_a_real_token_it_is_zero_and_so_is_its_gradient():
    loss = lambda x: sequence_balance_loss(x, jnp.zeros(8, int), SIXTEEN, num_segments=3)
    value, grad = jax.value_and_grad(loss)(jnp.ones((8, 16)))
    assert value == 0
    np.testing.assert_array_equal(grad, 0)


@functools.cache
def packed():
    """Two rows of 32: samples of 20 and 12 tokens; one of 30 and 2 of padding."""
    logits = jax.random.normal(jax.random.key(1), (2, 32, 16))
    segments = np.array([[1] * 20 + [2] * 12, [1] * 30 + [0] * 2], np.int32)
    return logits, segments


@pytest.mark.parametrize("dense", [dict(tp=2), dict(cp=2), dict(dp=2), dict(dp=2, cp=2, tp=2)], ids=str)
def test_a_split_that_cuts_a_sample_changes_nothing(dense, devices):
    """A cut at 16 goes through the first sample of 20 (tp or cp of 2)."""
    logits, segments = packed()
    num = int(np.prod(list(dense.values())))
    folded = fold(dense, dict(edp=num))
    row, spec = folded.dense.sequence, P(folded.dense.dp, folded.dense.sequence)

    def loss(logits, segments, **axes):
        rows = jnp.arange(segments.shape[0], dtype=jnp.int32)[:, None] * 4
        number = jnp.where(segments > 0, rows + segments, 0).reshape(-1)
        flat = logits.reshape(-1, 16)
        return sequence_balance_loss(flat, number, SIXTEEN, num_segments=segments.shape[0] * 4, **axes)

    local = lambda x, s: jax.value_and_grad(loss)(x, s, axes=row, sample_axes=folded.dense.dp)
    mesh = build_mesh(folded, devices[:num])
    value, grad = quick_jit(sharded(local, mesh, (spec, spec), (P(), spec)))(logits, segments)
    want, want_grad = quick_jit(jax.value_and_grad(loss))(logits, segments)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    np.testing.assert_allclose(grad, want_grad, rtol=1e-5, atol=1e-8)
    rows = [logits[0, :20], logits[0, 20:], logits[1, :30]]
    np.testing.assert_allclose(want, np.mean([loop(row, SIXTEEN) for row in rows]), rtol=1e-5)


def test_counts_of_earlier_micro_batches_enter_the_global_loss():
    """f over both micro-batches, P over the second: by hand."""
    config = RouterConfig(num_experts=4, top_k=1)
    first, second = jnp.array([[9.0, 0, 0, 0]] * 6), jnp.array([[0.0, 9, 0, 0], [0, 0, 9, 0]])
    counts = plain_counts(first, None, config) + plain_counts(second, None, config)
    assert counts.tolist() == [6, 1, 1, 0]
    p = np.asarray(jax.nn.softmax(second, axis=-1)).mean(axis=0)
    want = 4 * (np.array([6, 1, 1, 0]) / 8 * p).sum()
    np.testing.assert_allclose(balance_loss(second, None, config, counts_E=counts), want, rtol=1e-6)


def test_many_choices_are_counted_exactly():
    """Pairs of a step may pass 2^31; its tokens may not lose a bit."""
    config = RouterConfig(num_experts=64, top_k=8)
    logits = jax.random.normal(jax.random.key(2), (64, 64))
    even = jnp.full(64, 50_000_000, jnp.int32)  # 3.2 billion pairs
    p = np.asarray(jax.nn.softmax(logits, axis=-1)).mean(axis=0)
    np.testing.assert_allclose(balance_loss(logits, None, config, counts_E=even), p.sum(), rtol=1e-6)
