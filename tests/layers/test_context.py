"""Attention over a split sequence: every method equals one device's, with documents, windows and padding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mesh import build_mesh, fold, sharded
from moex.layers.attention import attend
from moex.layers.context import mix, zigzag_order
from moex.layers.tokens import Tokens
from tests.quick import quick_jit

B, S, N, K, H = 2, 16, 4, 4, 8
SEGMENTS = np.array([[1] * 6 + [2] * 10, [1] * 2 + [2] * 9 + [0] * 5], np.int32)
INDEX = np.tile(np.arange(S, dtype=np.int32), (B, 1))
TOKENS = Tokens(SEGMENTS, INDEX, INDEX)
REAL = (SEGMENTS > 0)[..., None, None]


def qkv(kv_heads=K):
    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(k, (B, S, n, H)) for k, n in zip(keys, (N, kv_heads, kv_heads, N), strict=True)]


@functools.cache
def alone(kv_heads, window):
    q, k, v, g = qkv(kv_heads)
    loss = lambda q, k, v: attend(q, k, v, TOKENS, TOKENS, scale=0.4, window=window)
    y, pull = quick_jit(lambda *a: jax.vjp(loss, *a))(q, k, v)
    return y, pull(g * REAL)


@pytest.mark.parametrize(
    "method, cp, kv_heads, window",
    [
        ("gather", 4, 2, 0),
        ("gather", 2, 2, 5),
        ("ulysses", 4, 4, 5),
        ("ring", 2, 2, 5),
        ("ring", 4, 2, 0),
        ("ring", 4, 4, 5),
    ],
)
def test_split_sequences_give_the_same(method, cp, kv_heads, window, devices):
    q, k, v, g = qkv(kv_heads)
    folded = fold(dict(dp=2, cp=cp), dict(edp=2 * cp))
    order = zigzag_order(S, cp)
    parts = P(folded.dense.dp, folded.dense.cp)
    split = lambda x: np.asarray(x)[:, order]

    def local(q, k, v, g, tokens):
        function = lambda q, k, v: mix(q, k, v, tokens, folded.dense.cp, method=method, scale=0.4, window=window)
        y, pull = jax.vjp(function, q, k, v)
        return y, pull(g)

    mesh = build_mesh(folded, devices[: 2 * cp])
    function = quick_jit(sharded(local, mesh, (parts,) * 5, parts))
    y, grads = function(*map(split, (q, k, v, g * REAL)), jax.tree.map(split, TOKENS))
    want_y, want_grads = alone(kv_heads, window)
    np.testing.assert_allclose(np.asarray(y) * split(REAL), split(want_y * REAL), atol=2e-6)
    for got, want in zip(grads, want_grads, strict=True):
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got, split(want), atol=1e-5)


def test_zigzag_deals_a_chunk_from_each_end():
    assert zigzag_order(8, 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert zigzag_order(6, 1).tolist() == list(range(6))
    for cp in (2, 4, 8):
        order = zigzag_order(48 * cp, cp).reshape(cp, -1)
        # Causal work: token i sees i + 1 keys, and every rank has as much of it as the others.
        assert len(set((order + 1).sum(axis=1).tolist())) == 1


def test_a_sequence_that_does_not_cut_is_refused():
    with pytest.raises(ValueError, match=r"sequence of 12 doesn't cut into 2 x cp=8 chunks"):
        zigzag_order(12, 4)


def test_bfloat16_ring_keeps_float32_sums(devices):
    q, k, v, _ = (x.astype(jnp.bfloat16) for x in qkv(2))
    folded = fold(dict(cp=4), dict(edp=4))
    order, parts = zigzag_order(S, 4), P(None, folded.dense.cp)
    local = lambda q, k, v, tokens: mix(q, k, v, tokens, folded.dense.cp, method="ring", scale=0.4)
    function = quick_jit(sharded(local, build_mesh(folded, devices[:4]), (parts,) * 4, parts))
    got = function(*(x[:, order] for x in (q, k, v)), Tokens(*(x[:, order] for x in TOKENS)))
    assert got.dtype == jnp.bfloat16
    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    want = attend(*wide, TOKENS, TOKENS, scale=0.4)[:, order]
    real = REAL[:, order]
    np.testing.assert_allclose(got.astype(jnp.float32) * real, want * real, rtol=2**-8, atol=2e-3)
