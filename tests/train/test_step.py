"""The step's invariants: its gates, its counters, its norm, what it sums in float32, and that it trains."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from mesh import abstract_mesh
from moex.config import MemoryConfig, ParallelConfig, PrecisionConfig
from moex.train import step as step_module
from moex.train.program import build
from moex.train.state import counted
from moex.validate import resolve_fold

FOLDINGS = {
    "dp8": ParallelConfig(),
    "dp8-zero3": ParallelConfig(zero=3),
    "dp2-cp2-tp2": ParallelConfig(cp=2, tp=2, zero=3),
    "tp8": ParallelConfig(tp=8),
    "dp4-tp2-ep4-etp2": ParallelConfig(tp=2, ep=4, etp=2, transport="alltoall"),
    "cp4-tp2-edp2-ep2-etp2-zero3": ParallelConfig(cp=4, tp=2, ep=2, etp=2, transport="alltoall", zero=3),
}


@pytest.fixture(scope="module")
def stateful(harness):
    """A program whose state uses everything: AdamW's moments, a routing bias, sharded storage."""
    config = harness.config("mla", optimizer=harness.ADAMW, parallel=ParallelConfig(dp=4, tp=2))
    return harness.program(config, 8)


def assert_same_bits(tree, other):
    def check(path, a, b):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), jax.tree_util.keystr(path)

    jax.tree_util.tree_map_with_path(check, tree, other)


def run(harness, program, values, *, at: int, seed: int = 0):
    """One step from a state of numpy arrays; returns the same and the metrics."""
    batch = harness.put(program, harness.rows(program.config, seed=seed), at)
    return jax.device_get(program.train(harness.place_state(program, values), batch))


def test_batch_of_another_step_changes_nothing(harness, stateful):
    start, _ = run(harness, stateful, jax.device_get(stateful.initial_state()), at=0)
    for wrong in (0, 2):
        after, metrics = run(harness, stateful, start, at=wrong)
        assert metrics["applied"] == 0
        assert_same_bits(after, start)
    after, metrics = run(harness, stateful, start, at=1)
    assert (metrics["applied"], metrics["step"], after.step) == (1, 1, 2)


def test_overflow_on_one_device_changes_nothing_on_any(harness):
    """Balanced routing fits the cells; with all tokens on one expert only its device runs out of room."""
    parallel = ParallelConfig(edp=4, ep=2, transport="alltoall", row_factor=1.5)
    program = harness.program(harness.config("mla", optimizer=harness.ADAMW, parallel=parallel), 8)
    start = jax.device_get(program.initial_state())
    bias = np.zeros_like(start.router_bias)
    bias[:, :4] = 10.0
    skewed = start._replace(router_bias=bias)
    after, metrics = run(harness, program, skewed, at=0)
    assert (metrics["applied"], metrics["skipped"]) == (0, 0)
    assert metrics["overflow"] > 0
    assert_same_bits(after, skewed)
    after, metrics = run(harness, program, start, at=0)
    assert (metrics["applied"], metrics["overflow"], after.step) == (1, 0, 1)


def test_non_finite_gradients_advance_the_step_and_leave_what_was_learned(harness, stateful):
    values, _ = run(harness, stateful, jax.device_get(stateful.initial_state()), at=0)
    poisoned = jax.tree.map(np.array, values)
    poisoned.params["moe_layers"]["moe"]["experts"]["down"][0, 3, 0, 0] = np.nan  # a single number on a single device
    state, metrics = run(harness, stateful, poisoned, at=1)
    assert (metrics["skipped"], metrics["applied"]) == (1, 1)
    assert (state.step, state.skips) == (2, 1)
    for name in ("params", "optimizer", "router_bias"):
        assert_same_bits(getattr(state, name), getattr(poisoned, name))
    assert counted(state.samples) == 2 * 32
    assert counted(state.tokens) == counted(values.tokens) + metrics["valid_tokens"]
    state, _ = run(harness, stateful, state, at=2)
    assert (state.step, state.skips) == (3, 2)
    state, metrics = run(harness, stateful, state._replace(params=values.params), at=3)
    assert (state.skips, metrics["skipped"]) == (0, 0)


def test_samples_and_tokens_are_counted_past_two_to_the_32(harness, stateful):
    start = jax.device_get(stateful.initial_state())
    near = np.array([2**32 - 5, 7], np.uint32)
    state, metrics = run(harness, stateful, start._replace(samples=near, tokens=near), at=0)
    assert counted(state.samples) == (7 << 32) + 2**32 - 5 + 32
    assert counted(state.tokens) == (7 << 32) + 2**32 - 5 + int(metrics["valid_tokens"])
    assert metrics["valid_tokens"] == harness.rows(stateful.config)["mask"].sum()


