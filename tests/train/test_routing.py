"""Routing in the step: balance losses that enter it, biases it moves, choices it records, replays and drops."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesh import ALONE
from moex.balance import centred, update_bias
from moex.config import MemoryConfig, ParallelConfig, PrecisionConfig
from moex.layers import passage, router
from moex.layers.moe import Steering
from moex.layers.tokens import Tokens
from moex.train.placing import place_batch
from moex.train.program import build
from moex.validate import resolve_fold
from tests.quick import quickly

SPLIT = ParallelConfig(cp=2, tp=2, ep=4, transport="alltoall")


def with_router(harness, model="gqa", **fields):
    """A tiny model with these router fields, no others on."""
    base = harness.MODELS[model]
    losses = ("aux_coefficient", "sequence_coefficient", "global_coefficient", "z_coefficient")
    off = dict.fromkeys((*losses, "bias_rate"), 0.0)
    return dataclasses.replace(base, router=dataclasses.replace(base.router, **off | fields))


def step(harness, config, num_devices=1, *, state=None, at=0, seed=0):
    """State and metrics, as numpy, after one step."""
    program = harness.program(config, num_devices)
    state = program.initial_state() if state is None else harness.place_state(program, state)
    return jax.device_get(program.train(state, harness.put(program, harness.rows(config, seed=seed), at)))


def start(harness, config, num_devices=1):
    """The initial state as arrays that can be written to."""
    return jax.tree.map(np.array, jax.device_get(harness.program(config, num_devices).initial_state()))


# --- losses ---------------------------------------------------------------------------------------------------------


def test_a_router_of_zeros_loses_exactly_one_in_each_balance_loss(harness):
    """E=8, k=2: the three losses are 1, whatever the micro-batches; MaxText's differ by the number of shards."""
    model = with_router(harness, aux_coefficient=0.5, sequence_coefficient=0.25, global_coefficient=0.125)
    config = harness.config(model, accumulation=4)
    values = start(harness, config)
    values.params["moe_layers"]["moe"]["router"]["weight"] *= 0
    _, metrics = step(harness, config, state=values)
    for name in ("aux_loss", "sequence_loss", "global_loss"):
        assert metrics[name] == 1.0, name
    added = metrics["loss"] - metrics["lm_loss"]
    np.testing.assert_allclose(added, 0.875 * model.num_moe_layers, rtol=1e-5)


def test_the_global_loss_counts_the_steps_earlier_micro_batches(harness):
    """The mean of what each layer says when it is told the choices of the micro-batches before."""
    model = with_router(harness, global_coefficient=0.1)
    config = harness.config(model, accumulation=4)
    _, metrics = step(harness, config)
    program, rows = harness.program(config, 1), harness.rows(config)
    params = program.initial_state().params
    losses = list(_global_losses(config, program.decoder, params, rows))
    np.testing.assert_allclose(metrics["global_loss"], np.mean(losses), rtol=1e-5)
    assert metrics["global_loss"] < metrics["aux_loss"], "what is uneven in one micro-batch evens out over several"


def _global_losses(config, decoder, params, rows):
    seen = np.zeros((config.model.num_moe_layers, config.model.router.num_experts), np.int32)
    for i in range(config.train.accumulation):
        segments, positions = rows["segments"][i], rows["positions"][i]
        index = np.broadcast_to(np.arange(segments.shape[1], dtype=np.int32), segments.shape)
        tokens = Tokens(segments, positions, index)
        steering = Steering(jnp.zeros(seen.shape), jnp.asarray(seen))
        _, stats = jax.jit(
            lambda ids, tokens, steering: decoder.hidden(
                params, steering, ids, tokens, ALONE, jnp.float32, training=True
            )
        )(rows["tokens"][i], tokens, steering)
        yield np.asarray(stats.global_loss).mean()
        seen += np.asarray(stats.plain_E)


# --- biases ---------------------------------------------------------------------------------------------------------


def test_a_bias_keeps_its_float32_bits_in_bfloat16_compute(harness):
    """An idle expert gains the rate each step: from .5 to .6 in 100 steps, where bfloat16 would stay at .5."""
    model = with_router(harness, "mla", bias_rate=1e-3)
    still = dataclasses.replace(
        harness.ADAMW, peak_lr=1e-6
    )  # a hundred large steps would end in NaN, which moves no bias
    config = harness.config(model, precision=PrecisionConfig(compute_dtype="bfloat16"), optimizer=still)
    state = jax.device_get(harness.program(config, 1).initial_state())
    bias = np.full_like(state.router_bias, 0.5)
    bias[:, :4] += 10  # the other four experts stay idle
    state = state._replace(router_bias=bias)
    program = harness.program(config, 1)
    placed = harness.place_state(program, state)
    for at in range(100):
        placed, _ = program.train(placed, harness.put(program, harness.rows(config), at))
    after = jax.device_get(placed).router_bias
    assert after.dtype == np.float32
    np.testing.assert_allclose(after[:, 4:], 0.6, atol=1e-5)


