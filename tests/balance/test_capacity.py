"""Dropping by capacity: a brute-force oracle over random choices, rows split over devices, and padded slots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from mesh import build_mesh, fold, sharded
from moex.balance import apply_capacity, capacity_of, capacity_slots, keep_within_rows
from moex.config import RouterConfig

POLICIES = ["probability", "position"]


def oracle(experts, weights, num_experts, capacity, policy, order):
    """Pairs that are kept, expert by expert."""
    kept = np.zeros(experts.shape, bool)
    for expert in range(num_experts):
        pairs = [tuple(pair) for pair in np.argwhere(experts == expert)]
        worth = (lambda p: (-weights[p], order[p[0]])) if policy == "probability" else (lambda p: order[p[0]])
        for pair in sorted(pairs, key=worth)[:capacity]:
            kept[pair] = True
    return kept


def choices(rng, num_tokens, num_experts, top_k):
    experts = np.stack([rng.permutation(num_experts)[:top_k] for _ in range(num_tokens)]).astype(np.int32)
    weights = (rng.integers(1, 9, experts.shape) / 8).astype(np.float32)  # ties
    experts[rng.random(num_tokens) < 0.2] = num_experts  # padding
    return experts, weights


@given(st.integers(0, 2**32 - 1), st.sampled_from(POLICIES), st.integers(0, 9))
@settings(max_examples=30, deadline=None)
def test_what_is_kept(seed, policy, capacity):
    rng = np.random.default_rng(seed)
    experts, weights = choices(rng, 20, 6, 2)
    order = rng.permutation(20).astype(np.int32)
    counts = np.bincount(experts.reshape(-1), minlength=7)[:6].astype(np.int32)
    got = apply_capacity(experts, weights, counts, capacity, policy, order_T=order)
    kept = oracle(experts, weights, 6, capacity, policy, order)
    np.testing.assert_array_equal(got.experts_Tk, np.where(kept, experts, 6))
    np.testing.assert_array_equal(got.weights_Tk, np.where(kept, weights, 0))
    np.testing.assert_array_equal(got.counts_E, np.bincount(experts[kept], minlength=6))
    tokens, slots = capacity_slots(experts, weights, 6, 9, policy)
    first = oracle(experts, weights, 6, 9, policy, np.arange(20))
    for expert in range(6):
        filled = np.asarray(tokens[expert])[np.asarray(tokens[expert]) >= 0]
        assert sorted(filled.tolist()) == sorted(np.argwhere(first & (experts == expert))[:, 0].tolist())
        np.testing.assert_array_equal(np.asarray(slots[expert])[len(filled) :], 0)


@pytest.mark.parametrize("factor, want", [(1.0, 8), (1.25, 10), (0.1, 1), (100, 32), (0.0, 0)])
def test_capacity_is_rounded_up_and_never_above_the_tokens(factor, want):
    assert capacity_of(32, RouterConfig(num_experts=8, top_k=2, capacity_factor=factor)) == want


def test_gradients_reach_what_is_kept_only():
    experts = jnp.array([[0], [0], [1]], jnp.int32)
    kept = lambda w: apply_capacity(experts, w, jnp.array([2, 1]), 1, "probability").weights_Tk
    weigh = lambda w: (kept(w) * jnp.arange(1.0, 4)[:, None]).sum()
    np.testing.assert_array_equal(jax.grad(weigh)(jnp.array([[0.2], [0.7], [0.5]])), [[0], [2], [3]])


def test_another_policy_is_refused():
    with pytest.raises(ValueError, match="'luck' must be probability or position"):
        apply_capacity(jnp.zeros((2, 1), int), jnp.ones((2, 1)), jnp.zeros(2, int), 1, "luck")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dense", [dict(cp=2), dict(tp=4), dict(dp=2, cp=2, tp=2)], ids=str)
def test_a_row_drops_the_same_on_every_mesh(dense, policy, devices):
    rng, num = np.random.default_rng(3), int(np.prod(list(dense.values())))
    config = RouterConfig(num_experts=6, top_k=2, capacity_factor=0.7, capacity_policy=policy)
    experts, weights = (np.stack(x) for x in zip(*[choices(rng, 16, 6, 2) for _ in range(2)], strict=True))
    index = np.stack([rng.permutation(16)] * 2).astype(np.int32)
    folded = fold(dense, dict(edp=num))
    row = folded.dense.sequence
    spec = P(folded.dense.dp, row)
    local = lambda *x: keep_within_rows(*x, config, axes=row)
    got = jax.jit(sharded(local, build_mesh(folded, devices[:num]), (spec,) * 3, (spec, spec)))(experts, weights, index)
    for b in range(2):
        kept = oracle(experts[b], weights[b], 6, capacity_of(16, config), policy, index[b])
        assert kept.sum() < (experts[b] < 6).sum()
        np.testing.assert_array_equal(got[0][b], np.where(kept, experts[b], 6))
        np.testing.assert_array_equal(got[1][b], np.where(kept, weights[b], 0))
