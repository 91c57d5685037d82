"""Latent experts, biases, clamped SwiGLU, a learned logit bias and a gated shared expert, token by token in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mesh import ALONE
from moex.config import ModelConfig, RouterConfig
from moex.layers import param
from moex.layers.experts import expert_mlp
from moex.layers.moe import MoE
from pallas_kernels.swiglu import GPT_OSS
from tests.quick import quick_jit

D, T = 8, 12
CONFIG = ModelConfig(
    d_model=D, expert_width=6, latent_width=4, shared_width=5, shared_gate=True, expert_bias=True, swiglu_limit=0.7,
    router=RouterConfig(num_experts=4, top_k=2, logit_bias=True),
)  # fmt: skip
sigmoid = lambda x: 1 / (1 + np.exp(-x))


def by_hand(w, x):
    """One token, [D] -> [D]: router, latent projections, clamped experts with biases, gated shared expert."""
    logits = x @ w["router"]["weight"] + w["router"]["bias"]
    chosen = np.argsort(-logits, kind="stable")[:2]
    weights = np.exp(logits[chosen] - logits[chosen].max())
    weights /= weights.sum()
    narrow, experts = x @ w["latent_down"], w["experts"]
    y = np.zeros(4)
    for weight, e in zip(weights, chosen, strict=True):
        gate, up = (narrow @ experts["gate_up"][e, :, i] + experts["gate_up_bias"][e, i] for i in (0, 1))
        gate, up = np.minimum(gate, 0.7), np.clip(up, -0.7, 0.7)
        hidden = gate * sigmoid(1.702 * gate) * (up + 1)
        y += weight * (hidden @ experts["down"][e] + experts["down_bias"][e])
    gate, up = (x @ w["shared"]["gate_up"][:, i] for i in (0, 1))
    shared = (gate * sigmoid(gate) * up) @ w["shared"]["down"]
    return y @ w["latent_up"] + sigmoid(x @ w["shared_gate"]) * shared


def drawn():
    """Weights of which none is zero."""
    rng = np.random.default_rng(0)
    shapes = param.abstract(param.declarations(MoE(CONFIG)))
    return jax.tree.map(lambda x: (0.6 * rng.normal(size=x.shape)).astype(np.float32), shapes)


def test_each_token_by_hand():
    module, values = MoE(CONFIG), drawn()
    x = np.random.default_rng(1).normal(size=(1, T, D)).astype(np.float32)
    run = lambda values, x: nnx.merge(nnx.graphdef(module), values)(x, None, np.ones((1, T), bool), ALONE)[0]
    got = quick_jit(run)(values, x)
    wide = jax.tree.map(np.float64, values)
    want = np.stack([by_hand(wide, np.float64(token)) for token in x[0]])
    np.testing.assert_allclose(got[0], want, atol=5e-6 * np.abs(want).max())


@pytest.mark.parametrize("sizes", [[3, 0, 4], [0, 0, 0], [7, 0, 0]])
def test_rows_past_the_last_expert_are_zero_and_teach_no_bias(sizes):
    """Also rows that hold anything, as what a stash gives back does."""
    rng = np.random.default_rng(2)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    weights = draw(3, D, 12), draw(3, 6, D), draw(3, 12), draw(3, D)
    rows, scale, used = draw(9, D), draw(9), sum(sizes)

    def run(rows, scale, *weights):
        return expert_mlp(rows, scale, jnp.array(sizes), *weights, activation=GPT_OSS)

    out, pull = jax.vjp(run, rows, scale, *weights)
    np.testing.assert_array_equal(out[used:], 0)
    some = np.where(np.arange(9)[:, None] < used, np.float32(1), np.float32(1e3))
    clean = np.where(np.arange(9)[:, None] < used, np.float32(1), np.float32(0))
    for given, want in zip(
        pull(jnp.broadcast_to(some, out.shape))[4:], pull(jnp.broadcast_to(clean, out.shape))[4:], strict=True
    ):
        np.testing.assert_array_equal(given, want)
    assert np.abs(pull(jnp.ones_like(out))[5]).max() > 0 or used == 0
