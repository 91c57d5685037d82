"""Routing and its losses: hand-worked cases, invariants, and the same numbers on one device and on several."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from mesh import build_mesh, fold, sharded
from moex.config import RouterConfig
from moex.layers.router import (
    Router,
    balance_loss,
    check_router,
    expert_counts,
    route,
    scores,
    sequence_balance_loss,
    update_bias,
    z_loss,
)
from tests.quick import quick_jit

FOUR = jnp.array([[2.0, 1.0, 0.0, -1.0]])


def logit(probability):
    p = np.asarray(probability, np.float64)
    return jnp.asarray(np.log(p / (1 - p)), jnp.float32)


@functools.partial(jax.jit, static_argnums=2)
def routed(logits_TE, bias_E, config):
    return route(logits_TE, bias_E, config)


# --- which experts, with what weights -------------------------------------------------------------------------------


def test_groups_are_ranked_by_the_sum_of_their_best_two():
    """DeepSeek-V3's rule; ranking by the maximum (V2) keeps the other group."""
    logits = logit([[0.95, 0.01, 0.01, 0.01, 0.5, 0.5, 0.01, 0.01]])
    config = RouterConfig(num_experts=8, top_k=2, score_function="sigmoid", num_groups=2, top_groups=1)
    assert config.group_score_top == 2
    got = route(logits, jnp.zeros(8), config)
    assert sorted(got.experts_Tk[0].tolist()) == [4, 5]
    np.testing.assert_allclose(got.weights_Tk, [[0.5, 0.5]], atol=1e-6)
    by_max = route(logits, jnp.zeros(8), RouterConfig(**{**vars(config), "group_score_top": 1}))
    assert by_max.experts_Tk[0].tolist() == [0, 1]


def test_groups_are_ranked_by_biased_scores():
    logits = logit([[0.6, 0.6, 0.5, 0.5]])
    config = RouterConfig(num_experts=4, top_k=2, score_function="sigmoid", num_groups=2, top_groups=1)
    assert sorted(route(logits, None, config).experts_Tk[0].tolist()) == [0, 1]
    got = route(logits, jnp.array([0, 0, 0.2, 0.2]), config)
    assert sorted(got.experts_Tk[0].tolist()) == [2, 3]
    np.testing.assert_allclose(got.weights_Tk, [[0.5, 0.5]], atol=1e-6)


def test_bias_picks_but_does_not_weigh():
    config = RouterConfig(num_experts=4, top_k=2, score_function="sigmoid")
    got = route(logit([[0.9, 0.8, 0.7, 0.1]]), jnp.array([0.0, 0, 0, 1]), config)
    assert got.experts_Tk.tolist() == [[3, 0]]
    np.testing.assert_allclose(got.weights_Tk, [[0.1, 0.9]], atol=1e-6)


WEIGHTS = {
    ("softmax", True): (0.73106, 0.26894),
    ("softmax", False): (0.64391, 0.23688),
    ("sigmoid", True): (0.54645, 0.45355),
    ("sigmoid", False): (0.88080, 0.73106),
}


@pytest.mark.parametrize("factor", [1.0, 2.5])
@pytest.mark.parametrize("function, renormalize", WEIGHTS)
def test_weights_in_both_states_of_the_flag_and_scaled_once(function, renormalize, factor):
    config = RouterConfig(
        num_experts=4, top_k=2, score_function=function, renormalize=renormalize, scaling_factor=factor
    )
    got = route(FOUR, None, config)
    assert got.experts_Tk.tolist() == [[0, 1]]
    np.testing.assert_allclose(got.weights_Tk[0] / factor, WEIGHTS[function, renormalize], atol=6e-6)
    assert got.weights_Tk.dtype == jnp.float32


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_near_ties_are_decided_in_float32(dtype):
    """bfloat16 logits would all round to 1.0 and fall to expert 0; activations may be bfloat16, the router isn't."""
    config = RouterConfig(num_experts=4, top_k=1, renormalize=False)
    weight = jnp.array([[1.0, 1.003, 1.001, 0.125], [0, 0, 0, 0]])
    router = nnx.merge(nnx.graphdef(Router(2, config)), dict(weight=weight))
    logits = router(jnp.array([[1.0, 0.0]], dtype))
    assert logits.dtype == jnp.float32
    assert route(logits, None, config).experts_Tk.tolist() == [[1]]


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
def test_no_choice_differs_from_float64(function):
    """4096 tokens, 64 experts, 8 of them chosen: sets as a float64 router picks them, from the same logits."""
    config = RouterConfig(num_experts=64, top_k=8, score_function=function)
    logits = np.asarray(jax.random.normal(jax.random.key(0), (4096, 64)) * 2)
    want = np.argsort(-logits.astype(np.float64), axis=-1, kind="stable")[:, :8]
    got = routed(logits, jnp.zeros(64), config).experts_Tk
    np.testing.assert_array_equal(np.sort(got, axis=-1), np.sort(want, axis=-1))


