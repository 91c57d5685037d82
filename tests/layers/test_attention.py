"""Attention against a float64 loop: documents, windows, shared key-value heads, padding; split over tensor parallelism."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from mesh import ALONE, build_mesh, fold, sharded
from moex.config import AttentionConfig, RopeConfig
from moex.layers import blockwise, param
from moex.layers.attention import attend
from moex.layers.gqa import GroupedQueryAttention
from moex.layers.mla import LatentAttention
from moex.layers.mlp import MLP, swiglu
from moex.layers.tokens import Tokens, unpacked
from moex.precision.recipes import Precision
from tests.layers import oracle
from tests.quick import quick_jit

B, S = 2, 12
SEGMENTS = {
    "one document": np.ones((B, S), np.int32),
    "packed": np.array([[1] * 5 + [2] * 7, [1] * 3 + [2] * 1 + [3] * 8], np.int32),
    "padded": np.array([[1] * 5 + [2] * 4 + [0] * 3, [1] * 2 + [0] * 10], np.int32),
    "all padding": np.zeros((B, S), np.int32),
}


def tokens_of(segments):
    index = np.tile(np.arange(S, dtype=np.int32), (B, 1))
    return Tokens(segments, index, index)


@functools.partial(jax.jit, static_argnames=("scale", "window"))
def attended(q, k, v, tokens, scale, window):
    return attend(q, k, v, tokens, tokens, scale=scale, window=window)


@pytest.mark.parametrize("window", [0, 1, 4])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("segments", SEGMENTS)
def test_attend_equals_the_loop(segments, kv_heads, window):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(B, S, n, 8)).astype(np.float32) for n in (4, kv_heads, kv_heads))
    tokens = tokens_of(SEGMENTS[segments])
    got = attended(q, k, v, tokens, 0.7, window)
    args = (tokens.segments, tokens.index)
    np.testing.assert_allclose(got, oracle.attention(q, k, v, *args, *args, 0.7, window), atol=2e-6)


@pytest.mark.parametrize("soft_cap", [0.0, 1.5])
@pytest.mark.parametrize("sinks", [None, np.array([0.5, -30.0, 3.0, 0.0], np.float32)])
def test_capped_logits_and_sinks_equal_the_loop(sinks, soft_cap):
    rng = np.random.default_rng(3)
    q, k, v = (rng.normal(size=(B, S, n, 8)).astype(np.float32) for n in (4, 2, 2))
    tokens = tokens_of(SEGMENTS["packed"])
    got = attend(q, k, v, tokens, tokens, scale=0.7, window=4, soft_cap=soft_cap, sinks_N=sinks)
    args = (tokens.segments, tokens.index)
    want = oracle.attention(q, k, v, *args, *args, 0.7, 4, soft_cap, sinks)
    np.testing.assert_allclose(got, want, atol=2e-6)


def test_gradients_of_capped_logits_and_sinks_are_those_of_all_scores_at_once():
    rng = np.random.default_rng(4)
    q, k, v, g = (rng.normal(size=(B, S, n, 8)).astype(np.float32) for n in (4, 2, 2, 4))
    sinks, tokens = rng.normal(size=4).astype(np.float32), tokens_of(SEGMENTS["packed"])
    blocks = lambda q, k, v, sinks: attend(
        q, k, v, tokens, tokens, scale=0.7, soft_cap=1.5, sinks_N=sinks, ordered=True
    )

    def whole(q, k, v, sinks):
        seen = (tokens.index[:, :, None] >= tokens.index[:, None]) & (
            tokens.segments[:, :, None] == tokens.segments[:, None]
        )
        k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
        scores = 1.5 * jnp.tanh(jnp.einsum("bsnh,btnh->bnst", q, k) * 0.7 / 1.5)
        scores = jnp.where(seen[:, None], scores, -jnp.inf)
        with_sink = jnp.concatenate([scores, jnp.broadcast_to(sinks[None, :, None, None], (B, 4, S, 1))], axis=-1)
        return jnp.einsum("bnst,btnh->bsnh", jax.nn.softmax(with_sink, axis=-1)[..., :-1], v)

    gradients = lambda f: quick_jit(lambda *a: jax.vjp(f, *a[:4])[1](a[4]))(q, k, v, sinks, g)
    for got, want in zip(gradients(blocks), gradients(whole), strict=True):
        np.testing.assert_allclose(got, want, atol=5e-6 * np.abs(want).max())


def naive(q, k, v, tokens, window):
    """All scores at once, padding's gradient and all: what blocks must add up to."""
    distance = tokens.index[:, :, None] - tokens.index[:, None, :]
    seen = (distance >= 0) & (tokens.segments[:, :, None] == tokens.segments[:, None, :])
    seen &= distance < (window or S)
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.where(seen[:, None], jnp.einsum("bsnh,btnh->bnst", q, k) * 0.7, -jnp.inf)
    return jnp.einsum("bnst,btnh->bsnh", jax.nn.softmax(scores, axis=-1), v)


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("block_size", [3, 5, 12])  # the last block of 5 is a short one
def test_blocks_of_queries_add_up(block_size, ordered, window):
    rng = np.random.default_rng(4)
    q, k, v, g = (rng.normal(size=(B, S, n, 8)).astype(np.float32) for n in (4, 2, 2, 4))
    tokens = tokens_of(SEGMENTS["padded"])
    places = blockwise.Places(tokens.segments, tokens.index)
    rule = blockwise.Rule(scale=0.7, window=window)
    blocks = lambda q, k, v: blockwise.attention(q, k, v, places, places, rule, ordered=ordered, block_size=block_size)
    both = lambda f: quick_jit(lambda *a: (*jax.vjp(f, *a[:3])[1](a[3]), f(*a[:3])))(q, k, v, g)
    for got, want in zip(both(blocks), both(lambda *a: naive(*a, tokens, window)), strict=True):
        np.testing.assert_allclose(got, want, atol=5e-6 * np.abs(want).max())