def test_bias_moves_by_the_rate_towards_the_idle_and_is_no_parameter(harness, stateful):
    rate = stateful.config.model.router.bias_rate
    state = jax.device_get(stateful.initial_state())
    assert not any("bias" in jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(state.params))
    expected = np.zeros_like(state.router_bias)
    for at in range(3):
        state, metrics = run(harness, stateful, state, at=at, seed=at)
        counts = metrics["expert_counts"].astype(np.float64)
        expected += np.float32(rate) * np.sign(counts.mean(axis=-1, keepdims=True) - counts).astype(np.float32)
        np.testing.assert_array_equal(state.router_bias, expected)
    assert state.router_bias.dtype == np.float32
    assert np.unique(state.router_bias).size > 1


def test_biased_choice_uses_the_bias(harness, stateful):
    start = jax.device_get(stateful.initial_state())
    bias = np.zeros_like(start.router_bias)
    bias[:, 5] = 10.0
    _, metrics = run(harness, stateful, start._replace(router_bias=bias), at=0)
    real = (harness.rows(stateful.config)["segments"] > 0).sum()
    assert (metrics["expert_counts"].sum(axis=-1) == 2 * real).all()
    assert (metrics["expert_counts"][:, 5] == real).all()


@pytest.mark.parametrize(("folding", "model"), list(zip(FOLDINGS, itertools.cycle(["gqa", "mla"]))))
def test_norm_of_gradients_of_one_is_the_root_of_their_number(harness, monkeypatch, folding, model):
    def ones(config, decoder, fold):
        def inner(shards, bias_LE, batch):
            none = jnp.float32(0)
            sums = step_module.no_sums(bias_LE.shape)
            return jax.tree.map(lambda x: 0 * x + 1, shards), none, sums, jnp.int32(1)

        return inner

    monkeypatch.setattr(step_module, "loss_and_gradients", ones)
    config = harness.config(model, parallel=FOLDINGS[folding])
    program = build(config, resolve_fold(config.parallel, 8))
    _, metrics = program.train(program.initial_state(), harness.put(program, harness.rows(config)))
    number = sum(x.size for x in jax.tree.leaves(program.state.params))
    np.testing.assert_allclose(metrics["grad_norm"], number**0.5, rtol=1e-6)


def reductions(harness, config, num_devices):
    """(primitive, axes, dtype, shape of its operand) of every sum over devices in the traced step."""
    fold = resolve_fold(config.parallel, num_devices)
    program = build(config, fold, mesh=abstract_mesh(fold))
    found = []
    for equation in harness.equations(program.train.trace(program.state, program.batch).jaxpr):
        if equation.primitive.name.startswith(("psum", "reduce_scatter")):
            axes = equation.params.get("axes", equation.params.get("axis_name"))
            found += [(equation.primitive.name, axes, x.aval.dtype, x.aval.shape) for x in equation.invars]
    assert found
    return found


@pytest.mark.parametrize(("folding", "model"), list(zip(FOLDINGS, itertools.cycle(["mla", "gqa"]))))
def test_bfloat16_compute_sums_over_devices_in_float32(harness, folding, model):
    config = harness.config(
        model, parallel=FOLDINGS[folding], precision=PrecisionConfig(compute_dtype="bfloat16"), accumulation=2
    )
    found = reductions(harness, config, 8)
    assert {str(dtype) for _, _, dtype, _ in found} <= {"float32", "int32"}, found


def test_recompute_keeps_the_step(harness):
    """The compiler fuses what it recomputes in other ways, so the last bits may differ; routing may not."""
    plain = harness.one_step(harness.config("gqa"), 1)
    again = harness.one_step(harness.config("gqa", memory=MemoryConfig(recompute=("layer",))), 1)
    assert_close(again.change, plain.change, 1e-6)
    np.testing.assert_allclose(again.metrics["loss"], plain.metrics["loss"], rtol=1e-6)
    np.testing.assert_array_equal(again.metrics["expert_counts"], plain.metrics["expert_counts"])


@pytest.mark.parametrize("module", ["layer", "attention", "mlp", "moe", "experts"])
def test_recompute_adds_products_to_the_step(harness, module):
    def products(recompute):
        config = harness.config("mla", memory=MemoryConfig(recompute=recompute))
        fold = resolve_fold(config.parallel, 1)
        program = build(config, fold, mesh=abstract_mesh(fold))
        traced = program.train.trace(program.state, program.batch).jaxpr
        return sum(e.primitive.name == "dot_general" for e in harness.equations(traced))

    assert products((module,)) > products(())


def without_balance(harness):
    model = harness.MODELS["gqa"]
    names = ("aux_coefficient", "sequence_coefficient", "global_coefficient", "z_coefficient")
    return dataclasses.replace(model, router=dataclasses.replace(model.router, **dict.fromkeys(names, 0.0)))


def test_accumulation_changes_nothing_without_statistics_of_micro_batches(harness):
    model = without_balance(harness)
    whole, cut = (harness.one_step(harness.config(model, accumulation=a), 1) for a in (1, 4))
    np.testing.assert_allclose(cut.metrics["loss"], whole.metrics["loss"], rtol=1e-6)
    np.testing.assert_array_equal(cut.metrics["expert_counts"], whole.metrics["expert_counts"])
    assert_close(cut.change, whole.change)