def test_ties_go_to_the_lower_expert_everywhere():
    logits = jnp.zeros((64, 8))
    config = RouterConfig(num_experts=8, top_k=2)
    want = np.tile([0, 1], (64, 1))
    np.testing.assert_array_equal(route(logits, None, config).experts_Tk, want)
    np.testing.assert_array_equal(routed(logits, jnp.zeros(8), config).experts_Tk, want)


@pytest.mark.parametrize("difference", [0.0, 1e-7])
def test_recompute_picks_the_same_experts_and_gives_the_same_gradients(difference):
    config = RouterConfig(num_experts=8, top_k=2)
    x = jax.random.normal(jax.random.key(1), (64, 16))
    w = jnp.zeros((16, 8)).at[:, 1::2].add(difference)

    def loss(w, wrap):
        def layer(x, w):
            got = route(x @ w, None, config)
            return (got.weights_Tk * jnp.sin(got.experts_Tk + x[:, :1])).sum()

        return wrap(layer)(x, w)

    plain = jax.jit(jax.grad(loss), static_argnums=1)(w, lambda f: f)
    again = jax.jit(jax.grad(loss), static_argnums=1)(w, jax.checkpoint)
    assert float(jnp.abs(plain).max()) > 0
    np.testing.assert_array_equal(plain, again)


def test_replayed_choices_are_kept_and_weighed():
    config = RouterConfig(num_experts=4, top_k=2, score_function="sigmoid")
    replay = jnp.array([[3, 1]], jnp.int32)
    got = route(FOUR, None, config, replay_Tk=replay)
    assert got.experts_Tk.tolist() == [[3, 1]]
    assert got.counts_E.tolist() == [0, 1, 0, 1]
    s = 1 / (1 + np.exp([1.0, -1.0]))
    np.testing.assert_allclose(got.weights_Tk[0], s / s.sum(), rtol=1e-6)


def test_bias_has_no_gradient():
    config = RouterConfig(num_experts=4, top_k=2, score_function="sigmoid")
    loss = lambda logits, bias: (route(logits, bias, config).weights_Tk[:, 0]).sum()
    d_logits, d_bias = jax.grad(loss, argnums=(0, 1))(FOUR, jnp.full(4, 0.1))
    assert float(jnp.abs(d_logits).max()) > 0
    np.testing.assert_array_equal(d_bias, np.zeros(4))


# --- invariants -----------------------------------------------------------------------------------------------------

CONFIGS = [
    RouterConfig(num_experts=6, top_k=1, renormalize=False),
    RouterConfig(num_experts=6, top_k=6),
    RouterConfig(num_experts=8, top_k=3, renormalize=False),
    RouterConfig(num_experts=8, top_k=3, score_function="sigmoid", scaling_factor=2.5),
    RouterConfig(num_experts=8, top_k=3, score_function="sigmoid", num_groups=4, top_groups=2),
    RouterConfig(num_experts=12, top_k=2, num_groups=3, top_groups=1, group_score_top=1),
    RouterConfig(num_experts=5, top_k=2, score_function="sqrtsoftplus", scaling_factor=0.5),
    RouterConfig(num_experts=9, top_k=1, score_function="sqrtsoftplus", num_groups=3, top_groups=2),
    RouterConfig(num_experts=32, top_k=8, score_function="sigmoid", num_groups=8, top_groups=4),
    RouterConfig(num_experts=1, top_k=1, renormalize=False),
]
NUM_TOKENS = 16