def test_attend_in_bfloat16_keeps_its_softmax_in_float32():
    """Large scores: what bfloat16 would round them by is far above the tolerance."""
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.normal(size=(B, S, 2, 8)), jnp.bfloat16) for _ in range(3))
    tokens = tokens_of(SEGMENTS["packed"])
    got = attended(q, k, v, tokens, 3.0, 0)
    assert got.dtype == jnp.bfloat16
    args = (tokens.segments, tokens.index)
    want = oracle.attention(*(np.asarray(x, np.float64) for x in (q, k, v)), *args, *args, 3.0)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2e-2, atol=2e-2)


def test_gradients_are_finite_and_padding_gets_none_of_them():
    rng = np.random.default_rng(2)
    q, k, v = (jnp.asarray(rng.normal(size=(B, S, 2, 8)), jnp.float32) for _ in range(3))
    tokens = tokens_of(SEGMENTS["padded"])
    real = (tokens.segments > 0)[..., None, None]
    loss = lambda q, k, v: (attended(q, k, v, tokens, 1.0, 0) * real).sum()
    for grad in jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v):
        assert np.isfinite(grad).all()
        np.testing.assert_array_equal(np.asarray(grad) * ~real, 0)


def test_keys_may_be_more_than_queries_and_in_any_order():
    """A context-parallel part: queries are a slice, keys come in another order; `index` alone says who is before whom."""
    rng = np.random.default_rng(3)
    q, k, v = (rng.normal(size=(B, S, 2, 8)).astype(np.float32) for _ in range(3))
    tokens = tokens_of(SEGMENTS["packed"])
    whole = attend(q, k, v, tokens, tokens, scale=0.5)
    order, part = rng.permutation(S), slice(4, 9)
    mixed = Tokens(*(x[:, order] for x in tokens))
    queries = Tokens(*(x[:, part] for x in tokens))
    got = attend(q[:, part], k[:, order], v[:, order], queries, mixed, scale=0.5)
    np.testing.assert_allclose(got, whole[:, part], atol=1e-6)


# --- modules ----------------------------------------------------------------------------------------------------------

D = 16
GQA = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, qk_norm=True, sliding_window=5)
MLA = AttentionConfig(
    kind="mla", num_heads=4, num_kv_heads=4, head_dim=8, rope_dim=4, value_dim=6, q_latent_dim=10, kv_latent_dim=12,
    rope=RopeConfig(interleaved=True),
)  # fmt: skip
MODULES = {
    "gqa": GroupedQueryAttention(D, GQA, 1e-6),
    "mla": LatentAttention(D, MLA, 1e-6),
    "mla without query latent": LatentAttention(D, AttentionConfig(**{**vars(MLA), "q_latent_dim": 0}), 1e-6),
    "mlp": MLP(D, 24),
}


def call(module, x, tokens, folded):
    return module(x, folded) if isinstance(module, MLP) else module(x, tokens, folded)


def inputs(name):
    module = MODULES[name]
    declared = param.declarations(module)
    x = jax.random.normal(jax.random.key(5), (B, S, D))
    return module, declared, param.initial_values(declared, 1, 0.3, 1), x, jax.random.normal(jax.random.key(6), x.shape)


def merged(module, values):
    return nnx.merge(nnx.graphdef(module), values)