def assert_close(ours, theirs, tolerance=1e-5):
    def check(path, a, b):
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max(), jax.tree_util.keystr(path)

    jax.tree_util.tree_map_with_path(check, ours, theirs)


def test_each_loss_is_a_mean_over_its_own_tokens_however_much_padding_stands_beside_them(harness):
    """The cross entropy over tokens with a label, the balance loss over all that are no padding."""
    config = harness.config("gqa")
    short = dataclasses.replace(config, train=dataclasses.replace(config.train, batch_size=16))
    small, large = harness.program(short, 1), harness.program(config, 1)
    rows = harness.rows(short)
    padded = {name: np.concatenate([array, np.zeros_like(array)], axis=1) for name, array in rows.items()}
    padded["tokens"][:, 16:], padded["labels"][:, 16:] = 17, 258  # whatever stands in padding
    results = [
        jax.device_get(program.train(program.initial_state(), harness.put(program, arrays)))
        for program, arrays in ((small, rows), (large, padded))
    ]
    (state, metrics), (padded_state, padded_metrics) = results
    assert metrics["valid_tokens"] == rows["mask"].sum() < (rows["segments"] > 0).sum()
    for name in ("loss", "lm_loss", "aux_loss", "z_loss", "grad_norm"):
        np.testing.assert_allclose(padded_metrics[name], metrics[name], rtol=1e-6, err_msg=name)
    np.testing.assert_array_equal(padded_metrics["expert_counts"], metrics["expert_counts"])
    start = jax.device_get(small.initial_state().params)
    minus = lambda params: jax.tree.map(np.subtract, params, start)
    assert_close(minus(padded_state.params), minus(state.params))


def test_evaluation_sums_what_the_step_averages(harness):
    step = harness.one_step(harness.config("gqa"), 1)
    program = harness.program(harness.config("gqa", parallel=ParallelConfig(dp=2, cp=2, tp=2), accumulation=1), 8)
    state = harness.place_state(program, step.before)
    batch = harness.put(program, harness.rows(program.config))
    total, tokens, overflow = jax.device_get(program.eval(state.params, state.router_bias, batch))
    assert (tokens, overflow) == (step.metrics["valid_tokens"], 0)
    np.testing.assert_allclose(total / tokens, step.metrics["lm_loss"], rtol=1e-6)


def test_loss_falls_and_every_expert_layer_learns(harness):
    config = harness.config("mla", optimizer=harness.ADAMW)
    program = harness.program(config, 1)
    state, rows = program.initial_state(), harness.rows(config)
    start, losses = jax.device_get(state.params), []
    for at in range(20):
        state, metrics = program.train(state, harness.put(program, rows, at))
        losses.append(float(metrics["lm_loss"]))
    assert losses[0] == pytest.approx(np.log(259), abs=0.5)
    assert losses[-1] < losses[0] - 2
    assert sorted(losses, reverse=True)[:3] == losses[:3]
    moved = jax.tree.map(lambda a, b: np.abs(a - b), jax.device_get(state.params), start)["moe_layers"]["moe"]
    for name, change in (("router", moved["router"]["weight"]), *moved["experts"].items()):
        each = change.reshape(*change.shape[: 1 if name == "router" else 2], -1).max(axis=-1)
        assert (each > 0.01).all(), f"{name}: {each}"


def test_replicated_state_scalars_are_on_every_device(stateful):
    for name in ("step", "router_bias", "skips", "samples", "tokens"):
        assert getattr(stateful.state, name).sharding.spec == PartitionSpec()


def test_the_average_follows_the_parameters_and_frozen_ones_stay(harness):
    """Two steps: average = 0.75 average + 0.25 parameters after each; what is frozen is to the bit what it was."""
    optimizer = dataclasses.replace(harness.ADAMW, ema_decay=0.75, freeze=("*.attention.*",))
    program = harness.program(harness.config("gqa", optimizer=optimizer, parallel=ParallelConfig(dp=4, tp=2)), 8)
    states = [jax.device_get(program.initial_state())]
    assert_same_bits(states[0].ema, states[0].params)
    for step in range(2):
        after, metrics = run(harness, program, states[-1], at=step, seed=step)
        assert metrics["applied"] == 1
        states.append(after)
    for before, after in itertools.pairwise(states):
        expected = jax.tree.map(lambda e, p: 0.75 * e + 0.25 * p, before.ema, after.params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-7), after.ema, expected)
    assert_same_bits(states[-1].params["moe_layers"]["attention"], states[0].params["moe_layers"]["attention"])
    assert (
        states[-1].params["moe_layers"]["moe"]["router"]["weight"]
        != states[0].params["moe_layers"]["moe"]["router"]["weight"]
    ).any()