@st.composite
def routings(draw):
    config = draw(st.sampled_from(CONFIGS))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_tokens = draw(st.sampled_from([1, 7, NUM_TOKENS]))
    logits = rng.normal(scale=draw(st.sampled_from([0.1, 1.0, 10.0])), size=(num_tokens, config.num_experts))
    if draw(st.booleans()):
        logits = np.round(logits)  # many ties
    bias = rng.normal(scale=0.2, size=config.num_experts)
    return config, logits.astype(np.float32), bias.astype(np.float32), rng.random(num_tokens) < 0.7, rng


@given(routings())
@settings(max_examples=60, deadline=None)
def test_invariants_of_a_routing(case):
    config, logits, bias, real, _ = case
    got = jax.jit(route, static_argnums=2)(logits, bias, config, mask_T=real)
    experts, weights, counts = map(np.asarray, got)
    assert experts.dtype == counts.dtype == np.int32
    assert all(len(set(row)) == config.top_k for row in experts.tolist())
    assert experts.min() >= 0
    assert experts.max() < config.num_experts
    np.testing.assert_array_equal(counts, np.bincount(experts[real].reshape(-1), minlength=config.num_experts))
    assert counts.sum() == config.top_k * real.sum()
    groups = experts // (config.num_experts // config.num_groups)
    assert max(len(set(row)) for row in groups.tolist()) <= config.top_groups
    assert (weights > 0).all()
    if config.renormalize and config.top_k > 1:
        np.testing.assert_allclose(weights.sum(axis=-1), config.scaling_factor, rtol=1e-6)
    else:
        plain = np.take_along_axis(np.asarray(scores(logits, config)), experts, axis=-1)
        np.testing.assert_allclose(weights, plain * config.scaling_factor, rtol=1e-6)


def separate(config, rng):
    """Logits whose scores, and whose groups' scores, are so far apart that rounding cannot reorder them."""
    logits = rng.permutation(np.linspace(-3, 3, 16 * config.num_experts)).reshape(16, -1).astype(np.float32)
    grouped = np.asarray(scores(logits, config)).reshape(16, config.num_groups, -1)
    best = np.sort(grouped, axis=-1)[..., -config.group_score_top :].sum(axis=-1)
    assume(config.num_groups == 1 or np.diff(np.sort(best, axis=-1)).min() > 1e-4)
    return logits


@given(routings(), st.sampled_from([0.25, -0.5, 4.0]))
@settings(max_examples=30, deadline=None)
def test_a_constant_bias_changes_nothing(case, constant):
    config, *_, rng = case
    logits = separate(config, rng)
    plain = routed(logits, jnp.zeros(config.num_experts), config)
    moved = routed(logits, jnp.full(config.num_experts, constant), config)
    jax.tree.map(np.testing.assert_array_equal, plain, moved)


@given(routings())
@settings(max_examples=30, deadline=None)
def test_renaming_experts_renames_the_choice(case):
    config, *_, rng = case
    logits, bias = separate(config, rng), np.zeros(config.num_experts, np.float32)
    size = config.num_experts // config.num_groups
    inside = np.stack([rng.permutation(size) for _ in range(config.num_groups)])
    new_of_old = (rng.permutation(config.num_groups)[:, None] * size + inside).reshape(-1)
    old_of_new = np.argsort(new_of_old)
    plain = routed(logits, bias, config)
    renamed = routed(logits[:, old_of_new], bias[old_of_new], config)
    np.testing.assert_array_equal(renamed.experts_Tk, new_of_old[plain.experts_Tk])
    np.testing.assert_allclose(renamed.weights_Tk, plain.weights_Tk, rtol=2e-6)
    np.testing.assert_array_equal(np.asarray(renamed.counts_E)[new_of_old], plain.counts_E)


# --- losses ---------------------------------------------------------------------------------------------------------

balance = jax.jit(balance_loss, static_argnums=2)
TILTED = jnp.array([[2.0, 1, 0, -1], [0, 2, 1, -1], [2, 0, 1, -1], [3, 0, -1, 2]])


