"""Quantile balancing, Sinkhorn's iteration, random routing: their contracts, and the same on one device and on several."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mesh import ALONE, build_mesh, fold, sharded
from moex.balance import forced_logits, jitter, quantile_offsets, sinkhorn, token_numbers, update_quantile_bias
from moex.config import RouterConfig
from moex.layers.router import check_router, route

QUANTILE = RouterConfig(num_experts=16, top_k=3, selection="quantile", aux_coefficient=0)
SINKHORN = RouterConfig(num_experts=16, top_k=3, selection="sinkhorn", aux_coefficient=0, renormalize=False)
DENSE = [dict(tp=2), dict(cp=2), dict(dp=2), dict(dp=2, cp=2, tp=2)]


NONE = jnp.zeros(16)


def skewed(shape, seed=0):
    tilt = np.linspace(-2, 2, 16).astype(np.float32)
    return jax.random.normal(jax.random.key(seed), (*shape, 16)) + np.broadcast_to(tilt, (*shape, 16))


def folding(dense):
    num = int(np.prod(list(dense.values())))
    return fold(dense, dict(edp=num)), num


# --- quantiles ------------------------------------------------------------------------------------------------------


def test_each_expert_has_its_share_above_the_threshold():
    """Megatron's contract: with the thresholds off, n k / E tokens of a column lie above the token's next best.

    Where the expert is itself the next best of several tokens, these tie at the threshold.
    """
    logits, bias = skewed((1, 64)), jnp.linspace(0.5, -0.5, 16)
    offsets = quantile_offsets(logits, bias, jnp.ones((1, 64), bool), QUANTILE)
    alpha = np.sort(np.asarray(logits[0]) + np.asarray(bias), axis=-1)[:, -4]
    columns = np.asarray(logits[0]) - alpha[:, None]
    above, reached = (columns > np.asarray(offsets)).sum(axis=0), (columns >= np.asarray(offsets)).sum(axis=0)
    share = 64 * 3 // 16
    assert (above <= share).all()
    assert (reached > share).all()
    assert (above == share).sum() > 12


def test_padding_and_rows_without_tokens_are_left_out():
    logits = skewed((2, 64))
    real = np.zeros((2, 64), bool)
    real[0, 5:37] = True
    got = quantile_offsets(logits, NONE, real, QUANTILE)
    np.testing.assert_array_equal(got, quantile_offsets(logits[:1, 5:37], NONE, real[:1, 5:37], QUANTILE))
    np.testing.assert_array_equal(quantile_offsets(logits, NONE, np.zeros_like(real), QUANTILE), 0)


def test_quantiles_balance_a_skewed_stream():
    """Experts' mean logits differ by up to four deviations; a step has 96 choices an expert."""
    real = jnp.ones((4, 128), bool)

    @jax.jit
    def step(bias, key):
        logits = jax.random.normal(key, (4, 128, 16)) + jnp.linspace(-2, 2, 16)[None, None]
        counts = route(logits.reshape(-1, 16), bias, QUANTILE).counts_E
        offsets = quantile_offsets(logits, bias, real, QUANTILE)
        return update_quantile_bias(bias, offsets, QUANTILE.quantile_decay), counts

    bias, counts = jax.lax.scan(step, jnp.zeros(16), jax.random.split(jax.random.key(4), 60))
    load = lambda counts_E: counts_E.max() / counts_E.mean()
    assert load(counts[0]) > 2.5
    assert load(counts[-20:].sum(axis=0)) < 1.1
    assert abs(float(bias.mean())) < 1e-6


@pytest.mark.parametrize("dense", DENSE, ids=str)
def test_thresholds_do_not_depend_on_how_tokens_are_split(dense, devices):
    folded, num = folding(dense)
    row = folded.dense.sequence
    logits, real = skewed((2, 64)), np.arange(128).reshape(2, 64) % 7 < 5
    local = lambda x, r: quantile_offsets(x, NONE, r, QUANTILE, axes=row, row_axes=folded.dense.dp)
    spec = P(folded.dense.dp, row)
    got = jax.jit(sharded(local, build_mesh(folded, devices[:num]), (spec, spec), P()))(logits, real)
    np.testing.assert_allclose(got, quantile_offsets(logits, NONE, real, QUANTILE), rtol=1e-6, atol=1e-7)


# --- Sinkhorn -------------------------------------------------------------------------------------------------------


def sinkhorn_in_numpy(logits, tolerance=1e-4):
    cost = np.exp(np.asarray(logits, np.float64))
    d1, change = np.ones(cost.shape[1]), np.inf
    while change > tolerance:
        d0 = 1 / cost.shape[0] / (cost @ d1 + 1e-8)
        new = 1 / cost.shape[1] / (cost.T @ d0 + 1e-8)
        d1, change = new, np.abs(new - d1).mean()
    return d1 * cost * d0[:, None]


