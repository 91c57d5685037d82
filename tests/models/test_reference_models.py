"""Whole models against the reference implementation (transformers 5.24, float32, CPU): logits, loss, every gradient.

Tiny public checkpoints with random weights stand in tests/goldens/hf; `checkpoint.py` maps them to moex's parameters.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesh import ALONE
from moex.layers import param
from moex.layers.router import balance_loss
from moex.layers.tokens import unpacked
from moex.models.decoder import Decoder
from moex.train.loss import cross_entropy_sum, logits
from tests.models.checkpoint import CONFIGS, Golden
from tests.quick import quick_jit

LOGITS = 1e-5
GRADIENTS = 2e-5  # of the largest entry of a layer's, or an expert's, tensor


@functools.cache
def golden(name):
    return Golden(name)


@functools.cache
def ours(name):
    """Logits [B, S, V], mean loss, gradients, router counts: one compiled program a model."""
    g = golden(name)
    decoder = Decoder(g.config)
    ids = g.expected["input_ids"]
    tokens = unpacked(*ids.shape)
    labels = np.roll(ids, -1, axis=1)
    mask = np.broadcast_to(np.arange(ids.shape[1]) < ids.shape[1] - 1, ids.shape)

    def loss(params):
        hidden, stats = decoder.hidden(params, g.bias_LE, ids, tokens, ALONE, jnp.float32)
        head, size = decoder.head(params), g.config.vocab_size
        nll = cross_entropy_sum(hidden, head, labels, mask, ALONE, vocab_size=size, chunk_tokens=16)
        flat = logits(hidden.reshape(-1, g.config.d_model), head, ALONE, vocab_size=size)
        return nll / mask.sum(), (flat.reshape(*ids.shape, -1), stats)

    (value, (logits_BSV, stats)), gradients = quick_jit(jax.value_and_grad(loss, has_aux=True))(g.params)
    return jax.device_get((logits_BSV, value, gradients, stats))


@pytest.fixture(scope="module", params=CONFIGS)
def name(request):
    return request.param


def test_every_public_tensor_has_its_place(name):
    g = golden(name)
    biases = {f"model.layers.{i}.mlp.gate.e_score_correction_bias" for i in range(g.config.num_layers)}
    assert g.unread <= biases
    assert not g.unread_gradients
    shapes = jax.tree.map(lambda x: x.shape, param.abstract(Decoder(g.config).declarations))
    assert jax.tree.map(lambda x: x.shape, g.params) == shapes


def test_logits(name):
    g = golden(name)
    got = ours(name)[0][..., : g.config.vocab_size]
    np.testing.assert_allclose(got, g.expected["logits"], rtol=0, atol=LOGITS * np.abs(g.expected["logits"]).max())


def test_loss(name):
    np.testing.assert_allclose(ours(name)[1], golden(name).expected["loss"][0], rtol=1e-6)


def own_tensors(tree):
    """Name and value of every layer's and expert's own tensor."""
    for path, value in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path)
        lead = ("_layers" in name) + ("'experts'" in name)
        for at in np.ndindex(value.shape[:lead]):
            yield f"{name}{list(at)}", value[at]


def test_every_gradient(name):
    want, got = dict(own_tensors(golden(name).gradients)), dict(own_tensors(ours(name)[2]))
    assert got.keys() == want.keys()
    error = {key: np.abs(got[key] - want[key]).max() for key in want}
    wrong = {key: e for key, e in error.items() if not e <= GRADIENTS * np.abs(want[key]).max()}
    assert not wrong


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_counts_are_those_of_the_reference_routers(name):
    """Plain top-k of the reference's router logits: neither a bias nor groups take part in these two."""
    g = golden(name)
    for layer, counts in enumerate(ours(name)[3].counts_E):
        top = np.argsort(-g.expected[f"router_logits.{layer}"], axis=-1, kind="stable")[:, : g.config.router.top_k]
        np.testing.assert_array_equal(counts, np.bincount(top.reshape(-1), minlength=g.config.router.num_experts))


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_balance_loss(name):
    """The reference joins all layers' tokens in one batch and counts a token's k choices k times, so it is k times ours."""
    g = golden(name)
    router = g.config.router
    joined = jnp.concatenate([g.expected[f"router_logits.{i}"] for i in range(g.config.num_layers)])
    got = router.top_k * balance_loss(joined, None, router)
    np.testing.assert_allclose(got, g.expected["aux_loss"][0], rtol=1e-6)
    per_layer = [balance_loss(g.expected[f"router_logits.{i}"], None, router) for i in range(g.config.num_layers)]
    np.testing.assert_allclose(ours(name)[3].balance_loss, per_layer, rtol=1e-4)
