"""What was saved is what was there, whole, and can be laid out on any mesh."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mesh import build_mesh
from moex.checkpoint import Checkpoints, open_step
from moex.config import (
    AttentionConfig,
    CheckpointConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RouterConfig,
    RunConfig,
    TrainConfig,
)
from moex.data import Batches, Tokens, Windows
from moex.train.placing import place_batch
from moex.train.program import Program, build
from moex.train.state import TrainState
from moex.validate import check, check_on, resolve_fold

ROOT = Path(__file__).resolve().parent.parent

CONFIG = RunConfig(
    model=ModelConfig(
        vocab_size=256, vocab_multiple=8, d_model=32, num_layers=2, expert_width=16, init_std=0.1,
        attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8),
        router=RouterConfig(num_experts=8, top_k=2, score_function="sigmoid", bias_rate=1e-3),
    ),
    train=TrainConfig(steps=10, batch_size=8, seq_len=16),
    optimizer=OptimizerConfig(warmup_steps=0),
    precision=PrecisionConfig(compute_dtype="float32"),
)  # fmt: skip
FOLDINGS = {
    "one": (1, ParallelConfig()),
    "dp8-ep8": (8, ParallelConfig(ep=8, transport="alltoall")),
    "tp4-ep4-zero3": (8, ParallelConfig(tp=4, ep=4, transport="alltoall", zero=3)),
    "dp4": (4, ParallelConfig()),
}


def program_on(folding: str) -> Program:
    num_devices, parallel = FOLDINGS[folding]
    config = dataclasses.replace(CONFIG, parallel=parallel)
    check(config)
    fold = resolve_fold(parallel, num_devices)
    check_on(config, fold)
    program = build(config, fold, jax.devices()[:num_devices])
    lowered = program.train.lower(program.state, program.batch)
    return program._replace(train=lowered.compile(compiler_options={"xla_backend_optimization_level": 0}))


def batch_of(program: Program, step: int):
    text = np.random.default_rng(0).integers(1, 256, 2000).astype(np.uint8)
    tokens = Tokens(text, np.array([0, 700, 2000]), ("a", "b"))
    batches = Batches([Windows([tokens], 16)], rows=8, accumulation=1, seed=0)
    return place_batch(lambda rows: batches.batch(step, rows), step, program.batch)


def fill_experts(state: TrainState) -> TrainState:
    """Expert e's weights hold e in their first column, its first moments 10 + e, its second ones 20 + e."""

    def fill(path, value):
        names = [getattr(key, "key", getattr(key, "name", "")) for key in path]
        if "experts" not in names:
            return value
        base = 10.0 if "mu" in names else 20.0 if "nu" in names else 0.0
        value = np.array(value)
        value[..., 0] = (base + np.arange(8)).reshape(1, 8, *[1] * (value.ndim - 3))
        return value

    return jax.tree_util.tree_map_with_path(fill, jax.device_get(state))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(run folder, values after two steps on eight devices, loss of the third): step 2 is saved."""
    folder = tmp_path_factory.mktemp("saved")
    program = program_on("dp8-ep8")
    state = program.initial_state()
    for step in range(2):
        state, _ = program.train(state, batch_of(program, step))
    values = fill_experts(state)
    state = jax.tree.map(lambda v, like: jax.device_put(v, like.sharding), values, program.state)
    with Checkpoints(folder, CheckpointConfig()) as checkpoints:
        checkpoints.save(2, state)
        _, metrics = program.train(state, batch_of(program, 2))  # donates what is being saved
        return folder, values, float(metrics["loss"])


@pytest.mark.parametrize("folding", [name for name in FOLDINGS if name != "dp8-ep8"])
def test_state_is_restored_to_any_mesh(saved, folding):
    folder, values, loss = saved
    program = program_on(folding)
    with Checkpoints(folder, CheckpointConfig()) as checkpoints:
        assert checkpoints.latest == 2
        state = checkpoints.restore(program.state)

    def same(path, ours, abstract, theirs):
        name = jax.tree_util.keystr(path)
        assert ours.sharding == abstract.sharding, name
        assert ours.dtype == abstract.dtype == theirs.dtype, name
        assert np.asarray(ours).tobytes() == theirs.tobytes(), name

    assert jax.tree.structure(state) == jax.tree.structure(program.state)
    jax.tree_util.tree_map_with_path(same, state, program.state, values)
    _, metrics = program.train(state, batch_of(program, 2))
    assert metrics["applied"] == 1
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)


def test_open_step_is_a_named_tree_with_experts_by_global_number(saved):
    folder, values, _ = saved
    tree = open_step(folder)
    assert set(tree) == set(TrainState._fields)
    assert tree["step"] == 2
    experts = tree["params"]["moe_layers"]["moe"]["experts"]
    assert experts["down"].shape == (2, 8, 16, 32)
    assert (experts["down"][..., 0] == np.arange(8)[None, :, None]).all()
    assert (experts["gate_up"][..., 0] == np.arange(8)[None, :, None, None]).all()
    jax.tree.map(np.testing.assert_array_equal, tree["params"], values.params)
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(tree["params"]))
    assert {leaf.dtype for leaf in jax.tree.leaves(tree["params"])} == {np.dtype("float32")}
    assert tree["router_bias"].dtype == np.float32
    np.testing.assert_array_equal(tree["router_bias"], values.router_bias)
    assert tree["samples"].tolist() == [16, 0]


def test_moments_are_saved_with_their_experts(saved):
    tree = open_step(saved[0], 2)
    found = {}
    for path, leaf in jax.tree.leaves_with_path(tree["optimizer"]):
        name = jax.tree_util.keystr(path)
        if "experts" in name and "down" in name:
            found["mu" if "mu" in name else "nu"] = leaf
    assert (found["mu"][..., 0] == 10 + np.arange(8)[None, :, None]).all()
    assert (found["nu"][..., 0] == 20 + np.arange(8)[None, :, None]).all()


def test_process_with_one_device_opens_what_eight_saved(saved, tmp_path):
    folder, values, _ = saved
    code = """