def test_a_hot_experts_bias_falls_by_the_rate_and_decay_leaves_it_alone(harness):
    model = with_router(harness, "mla", bias_rate=1e-3)
    config = harness.config(model, optimizer=dataclasses.replace(harness.ADAMW, weight_decay=0.1, peak_lr=1e-6))
    program = harness.program(config, 1)
    state = jax.device_get(program.initial_state())
    assert not any("bias" in jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(state.optimizer))
    state = state._replace(router_bias=state.router_bias + np.eye(8, dtype=np.float32)[3] * 5)
    placed = harness.place_state(program, state)
    for at in range(20):
        placed, metrics = program.train(placed, harness.put(program, harness.rows(config, seed=at), at))
    assert (metrics["expert_counts"].argmax(axis=-1) == 3).all()
    np.testing.assert_allclose(jax.device_get(placed).router_bias[:, 3], 5 - 20e-3, rtol=1e-6)


def test_a_centred_bias_moves_like_another_and_keeps_its_mean(harness):
    biases = []
    for on in (False, True):
        config = harness.config(with_router(harness, "mla", bias_rate=0.125, bias_centred=on))
        state = start(harness, config)
        state.router_bias[:, 3] = 5  # one expert above the mean and seven below it
        biases.append(step(harness, config, state=state)[0].router_bias)
    plain, moved = biases
    assert (plain.sum(axis=-1) > 5).all()
    np.testing.assert_allclose(moved, plain - plain.mean(axis=-1, keepdims=True), atol=1e-6)
    counts = jnp.array([9, 1, 1, 1, 1, 1, 1, 1], jnp.int32)
    body = lambda bias, _: (centred(update_bias(bias, counts, 1e-3)), None)
    bias = jax.jit(lambda: jax.lax.scan(body, jnp.zeros(8), None, length=1000)[0])()
    assert abs(float(bias.mean())) < 1e-6


def test_a_bias_that_no_longer_moves_is_still_used(harness):
    """DeepSeek-V3 ends its training with a rate of 0."""
    config = harness.config(with_router(harness, "mla"))
    state = jax.device_get(harness.program(config, 1).initial_state())
    bias = np.zeros_like(state.router_bias)
    bias[:, 5] = 10
    after, metrics = step(harness, config, state=state._replace(router_bias=bias))
    np.testing.assert_array_equal(after.router_bias, bias)
    assert (metrics["expert_counts"].argmax(axis=-1) == 5).all()


def test_quantile_balancing_moves_the_bias_and_the_load(harness):
    model = with_router(harness, selection="quantile", quantile_decay=0.5)
    config = harness.config(model)
    program = harness.program(config, 1)
    state = start(harness, config)
    state.params["moe_layers"]["moe"]["router"]["weight"][..., 2] += 0.3
    placed, loads = harness.place_state(program, state), []
    for at in range(12):
        placed, metrics = program.train(placed, harness.put(program, harness.rows(config), at))
        placed = placed._replace(params=harness.place_state(program, state).params)
        counts = jax.device_get(metrics["expert_counts"])
        loads.append((counts.max(axis=-1) / counts.mean(axis=-1)).max())
    assert loads[-1] < 1.25 < loads[0]
    np.testing.assert_allclose(jax.device_get(placed).router_bias.mean(axis=-1), 0, atol=1e-6)


# --- record and replay ----------------------------------------------------------------------------------------------


def test_recorded_choices_are_the_ones_that_were_made_and_replay_alike(harness):
    """Record, then train on the record: the same step; on another record: other counts, the record's own."""
    config = harness.config("mla", parallel=SPLIT)
    program = harness.program(config, 8)
    replaying = build(config, resolve_fold(SPLIT, 8), jax.devices(), replay=True)
    train = quickly(replaying.train)
    rows = harness.rows(config)
    batch = harness.put(program, rows)
    state = program.initial_state()
    experts = program.record(state.params, state.router_bias, batch)
    model = config.model
    assert experts.shape == (*batch.ids.shape, model.num_moe_layers, model.router.top_k)
    given, free = np.asarray(experts), jax.device_get(program.train(program.initial_state(), batch))
    real = np.asarray(batch.segments) > 0
    assert (given[~real] == model.router.num_experts).all()
    count = lambda e: np.stack([np.bincount(e[real][:, layer].ravel(), minlength=8) for layer in range(e.shape[3])])
    np.testing.assert_array_equal(count(given), free[1]["expert_counts"])
    same = jax.device_get(train(program.initial_state(), batch._replace(experts=experts)))
    for name in ("loss", "aux_loss", "grad_norm"):
        np.testing.assert_allclose(same[1][name], free[1][name], rtol=1e-6)
    np.testing.assert_array_equal(same[0].router_bias, free[0].router_bias)
    turned = np.where(given < 8, (given + 1) % 8, given)
    put = batch._replace(experts=jax.device_put(turned, replaying.batch.experts.sharding))
    _, metrics = jax.device_get(train(program.initial_state(), put))
    np.testing.assert_array_equal(metrics["expert_counts"], count(turned))


