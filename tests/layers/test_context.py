"""Attention over a split sequence: every method equals one device's, with documents, windows and padding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mesh import build_mesh, collectives, fold, sharded
from mesh.vma import vary, varying
from moex.layers import blockwise
from moex.layers.attention import attend
from moex.layers.context import dealt, mix, zigzag_order
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


SINKS = np.linspace(-1, 2, N, dtype=np.float32)


@functools.cache
def alone(kv_heads, window, soft_cap):
    q, k, v, g = qkv(kv_heads)
    options = dict(scale=0.4, window=window, soft_cap=soft_cap)
    loss = lambda q, k, v, sinks: attend(q, k, v, TOKENS, TOKENS, sinks_N=sinks, **options)
    y, pull = quick_jit(lambda *a: jax.vjp(loss, *a))(q, k, v, SINKS)
    return y, pull(g * REAL)


@pytest.mark.parametrize(
    "method, cp, kv_heads, window, soft_cap, deal, tiled",
    [
        ("gather", 4, 2, 0, 0.0, "row", False),
        ("gather", 2, 2, 5, 0.0, "document", False),
        ("ulysses", 4, 4, 5, 0.0, "row", False),
        ("ulysses", 2, 4, 0, 1.5, "document", True),
        ("ring", 2, 2, 5, 0.0, "row", False),
        ("ring", 4, 2, 0, 1.5, "row", True),
        ("ring", 2, 4, 5, 0.0, "document", False),
        ("hierarchical", 4, 2, 0, 0.0, "row", False),
        ("hierarchical", 4, 4, 5, 1.5, "row", True),
        ("hierarchical", 4, 4, 0, 0.0, "document", False),
    ],
)
def test_split_sequences_give_the_same(method, cp, kv_heads, window, soft_cap, deal, tiled, devices, monkeypatch):
    """Output and gradients, of sinks too; in tiles of one query each where `tiled`."""
    if tiled:
        monkeypatch.setattr(blockwise, "MOST_SCORES", N)
    q, k, v, g = qkv(kv_heads)
    folded = fold(dict(dp=2, cp=cp), dict(edp=2 * cp))
    order = dealt(SEGMENTS, cp, deal)
    parts = P(folded.dense.dp, folded.dense.cp)
    split = lambda x: np.take_along_axis(np.asarray(x), order.reshape(*order.shape, *[1] * (np.ndim(x) - 2)), axis=1)
    options = dict(method=method, ulysses=2, scale=0.4, window=window, soft_cap=soft_cap)

    def local(q, k, v, sinks, g, tokens):
        function = lambda q, k, v, sinks: mix(q, k, v, tokens, folded.dense.cp, sinks_N=sinks, **options)
        y, pull = jax.vjp(function, q, k, v, vary(sinks, varying(q)))
        *dqkv, dsinks = pull(g)
        return y, (*dqkv, collectives.psum(dsinks, folded.dense.dp + folded.dense.cp))

    mesh = build_mesh(folded, devices[: 2 * cp])
    function = quick_jit(sharded(local, mesh, (*(parts,) * 3, P(), parts, parts), (parts, (*(parts,) * 3, P()))))
    y, grads = function(*map(split, (q, k, v)), SINKS, split(g * REAL), jax.tree.map(split, TOKENS))
    want_y, want_grads = alone(kv_heads, window, soft_cap)
    np.testing.assert_allclose(np.asarray(y) * split(REAL), split(want_y * REAL), atol=2e-6)
    for got, want in zip(grads, (*map(split, want_grads[:3]), want_grads[3]), strict=True):
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_zigzag_deals_a_chunk_from_each_end():
    assert zigzag_order(8, 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert zigzag_order(6, 1).tolist() == list(range(6))
    for cp in (2, 4, 8):
        order = zigzag_order(48 * cp, cp).reshape(cp, -1)
        # Causal work: token i sees i + 1 keys, and every rank has as much of it as the others.
        assert len(set((order + 1).sum(axis=1).tolist())) == 1


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_documents_dealt_one_by_one_leave_every_rank_the_same_work(cp):
    """Each rank gets as many tokens, early ones first, and pairs of query and key within a token a document of the mean."""
    rng, seq_len = np.random.default_rng(cp), 960
    lengths = [200, 1, 3, 1, 117, 2 * cp, 2 * cp - 1, 301, 8, 90]
    segments = np.repeat([*range(1, len(lengths) + 1), 0], [*lengths, seq_len - sum(lengths)])
    segments = np.stack([segments, rng.permutation(seq_len // 8).repeat(8)])
    positions = np.arange(seq_len) - np.maximum.accumulate(
        np.where(np.diff(segments, axis=1, prepend=-1) != 0, np.arange(seq_len), 0), axis=1
    )
    order = dealt(segments, cp, "document")
    assert (np.sort(order, axis=1) == np.arange(seq_len)).all()
    pairs = np.take_along_axis(positions + 1, order, axis=1).reshape(2, cp, 2, -1).sum(axis=(2, 3))
    assert (pairs.max(axis=1) / pairs.mean(axis=1) < [1.02, 1.1]).all()
    halves = np.take_along_axis(segments, order, axis=1).reshape(2, cp, 2, -1)
    for row in range(2):  # within a document, early parts follow the ranks and late ones reverse them
        places = order[row].reshape(cp, 2, -1)
        for document in np.unique(segments[row]):
            parts = [places[r, 0][halves[row, r, 0] == document] for r in range(cp)]
            parts += [places[r, 1][halves[row, r, 1] == document] for r in reversed(range(cp))]
            assert (np.concatenate(parts) == np.flatnonzero(segments[row] == document)).all()


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
