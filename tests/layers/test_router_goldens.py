"""The router against Megatron-Core 0.16.1: stored weights, choices, losses and gradients, equal to 1e-6.

The files keep its dense form: probs [T, E] with zeros elsewhere, a map of the choices, gradients with respect to logits
under a fixed cotangent. Its losses came with the coefficients 0.01 (balance) and 0.001 (z).
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from mesh import ALONE
from moex import dispatch
from moex.config import RouterConfig
from moex.layers.router import balance_loss, route, update_bias, z_loss

FOLDER = Path(__file__).parents[1] / "goldens" / "router"
FILES = sorted(path.stem for path in FOLDER.glob("*.safetensors"))
CLOSE = dict(rtol=1e-6, atol=1e-6)


def load(name):
    with safe_open(FOLDER / f"{name}.safetensors", "np") as file:
        arguments = json.loads(file.metadata()["args"])
        return arguments, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)


def config_of(a):
    groups = a.get("num_groups") or 1
    kept = a.get("group_topk") or 1
    softmax = a.get("score_function", "softmax") == "softmax"
    return RouterConfig(
        num_experts=a["E"],
        top_k=a["K"],
        score_function="softmax" if softmax else "sigmoid",
        renormalize=not a.get("use_pre_softmax", False) if softmax else True,
        scaling_factor=a.get("scaling_factor", 1.0),
        num_groups=groups,
        top_groups=kept,
        group_score_top=max(1, a["K"] // kept),  # Megatron's rule; DeepSeek-V3's K=8, kept=4 makes it 2
    )


@pytest.fixture(scope="module", params=FILES)
def golden(request):
    arguments, arrays = load(request.param)
    return config_of(arguments), arrays


def dense(routing, num_experts):
    """[T, E] weights and choices of a Routing."""
    rows = jnp.arange(routing.experts_Tk.shape[0])[:, None]
    zeros = jnp.zeros((rows.shape[0], num_experts))
    return zeros.at[rows, routing.experts_Tk].set(routing.weights_Tk), zeros.at[rows, routing.experts_Tk].set(1)


def test_all_kinds_of_router_are_here():
    assert {"softmax_post", "softmax_pre", "softmax_pre_grouped", "sigmoid_bias_grouped", "top1_sigmoid"} <= set(FILES)


def test_choices_weights_and_gradients(golden):
    config, want = golden
    bias = want.get("expert_bias")

    def weighed(logits):
        routing = route(logits, bias, config)
        probs, chosen = dense(routing, config.num_experts)
        return (probs * want["cotangent"]).sum(), (probs, chosen, routing.counts_E)

    (_, (probs, chosen, counts)), grad = jax.jit(jax.value_and_grad(weighed, has_aux=True))(jnp.asarray(want["logits"]))
    np.testing.assert_array_equal(chosen, want["routing_map"])
    np.testing.assert_allclose(probs, want["probs"], **CLOSE)
    np.testing.assert_allclose(grad, want["grad_logits"], **CLOSE)
    np.testing.assert_array_equal(counts, want["routing_map"].sum(axis=0, dtype=np.int32))


@pytest.mark.parametrize("name, coefficient", [("aux", 0.01), ("z", 0.001)])
def test_losses_and_gradients(golden, name, coefficient):
    config, want = golden
    loss = dict(aux=lambda x: balance_loss(x, None, config), z=lambda x: z_loss(x, None))[name]
    value, grad = jax.jit(jax.value_and_grad(loss))(jnp.asarray(want["logits"]))
    np.testing.assert_allclose(value, want[f"{name}_loss"][0] / coefficient, rtol=1e-6)
    scale = np.abs(want[f"{name}_loss_grad_logits"]).max() / coefficient
    np.testing.assert_allclose(grad / scale, want[f"{name}_loss_grad_logits"] / coefficient / scale, atol=5e-6)


def test_bias_update():
    arguments, want = load("sigmoid_bias_grouped")
    counts = jnp.asarray(want["routing_map"].sum(axis=0, dtype=np.int32))
    got = update_bias(jnp.asarray(want["expert_bias"]), counts, 1e-3)
    np.testing.assert_allclose(got, want["updated_expert_bias"], rtol=0, atol=1e-8)
    assert counts.sum() == arguments["T"] * arguments["K"]


def test_permuted_rows_and_weights_and_their_way_back(golden):
    """The order of rows (expert, then token) and unpermuting: the sum of a token's weighed rows."""
    config, want = golden

    @jax.jit
    def there_and_back(logits, tokens):
        routing = route(logits, want.get("expert_bias"), config)
        plan = dispatch.plan("local", routing.experts_Tk, config.num_experts, ALONE)
        rows = dispatch.send("local", tokens, plan, ALONE)
        weights = dispatch.send_pairs("local", routing.weights_Tk, plan, ALONE)
        return rows, weights, dispatch.combine("local", rows * weights[:, None], plan, ALONE)

    rows, weights, tokens = there_and_back(want["logits"], want["tokens"])
    np.testing.assert_array_equal(rows, want["permuted_tokens"])
    np.testing.assert_allclose(weights, want["permuted_probs"], **CLOSE)
    np.testing.assert_allclose(tokens, want["unpermuted_tokens"], rtol=1e-5, atol=1e-6)