def test_recorded_choices_in_the_texts_order_can_be_placed(harness):
    """`place_batch` reorders them with the tokens where the sequence is split."""
    config = harness.config("mla", parallel=SPLIT)
    replaying = build(config, resolve_fold(SPLIT, 8), replay=True)
    rows = harness.rows(config)
    layers, top_k = config.model.num_moe_layers, config.model.router.top_k
    marks = np.arange(rows["tokens"].size, dtype=np.int32).reshape(*rows["tokens"].shape, 1, 1)
    rows = rows | dict(experts=np.broadcast_to(marks, (*rows["tokens"].shape, layers, top_k)))
    batch = place_batch(lambda some: {name: array[:, some] for name, array in rows.items()}, 0, replaying.batch)
    at = np.take_along_axis(marks[..., 0, 0], np.asarray(batch.index), axis=-1)
    np.testing.assert_array_equal(np.asarray(batch.experts)[..., 0, 0], at)
    assert batch.experts.sharding == replaying.batch.experts.sharding


@pytest.mark.parametrize("module", ["layer", "moe"])
def test_the_backward_pass_does_not_choose_again(harness, monkeypatch, module):
    """The step with recompute holds one top-k less than where choices are not kept."""
    kept = _num_top_k(harness, module)
    for place in (router, passage):
        monkeypatch.setattr(place, "kept", lambda numbers: numbers)
    assert kept == _num_top_k(harness, module) - 1


def _num_top_k(harness, module):
    config = harness.config("gqa", memory=MemoryConfig(recompute=(module,)))
    program = build(config, resolve_fold(config.parallel, 1), jax.devices()[:1])
    jaxpr = program.train.trace(program.state, program.batch).jaxpr
    return sum(equation.primitive.name == "top_k" for equation in harness.equations(jaxpr))


# --- dropping and noise ---------------------------------------------------------------------------------------------


def test_dropping_is_counted_trains_and_spares_evaluation(harness):
    model = with_router(harness, capacity_factor=1.0, aux_coefficient=0.1)
    config = harness.config(model)
    free = harness.config(with_router(harness, aux_coefficient=0.1))
    (_, dropped), (_, kept) = step(harness, config), step(harness, free)
    assert dropped["dropped"] > 0 == kept["dropped"]
    np.testing.assert_array_equal(dropped["expert_counts"][0], kept["expert_counts"][0])
    assert (dropped["aux_loss"], dropped["applied"]) != (0, 0)
    losses = []
    for c in (config, free):
        program = harness.program(c, 1)
        state = program.initial_state()
        losses.append(float(program.eval(state.params, state.router_bias, harness.put(program, harness.rows(c)))[0]))
    assert losses[0] == losses[1]


def test_noise_depends_on_step_and_seed_and_can_be_drawn_again(harness):
    config = harness.config(with_router(harness, jitter=0.2))
    other = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=1))
    first = start(harness, config)
    counts = lambda c, at: step(harness, c, state=first._replace(step=np.int32(at)), at=at)[1]["expert_counts"]
    np.testing.assert_array_equal(counts(config, 0), counts(config, 0))
    assert (counts(config, 0) != counts(config, 1)).any()
    assert (counts(config, 0) != counts(other, 0)).any()


def test_a_logit_that_is_not_finite_is_reported(harness):
    config = harness.config("gqa")
    state = start(harness, config)
    state.params["moe_layers"]["moe"]["router"]["weight"][1, :, 3] = np.inf
    after, metrics = step(harness, config, state=state)
    real = (harness.rows(config)["segments"] > 0).sum()
    assert metrics["router_not_finite"] == real
    assert (metrics["skipped"], metrics["applied"]) == (1, 1)
    assert metrics["expert_counts"].sum() == 2 * 2 * real
    jax.tree.map(np.testing.assert_array_equal, after.params, state.params)