def test_balance_loss_rises_with_imbalance():
    """Means over the wrong dim make it a constant; these are three different numbers."""
    config = RouterConfig(num_experts=4, top_k=2)
    np.testing.assert_allclose(balance(TILTED, None, config), 1.214875, atol=2e-6)
    np.testing.assert_allclose(
        balance(jnp.tile(jnp.array([[10.0, 5, 0, 0]]), (4, 1)), None, config), 1.99982, atol=1e-5
    )
    one_each = 5 * jnp.eye(4) + 5 * jnp.roll(jnp.eye(4), 1, axis=1)
    np.testing.assert_allclose(balance(one_each, None, config), 1.0, atol=1e-6)


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("num_experts, top_k", [(4, 2), (32, 8), (64, 6), (256, 8)])
def test_zero_logits_have_a_balance_loss_of_exactly_one(num_experts, top_k, function):
    config = RouterConfig(num_experts=num_experts, top_k=top_k, score_function=function)
    assert float(balance(jnp.zeros((48, num_experts)), None, config)) == 1.0


def test_balance_of_a_number_of_experts_that_is_no_power_of_two():
    config = RouterConfig(num_experts=60, top_k=4)
    np.testing.assert_allclose(balance(jnp.zeros((48, 60)), None, config), 1.0, rtol=1e-6)


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
def test_padding_tokens_are_not_in_the_losses(function):
    config = RouterConfig(num_experts=4, top_k=2, score_function=function)
    padded = jnp.concatenate([TILTED[:2], jnp.full((3, 4), 50.0), TILTED[2:]])
    real = jnp.array([True, True, False, False, False, True, True])
    for loss in (lambda x, m: balance_loss(x, m, config), z_loss):
        both = jax.jit(jax.value_and_grad(loss))
        (value, grad), (want, want_grad) = both(padded, real), both(TILTED, None)
        np.testing.assert_allclose(value, want, rtol=1e-6)
        grad = np.asarray(grad)
        np.testing.assert_array_equal(grad[~np.asarray(real)], 0)
        np.testing.assert_allclose(grad[np.asarray(real)], want_grad, rtol=1e-5, atol=1e-8)


def test_losses_without_a_real_token_are_zero_and_so_are_their_gradients():
    config = RouterConfig(num_experts=4, top_k=2)
    nobody = jnp.zeros(4, bool)
    for loss in (lambda x: balance_loss(x, nobody, config), lambda x: z_loss(x, nobody)):
        value, grad = jax.jit(jax.value_and_grad(loss))(TILTED)
        assert float(value) == 0
        np.testing.assert_array_equal(grad, np.zeros((4, 4)))


def test_z_loss_is_the_mean_squared_log_partition():
    want = np.mean(np.log(np.exp(np.asarray(TILTED, np.float64)).sum(axis=-1)) ** 2)
    np.testing.assert_allclose(z_loss(TILTED, None), want, rtol=1e-6)