def test_sinkhorn_against_its_formula():
    logits = skewed((64,), seed=1)
    got = jax.jit(sinkhorn)(logits, jnp.ones(64, bool))
    want = sinkhorn_in_numpy(logits)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-3 * want.max())
    tight = jax.jit(lambda x: sinkhorn(x, jnp.ones(64, bool), tolerance=1e-7))(logits)
    np.testing.assert_allclose(tight.sum(axis=1), 1 / 64, rtol=1e-3)
    np.testing.assert_allclose(tight.sum(axis=0), 1 / 16, rtol=1e-3)
    np.testing.assert_allclose(sinkhorn(logits + 500, jnp.ones(64, bool)), got, rtol=1e-4, atol=1e-6)


def test_a_token_that_is_not_finite_spoils_no_other():
    logits = skewed((64,), seed=3)
    spoilt = logits.at[5].set(jnp.nan)
    got, want = (route(x, None, SINKHORN, training=True).experts_Tk for x in (spoilt, logits))
    assert (np.delete(got, 5, axis=0) == np.delete(want, 5, axis=0)).mean() > 0.9


def test_sinkhorn_selects_in_training_only():
    logits = skewed((512,), seed=2)
    trained = route(logits, None, SINKHORN, training=True)
    evaluated = route(logits, None, SINKHORN)
    load = lambda routing: float(routing.counts_E.max() / routing.counts_E.mean())
    assert load(trained) < 1.3 < 2.5 < load(evaluated)
    plain = jax.nn.softmax(logits, axis=-1)
    np.testing.assert_allclose(trained.weights_Tk, jnp.take_along_axis(plain, trained.experts_Tk, axis=-1), rtol=1e-6)
    one_by_one = jnp.concatenate([route(row[None], None, SINKHORN).experts_Tk for row in logits[:20]])
    np.testing.assert_array_equal(evaluated.experts_Tk[:20], one_by_one)


@pytest.mark.parametrize("dense", DENSE, ids=str)
def test_sinkhorn_does_not_depend_on_how_tokens_are_split(dense, devices):
    folded, num = folding(dense)
    axes = folded.dense.tokens
    logits, real = skewed((64,)), np.arange(64) % 7 < 5
    local = lambda x, r: sinkhorn(x, r, axes=axes)
    got = jax.jit(sharded(local, build_mesh(folded, devices[:num]), (P(axes), P(axes)), P(axes)))(logits, real)
    np.testing.assert_allclose(got, sinkhorn(logits, real), rtol=1e-5, atol=1e-9)
    np.testing.assert_array_equal(np.asarray(got)[~real], 0)


# --- random numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dense", DENSE, ids=str)
def test_a_token_draws_the_same_on_every_mesh(dense, devices):
    folded, num = folding(dense)
    row = folded.dense.sequence
    index = np.random.default_rng(0).permutation(32).astype(np.int32)[None].repeat(4, axis=0)
    config = RouterConfig(num_experts=16, top_k=3, forced="skew")
    x, logits = jnp.ones((4, 32, 8)), skewed((4, 32))

    def draw(x, logits, index, folded=ALONE):
        number = token_numbers(index, folded)
        key = jax.random.key(5)
        noisy = jitter(x.reshape(-1, 8), key, number.reshape(-1), 0.1)
        random = forced_logits(logits.reshape(-1, 16), key, number.reshape(-1), config)
        return number, noisy.reshape(x.shape), random.reshape(logits.shape)

    spec = P(folded.dense.dp, row)
    local = lambda *arrays: draw(*arrays, folded)
    got = jax.jit(sharded(local, build_mesh(folded, devices[:num]), (spec,) * 3, (spec,) * 3))(x, logits, index)
    want = jax.jit(draw)(x, logits, index)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert len(np.unique(want[0])) == want[0].size
    assert 0.9 <= want[1].min() < 0.92 < 1.08 < want[1].max() <= 1.1


def test_forced_balance_and_skew():
    logits, key = skewed((4096,)), jax.random.key(6)
    load = lambda config: float((c := route(logits, None, config, key=key, training=True).counts_E).max() / c.mean())
    assert load(RouterConfig(num_experts=16, top_k=2, forced="balance")) < 1.15
    assert load(RouterConfig(num_experts=16, top_k=2, forced="skew", forced_skew=2.0)) > 3
    config = RouterConfig(num_experts=16, top_k=2, forced="balance", renormalize=False)
    weigh = lambda x: route(x, None, config, key=key, training=True).weights_Tk.sum()
    assert float(jnp.abs(jax.grad(weigh)(logits)).max()) > 0, "gradients pass straight through"


def test_noise_needs_a_key_and_only_noise_takes_one():
    config = RouterConfig(num_experts=16, top_k=2, forced="balance")
    with pytest.raises(ValueError, match="key missing"):
        route(jnp.zeros((2, 16)), None, config, training=True)
    assert route(jnp.zeros((2, 16)), None, config).experts_Tk.tolist() == [[0, 1]] * 2


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(selection="sinkhorn", num_groups=4, top_groups=2), r"num_groups=4 has no effect with selection=sinkhorn"),
        (dict(selection="quantile", top_k=16), r"top_k below num_experts=16"),
    ],
)
def test_refusals(fields, message):
    with pytest.raises(ValueError, match=message):
        check_router(RouterConfig(**dict(num_experts=16, top_k=2) | fields))
