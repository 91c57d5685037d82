"""The decoder as a whole: packed documents don't see each other, padding changes nothing, padded vocabulary never wins."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.deepseek import tiny_deepseek
from configs.tiny import tiny
from mesh import ALONE
from moex.config import AttentionConfig, MemoryConfig, ModelConfig, RouterConfig
from moex.layers import param
from moex.layers.tokens import Tokens, unpacked
from moex.models.decoder import Decoder
from moex.train.loss import cross_entropy_sum, logits

SMALL = ModelConfig(
    vocab_size=61,
    vocab_multiple=16,
    d_model=16,
    num_layers=2,
    expert_width=24,
    init_std=0.3,
    attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, qk_norm=True),
    router=RouterConfig(num_experts=8, top_k=2),
)
A, B, PAD, S = 10, 14, 8, 32  # one row: document A, document B, padding


@functools.cache
def small():
    decoder = Decoder(SMALL)
    params = param.initial_values(decoder.declarations, 0, SMALL.init_std, SMALL.num_layers)

    @jax.jit
    def run(params, ids_BS, tokens):
        hidden, stats = decoder.hidden(params, None, ids_BS, tokens, ALONE, jnp.float32)
        flat = logits(hidden.reshape(-1, SMALL.d_model), decoder.head(params), ALONE, vocab_size=SMALL.vocab_size)
        return flat.reshape(*ids_BS.shape, -1), stats

    return decoder, params, run


def packed():
    segments = np.repeat([1, 2, 0], [A, B, PAD])
    positions = np.concatenate([np.arange(n) for n in (A, B, PAD)])
    return Tokens(*(np.asarray(x, np.int32)[None] for x in (segments, positions, np.arange(S))))


def ids(seed, length):
    return np.random.default_rng(seed).integers(0, SMALL.vocab_size, (1, length)).astype(np.int32)


def row(a, b, pad=7):
    return np.concatenate([ids(a, A), ids(b, B), np.full((1, PAD), pad, np.int32)], axis=1)


def test_documents_of_a_row_do_not_see_each_other():
    _, params, run = small()
    one, two = (np.asarray(run(params, row(a, 5), packed())[0]) for a in (1, 2))
    assert np.abs(one[:, :A] - two[:, :A]).max() > 0.1
    np.testing.assert_array_equal(one[:, A : A + B], two[:, A : A + B])


def test_a_packed_document_is_as_if_alone():
    _, params, run = small()
    together = np.asarray(run(params, row(1, 5), packed())[0])[:, A : A + B]
    length = np.pad(ids(5, B), ((0, 0), (0, S - B)))
    tokens = unpacked(1, S)
    tokens = tokens._replace(segments=(tokens.index < B).astype(jnp.int32))
    alone = np.asarray(run(params, length, tokens)[0])[:, :B]
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-6 * np.abs(alone).max())


def test_padding_changes_nothing():
    _, params, run = small()
    (one, stats), (two, other) = (run(params, row(1, 5, pad), packed()) for pad in (7, 50))
    np.testing.assert_array_equal(np.asarray(one)[:, : A + B], np.asarray(two)[:, : A + B])
    assert np.isfinite(one).all()
    jax.tree.map(np.testing.assert_array_equal, stats, other)
    assert stats.counts_E.sum(axis=-1).tolist() == [(A + B) * SMALL.router.top_k] * SMALL.num_layers


def test_later_tokens_do_not_reach_earlier_ones():
    _, params, run = small()
    first, second = row(1, 5), row(1, 5)
    second[0, 6] = (second[0, 6] + 1) % SMALL.vocab_size
    one, two = (np.asarray(run(params, x, packed())[0]) for x in (first, second))
    np.testing.assert_array_equal(one[:, :6], two[:, :6])
    assert (one[:, 6:A] != two[:, 6:A]).any(axis=-1).all()


def test_padded_vocabulary_never_wins_and_never_learns():
    _, params, run = small()
    assert SMALL.padded_vocab_size == 64
    # Whatever stands in the padding rows of the head, they are out of the softmax.
    spoilt = params | dict(ends=params["ends"] | dict(head=params["ends"]["head"].at[61:].set(1e3)))
    for tree in (params, spoilt):
        got = np.asarray(run(tree, row(1, 5), packed())[0])
        assert got.argmax(axis=-1).max() < 61
        np.testing.assert_allclose(np.exp(got - got.max(axis=-1, keepdims=True))[..., 61:], 0)
    np.testing.assert_array_equal(params["ends"]["embedding"][61:], 0)
    np.testing.assert_array_equal(params["ends"]["head"][61:], 0)
    grad = jax.grad(
        lambda head: cross_entropy_sum(
            jnp.ones((1, 4, 16)), head, ids(3, 4), np.ones((1, 4), bool), ALONE, vocab_size=61, chunk_tokens=3
        )
    )(spoilt["ends"]["head"])
    np.testing.assert_array_equal(grad[61:], 0)
    assert np.abs(grad[:61]).max() > 0


def test_loss_in_chunks_is_the_whole_cross_entropy():
    x = jax.random.normal(jax.random.key(0), (2, 5, 16))
    head = jnp.asarray(small()[1]["ends"]["head"])
    labels, mask = ids(4, 10).reshape(2, 5), np.arange(10).reshape(2, 5) % 3 > 0
    wide = np.asarray(x, np.float64) @ np.asarray(head, np.float64)[:61].T
    log_p = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    want = -(np.take_along_axis(log_p, labels[..., None], axis=-1)[..., 0] * mask).sum()
    for chunk in (1, 4, 10, 99):
        got = cross_entropy_sum(x, head, labels, mask, ALONE, vocab_size=61, chunk_tokens=chunk)
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_tied_embeddings_have_no_head_of_their_own():
    decoder = Decoder(dataclasses.replace(SMALL, tie_embeddings=True))
    assert "head" not in decoder.declarations["ends"]
    params = dict(ends=dict(embedding=jnp.ones((64, 16))))
    assert decoder.head(params) is params["ends"]["embedding"]


@pytest.mark.parametrize("config", [tiny().model, tiny_deepseek().model, SMALL])
def test_stacks_are_those_of_the_configuration(config):
    tree = param.abstract(Decoder(config).declarations)
    lengths = {name: {x.shape[0] for x in jax.tree.leaves(tree[name])} for name in tree if name != "ends"}
    want = dict(dense_layers=config.num_dense_layers, moe_layers=config.num_moe_layers)
    assert lengths == {name: {count} for name, count in want.items() if count}


@functools.cache
def gradients(recompute):
    """Of a loss over one packed row and all router weights zero, so that every choice of experts is a tie."""
    zero_routers = lambda path, x: x * 0 if "'router'" in jax.tree_util.keystr(path) else x
    params = jax.tree_util.tree_map_with_path(zero_routers, small()[1])
    decoder = Decoder(SMALL, memory=MemoryConfig(recompute=recompute))

    def loss(params):
        hidden, stats = decoder.hidden(params, None, row(1, 5), packed(), ALONE, jnp.float32)
        return jnp.square(hidden - 0.5).sum(), stats.counts_E

    return jax.device_get(jax.jit(jax.grad(loss, has_aux=True))(params))


@pytest.mark.parametrize("modules", [("layer",), ("attention", "experts")])
def test_recompute_routes_ties_as_before(modules):
    """The compiler may round a recomputed sum otherwise (1e-6); another expert for one token would show at once."""
    (plain, counts), (again, again_counts) = gradients(()), gradients(modules)
    np.testing.assert_array_equal(counts, [[A + B, A + B] + [0] * 6] * 2)
    np.testing.assert_array_equal(again_counts, counts)
    for got, want in zip(jax.tree.leaves(again), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max())