@pytest.mark.parametrize("num_devices", [2, 4])
@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
def test_losses_and_gradients_do_not_depend_on_how_tokens_are_split(devices, num_devices, function):
    """Devices hold unequal numbers of real tokens: a mean of means would differ."""
    config = RouterConfig(num_experts=8, top_k=3, score_function=function)
    logits = jax.random.normal(jax.random.key(2), (32, 8)) + jnp.arange(8.0)[None] / 4
    real = jnp.arange(32) % 7 < jnp.arange(32) // 8 + 2
    weights = jnp.array([0.3, 0.7])
    folded = fold(dict(dp=num_devices // 2, tp=2), dict(edp=num_devices))
    axes = folded.dense.tokens

    def losses(logits, real, axes):
        return weights @ jnp.stack([balance_loss(logits, real, config, axes=axes), z_loss(logits, real, axes=axes)])

    def local(logits, real):
        value, grad = jax.value_and_grad(losses)(logits, real, axes)
        counts = jax.lax.psum(route(logits, None, config, mask_T=real).counts_E, axes)
        return value, grad, counts

    mesh = build_mesh(folded, devices[:num_devices])
    got = quick_jit(sharded(local, mesh, (P(axes), P(axes)), (P(), P(axes), P())))(logits, real)
    value, grad = jax.jit(jax.value_and_grad(losses), static_argnums=2)(logits, real, ())
    np.testing.assert_allclose(got[0], value, rtol=1e-6)
    np.testing.assert_allclose(got[1], grad, rtol=1e-5, atol=1e-8)
    np.testing.assert_array_equal(got[2], route(logits, None, config, mask_T=real).counts_E)


# --- the balancing bias ---------------------------------------------------------------------------------------------


def test_bias_moves_by_exactly_the_rate():
    bias = update_bias(jnp.zeros(4), jnp.array([10, 20, 30, 20], jnp.int32), 0.125)
    assert bias.tolist() == [0.125, 0.0, -0.125, 0.0]
    bias = update_bias(jnp.zeros(3), jnp.array([1, 1, 2], jnp.int32), 1.0)  # a mean between whole numbers
    assert bias.tolist() == [1.0, 1.0, -1.0]


def test_counts_are_compared_exactly_above_2_to_the_24():
    big = 2**24
    counts = jnp.array([[big + 1, big, big - 1, big], [5, 5, 5, 5]], jnp.int32)
    assert update_bias(jnp.zeros((2, 4)), counts, 1.0).tolist() == [[-1.0, 0.0, 1.0, 0.0], [0.0] * 4]


def test_sums_of_counts_may_pass_2_to_the_31():
    """256 experts of ten million pairs each: one step of 2.5 billion pairs."""
    counts = jnp.full(256, 10_000_000, jnp.int32).at[0].add(256).at[1].add(-256)
    want = np.zeros(256)
    want[:2] = -1, 1
    np.testing.assert_array_equal(update_bias(jnp.zeros(256), counts, 1.0), want)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_counts_must_be_integers(dtype):
    with pytest.raises(ValueError, match=rf"integer counts, got {jnp.dtype(dtype).name}.*2\^24"):
        update_bias(jnp.zeros(4), jnp.ones(4, dtype), 1e-3)
    with pytest.raises(ValueError, match="int32 counts, got int64"):
        update_bias(jnp.zeros(3), np.array([2**40, 1, 1]), 1e-3)


def test_a_skewed_expert_loses_its_bias_step_by_step():
    config = RouterConfig(num_experts=8, top_k=2, score_function="sigmoid", bias_rate=1e-3)
    logits = jax.random.normal(jax.random.key(3), (256, 8)).at[:, 3].add(5)
    step = jax.jit(lambda bias: update_bias(bias, route(logits, bias, config).counts_E, config.bias_rate))
    bias = jnp.zeros(8)
    for _ in range(20):
        bias = step(bias)
    np.testing.assert_allclose(bias[3], -20e-3, rtol=1e-5)
    assert bias.dtype == jnp.float32


def test_bias_balances_the_load_in_the_end():
    config = RouterConfig(num_experts=8, top_k=2, score_function="sigmoid", bias_rate=1e-2)
    logits = jax.random.normal(jax.random.key(4), (512, 8)) + jnp.linspace(-1, 1, 8)[None]
    step = lambda bias, _: (update_bias(bias, route(logits, bias, config).counts_E, config.bias_rate), None)
    bias = jax.jit(lambda b: jax.lax.scan(step, b, None, length=200)[0])(jnp.zeros(8))
    before, after = (np.asarray(routed(logits, b, config).counts_E) for b in (jnp.zeros(8), bias))
    assert before.max() > 1.5 * before.mean()
    assert after.max() < 1.1 * after.mean()


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(num_experts=4, top_k=5), r"top_k=5 .* num_experts=4"),
        (dict(num_experts=4, top_k=0), r"top_k=0 .* num_experts=4"),
        (dict(num_experts=6, num_groups=4), r"num_experts=6 .* num_groups=4"),
        (dict(num_experts=8, num_groups=4, top_groups=5), r"top_groups=5 .* num_groups=4"),
        (dict(num_experts=8, top_k=3, num_groups=4, top_groups=1), r"top_groups=1 groups of 2 .* top_k=3"),
        (dict(num_experts=8, top_k=1, num_groups=4, group_score_top=3), r"group_score_top=3 .* size 2"),
    ],
)
def test_refusals_name_fields_and_numbers(fields, message):
    with pytest.raises(ValueError, match=message):
        check_router(RouterConfig(**fields))
    with pytest.raises(ValueError, match=message):
        route(jnp.zeros((2, fields["num_experts"])), None, RouterConfig(**fields))


