"""Rows by index: values, gradients against autodiff of the naive form, and the local plan under random choices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moex.dispatch import Budget, local, worst_case
from moex.dispatch.move import invert, move

T, K, E, D = 8, 3, 5, 4


def naive(x_ND, out_from_Mj):
    """Gather with an appended zero row, then a sum: autodiff makes it a scatter-add."""
    padded = jnp.concatenate([x_ND, jnp.zeros((1, x_ND.shape[1]))])
    return padded[out_from_Mj].sum(axis=1)


def maps(seed, align=2):
    rng = np.random.default_rng(seed)
    experts = np.stack([rng.permutation(E + 2)[:K] - 1 for _ in range(T)]).astype(np.int32)  # -1 and E go nowhere
    return local.plan(experts, E, worst_case(T, K, 1, E, align))


@pytest.mark.parametrize("seed", range(3))
def test_gradients_equal_autodiff_of_the_naive_form(seed):
    plan = maps(seed)
    sends, back = plan.token_of_row_R[:, None], plan.row_of_pair_Tk
    assert_same_as_naive(seed, sends, back, T)
    assert_same_as_naive(seed, back, sends, sends.shape[0])


def assert_same_as_naive(seed, out_from, in_to, num_in):
    x = jax.random.normal(jax.random.key(seed), (num_in, D))
    g = jax.random.normal(jax.random.key(seed + 9), (out_from.shape[0], D))
    got, pull = jax.vjp(lambda x: move(x, out_from, in_to), x)
    want, naive_pull = jax.vjp(lambda x: naive(x, out_from), x)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(pull(g)[0], naive_pull(g)[0], rtol=1e-6, atol=1e-6)


def test_both_directions_are_gathers():
    """No scatter, so no atomics, forward and backward."""
    plan, x = maps(0), jnp.ones((T, D))
    function = lambda x: move(x, plan.token_of_row_R[:, None], plan.row_of_pair_Tk)
    y, pull = jax.vjp(function, x)
    for text in (str(jax.make_jaxpr(function)(x)), str(jax.make_jaxpr(pull)(y))):
        assert "gather" in text
        assert "scatter" not in text


def test_an_index_of_minus_one_adds_nothing_even_beside_nan():
    x = jnp.array([[jnp.nan], [2.0]])
    out = move(x, jnp.array([[1, -1], [-1, -1]]), jnp.array([[-1], [0]]))
    assert out.tolist() == [[2.0], [0.0]]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_dtypes_are_kept(dtype):
    x = jnp.ones((2, 3), dtype)
    index = jnp.array([[0], [1]])
    out, pull = jax.vjp(lambda x: move(x, index, index), x)
    assert out.dtype == pull(out)[0].dtype == dtype


def test_invert():
    assert invert(jnp.array([3, -1, 0, 1]), 5).tolist() == [2, 3, -1, 0, -1]


@functools.partial(jax.jit, static_argnums=1)
def planned(experts, budget):
    return local.plan(experts, E, budget)


@given(st.lists(st.permutations(range(-1, E + 2)), min_size=T, max_size=T), st.sampled_from([1, 4]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_plan_and_its_inverse_agree(choices, align, tight):
    experts = np.array([c[:K] for c in choices], np.int32)
    worst = worst_case(T, K, 1, E, align)
    budget = Budget(cell_rows=0, rows=12, align=align) if tight else worst
    plan = jax.device_get(planned(experts, budget))
    wanted = (experts >= 0) & (experts < E)
    placed = plan.row_of_pair_Tk >= 0
    assert not (placed & ~wanted).any()
    assert plan.overflow == (wanted & ~placed).sum()
    assert tight or plan.overflow == 0
    np.testing.assert_array_equal(plan.counts_e, np.bincount(experts[wanted], minlength=E))
    assert plan.sizes_e.sum() <= budget.rows
    rows = plan.row_of_pair_Tk[placed]
    assert len(set(rows.tolist())) == rows.size
    np.testing.assert_array_equal(plan.pair_of_row_R[rows], np.flatnonzero(placed))
    np.testing.assert_array_equal(plan.token_of_row_R[rows], np.nonzero(placed)[0])
    empty = np.setdiff1d(np.arange(budget.rows), rows)
    assert (plan.pair_of_row_R[empty] == -1).all()
    assert (plan.token_of_row_R[empty] == -1).all()
    start = np.cumsum(plan.sizes_e) - plan.sizes_e
    expert = experts.reshape(-1)[plan.pair_of_row_R[rows]]
    assert (rows >= start[expert]).all()
    assert (rows < (start + plan.counts_e)[expert]).all()
