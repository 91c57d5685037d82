"""`python -m moex.precision` on a run of two steps: compared with BF16, its operands measured, its formats shown."""

import json

import jax
import numpy as np
import pytest

from mesh import distributed
from mesh.distributed import Start
from moex import trainer
from moex.config import (
    CheckpointConfig,
    ModelConfig,
    ObserveConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RouterConfig,
    RunConfig,
    TrainConfig,
)
from moex.observe.operands import newest
from moex.precision import __main__ as command
from moex.precision.recipes import RECIPES
from moex.precision.table import bytes_per_number

RUN = RunConfig(
    model=ModelConfig(d_model=128, num_layers=1, expert_width=128, router=RouterConfig(num_experts=8)),
    parallel=ParallelConfig(ep=4, transport="alltoall"),
    train=TrainConfig(steps=2, batch_size=8, seq_len=32),
    optimizer=OptimizerConfig(warmup_steps=1),
    precision=PrecisionConfig(recipe="fp8_block", wire="both", gather="codes"),
    observe=ObserveConfig(eval_every=0, sample_tokens=0, measure_precision_every=1, trackers=()),
    checkpoint=CheckpointConfig(every_steps=2),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "two"
    config = RunConfig(**{**vars(RUN), "folder": str(folder)})
    assert trainer.run(config, Start("one process", None, 1, 0)) == 0
    return folder


@pytest.mark.slow
def test_a_run_measures_its_operands(run, capsys):
    step, found = newest(run)
    assert step == 1
    products = {name.rpartition(".")[2] for name, _, _ in found}
    assert products == {"query", "key", "value", "out", "gate_up", "down"}
    assert {operand for _, operand, _ in found} == {"x", "dy", "w"}
    assert all(one.not_finite == 0 and one.vanished < 0.05 and one.scale_low is not None for _, _, one in found)
    lines = [json.loads(line) for line in (run / "precision.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    assert command.main(["operands", str(run)]) == 0
    assert "moe_layers.moe.experts.down" in capsys.readouterr().out


@pytest.mark.slow
def test_recipes_are_compared_from_the_same_checkpoint(run, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(distributed, "initialise", lambda: None)
    figure, numbers = tmp_path / "gaps.svg", tmp_path / "numbers.json"
    flags = ["--steps", "3", "--lr", "1e-3", "--figure", str(figure), "--json", str(numbers)]
    assert command.main(["compare", str(run), "--recipes", "fp8_block", *flags]) == 0
    printed, found = capsys.readouterr().out, json.loads(numbers.read_text())
    assert list(found) == ["compute", "null", "fp8_block"]
    assert all(name in printed for name in found)
    losses = {name: np.array(one["losses"]) for name, one in found.items()}
    assert all(len(x) == 3 and x[-1] < x[0] for x in losses.values()), "they train"
    assert 0 < abs(losses["null"] - losses["compute"]).max() < 0.05
    assert 0 < abs(losses["fp8_block"] - losses["compute"]).max() < 0.05
    assert found["compute"]["cosines"].keys() == found["fp8_block"]["cosines"].keys()
    worst = {name: min(one["cosines"].values()) for name, one in found.items()}
    assert 0.8 < worst["fp8_block"] < worst["compute"] < 1
    assert found["compute"]["changed"] <= found["fp8_block"]["changed"] < 0.2
    assert figure.read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["compare", "no/such/run"], "no/such/run is no run folder"),
        (["compare", "no/such/run", "--lr", "-1"], "--lr -1.0 must be above 0"),
        (["compare", "no/such/run", "--figure", "no/such/folder/x.svg"], "there is no folder no/such/folder"),
        (["compare", "no/such/run", "--steps", "0"], "--steps 0 must be at least 1"),
        (["operands", "no/such/run"], "train with --observe.measure_precision_every"),
        (["show", "tiny", "--precision.mlp", "mxfp8"], "precision.mlp=mxfp8 has no effect"),
    ],
)
def test_what_cannot_be_done_is_said(arguments, said, capsys, monkeypatch):
    monkeypatch.setattr(distributed, "initialise", lambda: None)
    assert command.main(arguments) == 2
    assert said in capsys.readouterr().err


def test_show_lists_every_operand(capsys):
    assert command.main(["show", "tiny_deepseek", "--precision", "nvfp4", "--precision.shared", "compute"]) == 0
    printed = capsys.readouterr().out
    assert all(kind in printed for kind in ("attention", "mlp", "shared", "experts"))
    assert printed.count("0.562") + printed.count("0.563") >= 6
    assert "turned, stochastic" in printed.replace("\n", " ")
    assert "float32 always: router, embedding, head" in printed


@pytest.mark.parametrize("name", RECIPES)
def test_bytes_are_those_of_codes_and_scales(name):
    from pallas_kernels.quantize import quantize

    format = RECIPES[name].x
    written = quantize(jax.random.normal(jax.random.key(0), (128, 1024)), format)
    bits = written.codes.size * (4 if format.kind == "nvfp4" else 8)
    scales = 0 if format.kind == "tensor" else written.scales.nbytes
    assert bytes_per_number(format) == pytest.approx((bits / 8 + scales) / written.codes.size)
