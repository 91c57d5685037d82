"""Training in a minute: what must work on every JAX and Python that moex allows."""

import dataclasses

import jax
import numpy as np
import pytest

import train
from mesh.distributed import Start
from moex.checkpoint import open_step
from moex.config import ParallelConfig, RunConfig, TrainConfig
from moex.models.families import deepseek_v3
from moex.observe.jsonl import read_jsonl
from moex.train.placing import place_batch
from moex.train.program import build
from moex.validate import check, check_on, resolve_fold

ARGUMENTS = [
    "tiny", "--model.d-model=32", "--model.num-layers=2", "--model.expert-width=16", "--train.seq-len=32",
    "--train.steps=12", "--optimizer.warmup-steps=2", "--checkpoint.every-steps=6", "--observe.eval-every=6",
    "--observe.eval-rows=8", "--observe.sample-tokens=4", "--parallel.tp=2", "--parallel.ep=4",
    "--parallel.transport=alltoall",
]  # fmt: skip


def test_run_trains_saves_and_reports(run_folder, monkeypatch, capsys):
    monkeypatch.setattr("mesh.distributed.initialise", lambda: Start("one process", None, 1, 0))
    assert train.main([*ARGUMENTS, "--folder=run"]) == 0
    losses = [line["lm_loss"] for line in read_jsonl(run_folder / "run" / "metrics.jsonl")]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.3
    assert open_step(run_folder / "run")["step"] == 12
    assert (run_folder / "run" / "report.html").is_file()
    assert train.main([*ARGUMENTS, "--folder=run"]) == 0
    assert "is trained to step 12 already" in capsys.readouterr().out


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(cp=2, tp=2, ep=4, etp=2, transport="allgather", context="ring", zero=3),
        ParallelConfig(cp=4, ep=8, transport="alltoall", context="ulysses"),
    ],
    ids=["ring-zero3-etp", "ulysses-ep8"],
)
def test_folded_step_equals_one_device(parallel):
    model = deepseek_v3(
        vocab_size=256, vocab_multiple=8, d_model=32, num_layers=2, expert_width=16,
        shared_width=16, init_std=0.1, num_heads=8, nope_dim=8, rope_dim=4, value_dim=8, q_latent_dim=16,
        kv_latent_dim=12, num_experts=8, top_k=2, num_groups=4, top_groups=2, aux_coefficient=0.01,
    )  # fmt: skip
    base = RunConfig(model=model, train=TrainConfig(batch_size=16, accumulation=2, seq_len=16))
    base = dataclasses.replace(base, precision=dataclasses.replace(base.precision, compute_dtype="float32"))
    results = []
    for num_devices, some in ((1, ParallelConfig()), (8, parallel)):
        config = dataclasses.replace(base, parallel=some)
        check(config)
        fold = resolve_fold(some, num_devices)
        check_on(config, fold)
        program = build(config, fold, jax.devices()[:num_devices])
        lowered = program.train.lower(program.state, program.batch)
        step = lowered.compile(compiler_options={"xla_backend_optimization_level": 0})
        _, metrics = step(program.initial_state(), place_batch(rows, 0, program.batch))
        results.append(jax.device_get(metrics))
    alone, folded = results
    assert folded["applied"] == 1
    np.testing.assert_array_equal(folded["expert_counts"], alone["expert_counts"])
    for name in ("loss", "aux_loss", "grad_norm"):
        np.testing.assert_allclose(folded[name], alone[name], rtol=2e-6, err_msg=name)


def rows(some: slice) -> dict[str, np.ndarray]:
    """16 rows of 16 tokens in two micro-batches, two documents a row."""
    ids = np.random.default_rng(0).integers(0, 256, (2, 8, 17)).astype(np.int32)
    index = np.broadcast_to(np.arange(16, dtype=np.int32), (2, 8, 16))
    arrays = dict(
        tokens=ids[:, :, :-1], labels=ids[:, :, 1:], mask=index != 6,
        segments=1 + (index > 6).astype(np.int32), positions=np.where(index > 6, index - 7, index),
    )  # fmt: skip
    return {name: array[:, some] for name, array in arrays.items()}