def test_wrong_logits_and_useless_keys_are_refused():
    with pytest.raises(ValueError, match=r"logits are of 4 experts.*num_experts=8"):
        route(FOUR, None, RouterConfig(num_experts=8))
    with pytest.raises(ValueError, match="forced='', training=False, key given"):
        route(FOUR, None, RouterConfig(num_experts=4), key=jax.random.key(0))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "config", CONFIGS, ids=lambda c: f"{c.score_function}-{c.num_experts}-{c.top_k}-{c.num_groups}"
)
def test_logits_that_are_not_finite_never_give_an_invalid_or_repeated_expert(config, bad):
    """One bad logit, several, all; whatever comes out is a choice that dispatch can use."""
    logits = np.array(jax.random.normal(jax.random.key(7), (4, config.num_experts)))
    logits[1, 0], logits[2, ::2], logits[3] = bad, bad, bad
    for bias in (None, jnp.full(config.num_experts, bad)):
        experts, _, counts = routed(logits, bias, config)
        assert all(len(set(row)) == config.top_k for row in experts.tolist())
        assert 0 <= int(experts.min()) <= int(experts.max()) < config.num_experts
        assert int(counts.sum()) == 4 * config.top_k
    np.testing.assert_array_equal(
        routed(logits, None, config).experts_Tk[0], routed(logits[:1], None, config).experts_Tk[0]
    )


@pytest.mark.parametrize("function, low", [("sigmoid", -45.0), ("sigmoid", -95.0), ("sqrtsoftplus", -90.0)])
def test_vanishing_scores_have_finite_weights_and_gradients(function, low):
    """s / (sum s + 1e-20) and its square underflow; the limit is a softmax of the logits (or of their halves)."""
    config = RouterConfig(num_experts=4, top_k=2, score_function=function)
    logits = jnp.full((1, 4), low).at[0, 1].add(0.5)
    weigh = lambda x: route(x, None, config).weights_Tk
    share = 1 / (1 + np.exp(-0.5 if function == "sigmoid" else -0.25))
    # Scores of 0 tie, so which of the two stands first is another matter.
    np.testing.assert_allclose(np.sort(weigh(logits))[:, ::-1], [[share, 1 - share]], rtol=1e-5)
    for loss in (lambda x: weigh(x)[0, 0], lambda x: balance_loss(x, None, config)):
        gradient = jax.grad(loss)(logits)
        assert jnp.isfinite(gradient).all()
        assert jnp.abs(gradient).max() > 1e-3


def test_replayed_choices_are_checked_and_a_number_that_is_no_expert_weighs_nothing():
    config = RouterConfig(num_experts=4, top_k=2, score_function="sigmoid")
    got = route(FOUR, None, config, replay_Tk=jnp.array([[3, 9]], jnp.int32))
    np.testing.assert_allclose(got.weights_Tk, [[1, 0]])
    assert got.counts_E.tolist() == [0, 0, 0, 1]
    np.testing.assert_array_equal(route(FOUR, None, config, replay_Tk=jnp.full((1, 2), -1)).weights_Tk, 0)
    for wrong in (jnp.array([[0.7, 1.9]]), jnp.array([[0, 1, 2]]), jnp.array([[0, 1], [1, 2]])):
        with pytest.raises(ValueError, match=r"integers of shape \(1, 2\)"):
            route(FOUR, None, config, replay_Tk=wrong)


@pytest.mark.parametrize("function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_padding_may_hold_anything(function):
    config, real = RouterConfig(num_experts=8, top_k=2, score_function=function), jnp.arange(16) % 3 > 0
    logits = jax.random.normal(jax.random.key(8), (16, 8))
    spoilt = jnp.where(real[:, None], logits, jnp.nan)
    for loss in (
        lambda x: balance_loss(x, real, config),
        lambda x: z_loss(x, real),
        lambda x: sequence_balance_loss(x, real.astype(int), config, num_segments=1),
    ):
        for ours, theirs in zip(jax.value_and_grad(loss)(spoilt), jax.value_and_grad(loss)(logits), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_unknown_names_are_refused():
    for name in ("score_function", "selection", "capacity_policy", "forced"):
        with pytest.raises(ValueError, match=f"{name}='foo' must be one of"):
            check_router(RouterConfig(**{name: "foo"}))


def test_counting_leaves_out_what_is_not_real():
    experts = jnp.array([[0, 1], [1, 2], [2, 0]])
    assert expert_counts(experts, jnp.array([True, False, True]), 4).tolist() == [2, 1, 1, 0]
