"""Documents of a row never reach each other, however the sequence is split: the whole decoder, to its logits.

Two rows of 32 tokens. The first holds document A (12 tokens), document B (12) and padding (8), the second one document.
The split is zig-zag and its chunks cut through both documents; experts lie over the same devices, with room for any routing.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mesh import build_mesh, fold, sharded
from moex.config import AttentionConfig, ModelConfig, ParallelConfig, RouterConfig
from moex.layers import param
from moex.layers.context import zigzag_order
from moex.layers.tokens import Tokens
from moex.models.decoder import Decoder
from moex.precision.recipes import Precision
from moex.train.loss import logits
from tests.quick import quick_jit

A, B, PAD, S = slice(0, 12), slice(12, 24), slice(24, 32), 32
GQA = ModelConfig(
    vocab_size=61, vocab_multiple=16, d_model=16, num_layers=2, expert_width=24, init_std=0.3,
    attention=AttentionConfig(num_heads=4, num_kv_heads=4, head_dim=8, qk_norm=True),
    router=RouterConfig(num_experts=8, top_k=2),
)  # fmt: skip
MODELS = dict(
    gqa=GQA,
    windowed=dataclasses.replace(GQA, attention=dataclasses.replace(GQA.attention, sliding_window=5)),
    mla=dataclasses.replace(
        GQA,
        attention=AttentionConfig(
            kind="mla",
            num_heads=4,
            num_kv_heads=4,
            head_dim=8,
            rope_dim=4,
            value_dim=8,
            q_latent_dim=16,
            kv_latent_dim=12,
        ),
    ),
)
SETUPS = [(model, "gather", 1) for model in MODELS]  # over one device there is nothing to bring together
SETUPS += [("gqa", method, cp) for method in ("gather", "ring", "ulysses") for cp in (2, 4)]
SETUPS += [("windowed", "ring", 4), ("windowed", "ulysses", 2), ("mla", "ring", 2), ("mla", "gather", 4)]
SETUPS += [(model, "hierarchical", 4) for model in MODELS]
every_setup = pytest.mark.parametrize("model, method, cp", SETUPS)


@functools.cache
def compiled(model, method, cp):
    """(ids, segments, positions), all [2, S] -> logits [2, S, V] of the true vocabulary, as numpy arrays."""
    config, folded = MODELS[model], fold(dict(cp=cp), dict(ep=cp))
    ulysses = 2 if method == "hierarchical" else 1
    transport = "alltoall" if cp > 1 else "local"
    parallel = ParallelConfig(cp=cp, ep=cp, context=method, ulysses=ulysses, transport=transport)
    decoder = Decoder(config, parallel)
    params = param.initial_values(decoder.declarations, 0, config.init_std, config.num_layers)
    places = param.placements(decoder.declarations, folded)
    specs = jax.tree.map(lambda p: p.spec, places)

    def local(shards, ids_BS, tokens):
        weights = param.enter(decoder.declarations, places, shards, jnp.float32, Precision())
        hidden_BSD, stats = decoder.hidden(weights, None, ids_BS, tokens, folded, jnp.float32)
        flat = logits(
            hidden_BSD.reshape(-1, config.d_model), decoder.head(weights), folded, vocab_size=config.vocab_size
        )
        return flat.reshape(*ids_BS.shape, -1), stats.overflow

    parts = P(folded.dense.dp, folded.dense.cp)
    mesh = build_mesh(folded, jax.devices()[:cp])
    function = quick_jit(sharded(local, mesh, (specs, parts, parts), (parts, P())))
    order = zigzag_order(S, cp)

    def run(ids, segments, positions):
        index = np.tile(np.arange(S, dtype=np.int32), (2, 1))
        tokens = Tokens(*(x[:, order] for x in (segments, positions, index)))
        scores, overflow = jax.device_get(function(params, ids[:, order], tokens))
        np.testing.assert_array_equal(overflow, 0)
        return scores[:, np.argsort(order), : config.vocab_size]

    return run


def text(seed, length):
    return np.random.default_rng(seed).integers(0, GQA.vocab_size, length).astype(np.int32)


def rows(*, a=1, b=2, pad=3):
    """ids, segments, positions."""
    ids = np.stack([np.concatenate([text(a, 12), text(b, 12), text(pad, 8)]), text(4, S)])
    segments = np.stack([np.repeat([1, 2, 0], [12, 12, 8]), np.ones(S)]).astype(np.int32)
    positions = np.stack([np.concatenate([np.arange(12), np.arange(12), np.zeros(8)]), np.arange(S)]).astype(np.int32)
    return ids, segments, positions


def b_alone(b=2):
    ids, segments, positions = rows()
    ids[0], segments[0], positions[0] = 0, 0, 0
    ids[0, :12], segments[0, :12], positions[0, :12] = text(b, 12), 1, np.arange(12)
    return ids, segments, positions


@every_setup
def test_another_neighbour_moves_no_bit(model, method, cp):
    """Also not through the experts that documents share: a row's product depends on the row and its expert alone."""
    run = compiled(model, method, cp)
    one, two = run(*rows(a=1)), run(*rows(a=11))
    assert np.abs(one[0, A] - two[0, A]).max() > 0.1
    np.testing.assert_array_equal(one[0, B], two[0, B])
    np.testing.assert_array_equal(one[1], two[1])
    changed = run(*rows(b=12))
    np.testing.assert_array_equal(changed[0, A], one[0, A])
    assert np.abs(changed[0, B] - one[0, B]).max() > 0.1


@every_setup
def test_padding_moves_no_bit(model, method, cp):
    run = compiled(model, method, cp)
    one, two = run(*rows(pad=3)), run(*rows(pad=13))
    assert np.isfinite(one).all()
    np.testing.assert_array_equal(one[0, : PAD.start], two[0, : PAD.start])
    np.testing.assert_array_equal(one[1], two[1])


@every_setup
def test_a_packed_document_is_as_if_alone_at_the_start_of_its_row(model, method, cp):
    """Its chunks then lie on other devices and its blocks of keys end elsewhere, so sums may round in another way."""
    run = compiled(model, method, cp)
    together, alone = run(*rows())[0, B], run(*b_alone())[0, :12]
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-6 * np.abs(alone).max())


@pytest.mark.parametrize("model, method, cp", [setup for setup in SETUPS if setup[2] > 1])
def test_every_split_gives_the_logits_of_one_device(model, method, cp):
    """Blocks of keys are summed in another order: up to 1.3e-6 of the largest logit was seen, rounding of float32."""
    split, whole = (compiled(model, *how)(*rows()) for how in ((method, cp), ("gather", 1)))
    real = rows()[1] > 0
    np.testing.assert_allclose(split[real], whole[real], rtol=0, atol=2e-6 * np.abs(whole[real]).max())
