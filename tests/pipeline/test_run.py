"""A run from the command line whose stages come and go: the numbers of one that never had any."""

from pathlib import Path

import numpy as np
import pytest

import train
from mesh.distributed import Start
from moex.observe import routing
from moex.observe.jsonl import read_jsonl

ARGUMENTS = [
    "tiny", "--model.d-model=32", "--model.num-layers=2", "--model.expert-width=16", "--train.seq-len=32",
    "--train.accumulation=2", "--optimizer.warmup-steps=1", "--optimizer.schedule-steps=8", "--observe.eval-every=1",
    "--observe.eval-rows=8", "--observe.sample-tokens=2", "--observe.record-routing-every=1", "--parallel.tp=2",
    "--parallel.ep=2", "--parallel.transport=alltoall",
]  # fmt: skip
STAGES, ALONE = ("--parallel.pp=2", "--parallel.dp=2", "--parallel.overlap=True"), ("--parallel.dp=4",)


@pytest.fixture(autouse=True)
def already_started(monkeypatch):
    """`jax.distributed` cannot start in a process that has used devices."""
    monkeypatch.setattr("mesh.distributed.initialise", lambda: Start("one process", None, 1, 0))


def run(folder: Path, steps: int, *parallel: str) -> list[dict]:
    assert train.main([*ARGUMENTS, f"--folder={folder}", f"--train.steps={steps}", *parallel]) == 0
    return read_jsonl(folder / "metrics.jsonl")


@pytest.mark.slow
def test_stages_come_and_go_between_checkpoints(tmp_path, capsys):
    changing, straight = tmp_path / "changing", tmp_path / "straight"
    run(changing, 1, *STAGES)
    said = capsys.readouterr().out
    assert "pipeline  2 ranks x 1 stages of 1 layers; bubble 50.0%" in said and "after 1 steps" in said
    run(changing, 2, *ALONE)
    found, wanted = run(changing, 3, *STAGES), run(straight, 3, *ALONE)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours["expert_counts"] == theirs["expert_counts"]
        for name in ("loss", "grad_norm", "eval_loss"):
            np.testing.assert_allclose(ours[name], theirs[name], rtol=2e-5, err_msg=name)
    recorded = zip(routing.read(changing), routing.read(straight), strict=True)
    assert all(a == b and np.array_equal(ours, theirs) for (a, ours, _), (b, theirs, _) in recorded)
