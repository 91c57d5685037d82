"""The sampler's command on a run of two steps, saved by a folded mesh."""

import dataclasses

import pytest

from moex import generate
from moex.checkpoint import Checkpoints
from moex.cli import dump
from moex.config import (
    AttentionConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RouterConfig,
    RunConfig,
    TrainConfig,
)
from moex.data import Batches, stdlib_corpus
from moex.train.placing import place_batch
from moex.train.program import build
from moex.validate import resolve_fold

CONFIG = RunConfig(
    name="sampled",
    model=ModelConfig(
        d_model=16, num_layers=1, expert_width=8, init_std=0.2,
        attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8), router=RouterConfig(num_experts=4),
    ),
    parallel=ParallelConfig(cp=2, tp=2, ep=4, transport="alltoall"),
    train=TrainConfig(steps=2, batch_size=2, seq_len=16),
    optimizer=OptimizerConfig(warmup_steps=0),
    precision=PrecisionConfig(compute_dtype="float32"),
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory, devices):
    folder = tmp_path_factory.mktemp("run")
    program = build(CONFIG, resolve_fold(CONFIG.parallel, len(devices)))
    batches = Batches(stdlib_corpus().held_out, seq_len=16, rows=2, accumulation=1, seed=0)
    state = program.initial_state()
    for step in range(2):
        batch = place_batch(lambda rows, step=step: batches.batch(step, rows), step, program.batch)
        state, _ = program.train(state, batch)
    (folder / "config.json").write_text(dump(CONFIG))
    with Checkpoints(folder, CONFIG.checkpoint) as checkpoints:
        checkpoints.save(2, state)
    return folder


@pytest.fixture
def sample(monkeypatch, capsys):
    """Runs the command in this process, whose devices are in use already; returns exit code, output and errors."""
    monkeypatch.setattr(generate.distributed, "initialise", lambda: None)

    def call(*arguments) -> tuple[int, str, str]:
        code = generate.main([str(a) for a in arguments])
        return (code, *capsys.readouterr())

    return call


def test_greedy_text_depends_neither_on_seed_nor_on_mesh(run, sample):
    arguments = (run, "--prompt", "def f(", "--num-tokens", 20, "--temperature", 0)
    code, text, _ = sample(*arguments)
    assert code == 0
    assert text.startswith("def f(")
    assert len(text.removeprefix("def f(").removesuffix("\n")) > 0
    assert sample(*arguments, "--seed", 7)[:2] == (0, text)
    assert sample(*arguments, "--data-parallel")[:2] == (0, text)


def test_sampling_repeats_by_seed(run, sample):
    texts = [sample(run, "--prompt", "x", "--num-tokens", 20, "--seed", seed)[1] for seed in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]


def test_missing_folder_exits_2(tmp_path, sample):
    code, text, error = sample(tmp_path / "none", "--prompt", "x")
    assert (code, text) == (2, "")
    assert "none is no folder" in error


def test_folder_without_checkpoint_exits_2(tmp_path, sample):
    (tmp_path / "config.json").write_text(dump(CONFIG))
    code, _, error = sample(tmp_path, "--prompt", "x")
    assert code == 2
    assert "no folder `checkpoints`" in error
    assert not (tmp_path / "checkpoints").exists()
    (tmp_path / "checkpoints").mkdir()
    code, _, error = sample(tmp_path, "--prompt", "x")
    assert code == 2
    assert "holds no finished checkpoint" in error


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--prompt", "", "--prompt has 0 tokens"),
        ("--prompt", "seventeen letters", "it needs 1 to 16"),
        ("--num-tokens", 0, "--num-tokens=0"),
        ("--temperature", -1, "--temperature=-1"),
        ("--temperature", "nan", "--temperature=nan"),
        ("--seed", -1, "--seed=-1"),
    ],
)
def test_wrong_option_exits_2(run, sample, option, value, message):
    prompt = () if option == "--prompt" else ("--prompt", "x")
    code, _, error = sample(run, *prompt, f"{option}={value}")
    assert code == 2
    assert message in error


def test_mesh_that_does_not_fit_here_names_the_way_out(run, sample, tmp_path):
    config = dataclasses.replace(CONFIG, parallel=dataclasses.replace(CONFIG.parallel, dp=64))
    (tmp_path / "config.json").write_text(dump(config))
    (tmp_path / "checkpoints").symlink_to(run / "checkpoints")
    code, _, error = sample(tmp_path, "--prompt", "x")
    assert code == 2
    assert "dp=64" in error
    assert "--data-parallel" in error
