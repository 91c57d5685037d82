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
from moex import balance, dispatch
from moex.config import RouterConfig
from moex.layers.router import apply_capacity, balance_loss, route, sequence_balance_loss, update_bias, z_loss

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
        capacity_factor=a["capacity_factor"] or 0.0,
        capacity_policy=dict(probs="probability", position="position")[a["drop_policy"]],
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
    zeros = jnp.zeros((rows.shape[0], num_experts + 1))  # the last column is nobody's
    at = rows, routing.experts_Tk
    return zeros.at[at].set(routing.weights_Tk)[:, :-1], zeros.at[at].set(1)[:, :-1]


def test_all_kinds_of_router_are_here():
    assert {*SEQUENCES, *CAPACITIES} <= set(FILES)
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


SEQUENCES = ["softmax_pre_grouped", "sigmoid_bias_grouped"]


@pytest.mark.parametrize("name", SEQUENCES)
def test_sequence_loss_and_gradient(name):
    """Tokens came as [sequence, batch] flattened, so a token's sample is its number modulo the batch."""
    arguments, want = load(name)
    config, batch = config_of(arguments), arguments["T"] // arguments["seqlen"]
    segments = jnp.arange(arguments["T"], dtype=jnp.int32) % batch + 1
    loss = lambda x: sequence_balance_loss(x, segments, config, num_segments=batch)
    value, grad = jax.jit(jax.value_and_grad(loss))(jnp.asarray(want["logits"]))
    np.testing.assert_allclose(value, want["seq_aux_loss"][0] / 0.01, rtol=1e-6)
    scale = np.abs(want["seq_aux_loss_grad_logits"]).max() / 0.01
    np.testing.assert_allclose(grad / scale, want["seq_aux_loss_grad_logits"] / 0.01 / scale, atol=5e-6)


CAPACITIES = ["capacity_probs", "capacity_position_pad"]


@pytest.mark.parametrize("name", CAPACITIES)
def test_dropping_by_capacity(name):
    """The dropped map and probabilities; where experts are padded, Megatron's map names fillers of probability 0 too.

    By position it takes `torch.topk` of equal numbers, which keeps any of them: of an expert over capacity in its file
    (number 0) only how many are kept can be compared, and ours are the first.
    """
    arguments, want = load(name)
    config, logits = config_of(arguments), jnp.asarray(want["logits"])
    routing = route(logits, None, config)
    capacity = balance.capacity_of(arguments["T"], config)
    assert capacity == int(want["capacity"][0])
    kept = apply_capacity(*routing, capacity, config.capacity_policy)
    probs, chosen = dense(kept, config.num_experts)
    want_map = want["dropped_map"] * want["routing_map"]
    over = np.flatnonzero(want["routing_map"].sum(axis=0) > capacity)
    assert len(over) > 0, "nothing is dropped in this file"
    if config.capacity_policy == "position":
        for expert in over:
            first = np.flatnonzero(want["routing_map"][:, expert])[:capacity]
            np.testing.assert_array_equal(np.flatnonzero(chosen[:, expert]), first)
        same = np.setdiff1d(np.arange(config.num_experts), over)
    else:
        same = np.arange(config.num_experts)
    np.testing.assert_array_equal(np.asarray(chosen)[:, same], want_map[:, same])
    np.testing.assert_array_equal(np.asarray(chosen).sum(axis=0), want_map.sum(axis=0))
    np.testing.assert_allclose(np.asarray(probs)[:, same], want["dropped_probs"][:, same], **CLOSE)
    np.testing.assert_array_equal(kept.counts_E, np.asarray(chosen).sum(axis=0))
    tokens, weights = balance.capacity_slots(*routing[:2], config.num_experts, capacity, policy=config.capacity_policy)
    assert tokens.shape == (config.num_experts, capacity)
    if arguments["pad_to_capacity"]:
        np.testing.assert_array_equal(want["dropped_map"].sum(axis=0), capacity)
        assert (np.asarray(tokens) < 0).any()
    for expert in range(config.num_experts):
        real = np.asarray(tokens[expert])[: int(kept.counts_E[expert])]
        assert set(real.tolist()) == set(np.flatnonzero(chosen[:, expert]).tolist())
        np.testing.assert_array_equal(np.asarray(weights[expert])[: len(real)], np.asarray(probs)[real, expert])
        np.testing.assert_array_equal(np.asarray(weights[expert])[len(real) :], 0)


def test_bias_update():
    arguments, want = load("sigmoid_bias_grouped")
    counts = jnp.asarray(want["routing_map"].sum(axis=0, dtype=np.int32))
    got = update_bias(jnp.asarray(want["expert_bias"]), counts, 1e-3)
    np.testing.assert_allclose(got, want["updated_expert_bias"], rtol=0, atol=1e-8)
    assert counts.sum() == arguments["T"] * arguments["K"]


@pytest.mark.parametrize("name", [name for name in FILES if "tokens" in load(name)[1]])
def test_permuted_rows_and_weights_and_their_way_back(name):
    """The order of rows (expert, then token) and unpermuting: the sum of a token's weighed rows."""
    arguments, want = load(name)
    config = config_of(arguments)

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