import sys, numpy as np, jax
from moex.checkpoint import open_step
assert jax.device_count() == 1
tree = open_step(sys.argv[1], 2)
bias, embedding = tree["router_bias"], tree["params"]["ends"]["embedding"]
assert type(bias) is type(embedding) is np.ndarray, (type(bias), type(embedding))
np.savez(sys.argv[2], bias=bias, embedding=embedding)
"""
    environ = dict(os.environ, XLA_FLAGS="", PYTHONPATH=str(ROOT))
    command = [sys.executable, "-W", "error", "-c", code, str(folder), str(tmp_path / "read.npz")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    read = np.load(tmp_path / "read.npz")
    assert read["bias"].dtype == np.float32
    np.testing.assert_array_equal(read["bias"], values.router_bias)
    np.testing.assert_array_equal(read["embedding"], values.params["ends"]["embedding"])


def test_what_cannot_be_opened_is_named(saved, tmp_path):
    with pytest.raises(ValueError, match=r"nowhere has no folder `checkpoints`: give the folder of a run"):
        open_step(tmp_path / "nowhere")
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ValueError, match="holds no finished checkpoint"):
        open_step(tmp_path)
    with pytest.raises(ValueError, match=r"has no checkpoint of step 3; it has \[2\]"):
        open_step(saved[0], 3)


def test_asynchronous_saves_are_whole_though_the_next_step_takes_the_buffers(tmp_path, devices):
    """20 saves of some megabytes, each overwritten in place at once: every one is of a single step."""
    mesh = build_mesh(resolve_fold(ParallelConfig(), 8), devices)
    split, everywhere = (NamedSharding(mesh, spec) for spec in (PartitionSpec(mesh.axis_names), PartitionSpec()))
    full = lambda shape, dtype, sharding: jax.device_put(np.zeros(shape, dtype), sharding)
    state = TrainState(
        step=full((), np.int32, everywhere),
        params={"wide": full((8, 1 << 17), np.float32, split), "copied": full((1 << 16,), np.float32, everywhere)},
        optimizer=(optax.EmptyState(), {"mu": full((8, 1 << 16), np.float32, split)}),
        router_bias=full((2, 8), np.float32, everywhere),
        skips=full((), np.int32, everywhere),
        samples=full((2,), np.uint32, everywhere),
        tokens=full((2,), np.uint32, everywhere),
        ema={},
    )
    shardings = jax.tree.map(lambda x: x.sharding, state)
    advance = jax.jit(
        lambda s: jax.tree.map(lambda x: x + jnp.ones((), x.dtype), s), donate_argnums=0, out_shardings=shardings
    )
    with Checkpoints(tmp_path, CheckpointConfig(every_steps=1, keep=20)) as checkpoints:
        for step in range(1, 21):
            before, state = state, advance(state)
            # Donated; on CPUs JAX leaves a buffer alone while the copy that is being saved still looks into it.
            assert before.params["wide"].is_deleted() or step > 1
            assert checkpoints.due(step)
            checkpoints.save(step, state)
    for step in range(1, 21):
        leaves = jax.tree.leaves(open_step(tmp_path, step))
        assert len(leaves) == 8
        assert all((leaf == step).all() for leaf in leaves), step


def test_checkpoints_are_due_by_the_interval_and_the_newest_are_kept(tmp_path, devices):
    mesh = build_mesh(resolve_fold(ParallelConfig(), 8), devices)
    value = jax.device_put(np.float32(1), NamedSharding(mesh, PartitionSpec()))
    with Checkpoints(tmp_path, CheckpointConfig(every_steps=3, keep=2)) as checkpoints:
        assert checkpoints.latest is None
        assert [step for step in range(1, 10) if checkpoints.due(step)] == [3, 6, 9]
        for step in (3, 6, 6, 7):  # saving a step again is no error; the last step is saved whether due or not
            checkpoints.save(step, TrainState(*[value] * 8))
        assert checkpoints.latest == 7
    assert sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == [6, 7]