@functools.cache
def alone(name):
    """Output and gradients of sum(output * cotangent) with respect to parameters and input, on one device."""
    module, _, values, x, cotangent = inputs(name)
    tokens = tokens_of(SEGMENTS["packed"])

    def weighed(values, x):
        y = call(merged(module, values), x, tokens, ALONE)
        return (y * cotangent).sum(), y

    (_, y), grads = quick_jit(jax.value_and_grad(weighed, argnums=(0, 1), has_aux=True))(values, x)
    return y, grads


# Four devices share two key-value heads in the second mesh.
MESHES = {"tp2": dict(dp=1, tp=2), "tp4": dict(dp=1, tp=4), "dp2 tp2": dict(dp=2, tp=2)}


@pytest.mark.parametrize(
    "name, mesh",
    [("gqa", "tp2"), ("gqa", "tp4"), ("mla", "tp4"), ("mla without query latent", "tp2"), ("mlp", "dp2 tp2")],
)
def test_splitting_heads_and_width_changes_nothing(name, mesh, devices):
    module, declared, values, x, cotangent = inputs(name)
    sizes = MESHES[mesh]
    folded = fold(sizes, dict(edp=sizes["dp"] * sizes["tp"]))
    places = param.placements(declared, folded)
    specs = jax.tree.map(lambda p: p.spec, places)
    rows, parts = P(folded.dense.dp), P(folded.dense.dp, folded.dense.sequence)

    def local(shards, x, cotangent, tokens):
        def weighed(shards, x):
            entered = param.enter(declared, places, shards, jnp.float32, Precision())
            y = call(merged(module, entered), x, tokens, folded)
            return (y * cotangent).sum(), y

        (_, y), grads = jax.value_and_grad(weighed, argnums=(0, 1), has_aux=True)(shards, x)
        return y, grads

    over = build_mesh(folded, devices[: folded.num_devices])
    function = quick_jit(sharded(local, over, (specs, parts, parts, rows), (parts, (specs, parts))))
    y, grads = function(values, x, cotangent, tokens_of(SEGMENTS["packed"]))
    want_y, want_grads = alone(name)
    np.testing.assert_allclose(y, want_y, atol=2e-6 * np.abs(want_y).max())
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True):
        np.testing.assert_allclose(got, want, atol=5e-6 * np.abs(want).max())


def test_gqa_by_its_formula():
    """Projection, norms of heads, rotation, the loop, projection back, in float64 from the same weights."""
    _, _, w, x, _ = inputs("gqa")
    wide = lambda a: np.asarray(a, np.float64)
    norm = lambda z, weight: z / np.sqrt((z**2).mean(axis=-1, keepdims=True) + 1e-6) * wide(weight)
    q, k, v = (np.einsum("bsd,dnh->bsnh", wide(x), wide(w[name])) for name in ("query", "key", "value"))
    q, k = norm(q, w["query_norm"]["weight"]), norm(k, w["key_norm"]["weight"])
    tokens = tokens_of(SEGMENTS["packed"])
    angles = tokens.positions[..., None] * 1e4 ** (-np.arange(4) / 4)
    cos, sin = np.cos(angles)[:, :, None], np.sin(angles)[:, :, None]
    turn = lambda z: np.concatenate([z[..., :4] * cos - z[..., 4:] * sin, z[..., 4:] * cos + z[..., :4] * sin], axis=-1)
    args = (tokens.segments, tokens.index)
    mixed = oracle.attention(turn(q), turn(k), v, *args, *args, 8**-0.5, window=5)
    want = np.einsum("bsnh,nhd->bsd", mixed, wide(w["out"]))
    np.testing.assert_allclose(alone("gqa")[0], want, atol=5e-6 * np.abs(want).max())


def test_mlp_by_its_formula():
    _, _, w, x, _ = inputs("mlp")
    want = np.array(
        [[oracle.mlp(np.float64(t), np.float64(w["gate_up"]), np.float64(w["down"])) for t in row] for row in x]
    )
    np.testing.assert_allclose(alone("mlp")[0], want, atol=2e-6 * np.abs(want).max())


def test_swiglu_computes_in_float32():
    x = jax.random.normal(jax.random.key(0), (5, 2, 8), jnp.bfloat16)
    got = swiglu(x)
    assert got.dtype == jnp.bfloat16
    gate, up = np.asarray(x, np.float64)[:, 0], np.asarray(x, np.float64)[:, 1]
    np.testing.assert_allclose(np.asarray(got, np.float64), gate / (1 + np.exp(-gate)) * up, rtol=2**-8)


def test_unpacked_rows_are_one_document():
    tokens = unpacked(2, 3)
    np.testing.assert_array_equal(tokens.segments, np.ones((2, 3)))
    np.testing.assert_array_equal(tokens.positions, [[0, 1, 2]] * 2)
