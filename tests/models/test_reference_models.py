"""The one decoder, configured as each family, equals the reference implementation: logits, loss, every gradient.

Tiny public checkpoints with random weights stand in tests/goldens/hf; they are read as `moex.hf` imports them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moex.layers import param
from moex.layers.router import balance_loss
from moex.models.decoder import Decoder
from tests.models.golden import FOLDINGS, NAMES, golden, loaded, program_on, results

LOGITS = 1e-5
GRADIENTS = 2e-5  # of the largest entry of a tensor
SPLIT = [folding for folding in FOLDINGS if folding != "one"]
# Each family on one device and on one of the foldings; all of them by benchmarks/reference_models.py.
CASES = [(name, "one") for name in NAMES] + [(name, SPLIT[i % len(SPLIT)]) for i, name in enumerate(NAMES)]
every_case = pytest.mark.parametrize("name, folding", CASES)


def test_all_families_are_here():
    assert set(NAMES) == {
        "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss", "olmoe", "glm4_moe"
    }  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_gets_its_numbers(name):
    """Pieces fill all of every parameter but the rows past the vocabulary, and no public tensor is left."""
    g = golden(name)
    assert {piece.tensor for piece in g.pieces} == g.folder.tensors.keys()
    values = jax.device_get(loaded(g, program_on(g.config, "one")))
    sizes = {name: x.size for name, x in values.items() if name != "router_bias"}
    public = sum(int(np.prod(t.shape)) for n, t in g.folder.tensors.items() if not n.endswith("correction_bias"))
    model = g.config.model
    padding = (model.padded_vocab_size - model.vocab_size) * model.d_model * (1 if model.tie_embeddings else 2)
    assert sum(sizes.values()) == public + padding
    shapes = {}
    param.named_map(lambda n, d: shapes.update({n: d.full_shape}), Decoder(model).declarations)
    assert {name: values[name].shape for name in sizes} == shapes
    assert all((values[name] != 0).all() for name in sizes if not name.startswith("ends."))


@every_case
def test_logits(name, folding):
    want = golden(name).expected["logits"]
    got = results(name, folding).logits[..., : want.shape[-1]]
    np.testing.assert_allclose(got, want, rtol=0, atol=LOGITS * np.abs(want).max())


@every_case
def test_loss(name, folding):
    np.testing.assert_allclose(results(name, folding).loss, golden(name).expected["loss"][0], rtol=1e-6)


@every_case
def test_every_gradient(name, folding):
    want, got = golden(name).gradients, results(name, folding).gradients
    assert got.keys() == want.keys()
    error = {key: np.abs(got[key] - want[key]).max() for key in want}
    wrong = {key: e for key, e in error.items() if not e <= GRADIENTS * np.abs(want[key]).max()}
    assert not wrong


@every_case
def test_router_logits_by_what_follows_from_them(name, folding):
    """Choices without bias and groups, their counts and the balance loss of each layer, from the reference's logits."""
    g, sums = golden(name), results(name, folding).sums
    router, layers = g.config.model.router, g.config.model.num_moe_layers
    for layer in range(layers):
        logits = g.expected[f"router_logits.{layer}"]
        top = np.argsort(-logits, axis=-1, kind="stable")[:, : router.top_k]
        np.testing.assert_array_equal(sums.plain_LE[layer], np.bincount(top.reshape(-1), minlength=router.num_experts))


@pytest.mark.parametrize("name", [name for name in NAMES if "aux_loss" in golden(name).expected])
def test_balance_loss(name):
    """The reference joins all layers' tokens in one batch and counts a token's k choices k times, so it is k times ours."""
    g = golden(name)
    router = g.config.model.router
    joined = jnp.concatenate([g.expected[f"router_logits.{i}"] for i in range(g.config.model.num_moe_layers)])
    got = router.top_k * balance_loss(joined, None, router)
    np.testing.assert_allclose(got, g.expected["aux_loss"][0], rtol=1e-6)
