"""A run begins from an imported checkpoint, and what it has learned comes back through an exported one."""

import tracemalloc

import jax
import numpy as np

import train
from benchmarks.import_memory import make
from mesh import fold
from moex import cli
from moex.checkpoint import open_step, save_weights
from moex.config import RunConfig
from moex.hf.__main__ import main
from moex.hf.folder import Folder
from moex.hf.load import check_tensors, load
from moex.hf.params import targets
from moex.models.families import from_public
from moex.observe.jsonl import read_jsonl
from moex.train.program import build

SMALL = [
    "tiny", "--model.num-layers=1", "--model.d-model=32", "--model.expert-width=24", "--model.attention.head-dim=16",
    "--train.batch-size=16", "--train.seq-len=32", "--optimizer.warmup-steps=0", "--observe.eval-every=1",
    "--observe.eval-rows=16", "--observe.sample-tokens=0",
]  # fmt: skip
FOLDED = ["--parallel.dp=4", "--parallel.tp=2", "--parallel.ep=4", "--parallel.transport=alltoall", "--parallel.zero=3"]


def test_a_trained_model_exports_imports_and_trains_on(public, capsys):
    """One step; export; import on another mesh; a step so small that the weights stay: the held-out loss stays, too."""
    first = public.tmp_path / "first"
    assert train.main([*SMALL, "--train.steps=1", f"--folder={first}"]) == 0
    out = public.exported(first)
    assert '"model_type": "qwen3_moe"' in (out / "config.json").read_text()

    run = public.imported(out, *SMALL[4:], *FOLDED, "--precision.compute-dtype=float32", "--optimizer.peak-lr=1e-30")
    before, after = open_step(first)["params"], open_step(run)["params"]
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert cli.load(run / "config.json").model.attention == cli.load(first / "config.json").model.attention

    again = ["--train.steps=1", "--optimizer.final-lr=0"]
    assert train.main([f"--config={run / 'config.json'}", *again]) == 2  # the optimizer was decided at import
    assert "optimizer.final_lr" in capsys.readouterr().err
    assert train.main([f"--config={run / 'config.json'}", "--train.steps=1"]) == 0
    losses = [read_jsonl(folder / "metrics.jsonl")[-1]["eval_loss"] for folder in (first, run)]
    np.testing.assert_allclose(*losses, rtol=1e-6)
    state = open_step(run)
    assert int(state["step"]) == 1 and "optimizer" in state


def test_the_host_holds_one_tensor_at_a_time(tmp_path):
    """Arrays on the host while a checkpoint is read; one of 4 GB is read by benchmarks/import_memory.py."""
    assert make(tmp_path, layers=2, width=128) > 8 * 2**20
    folder = Folder(tmp_path)
    config = RunConfig(model=from_public(folder.config))
    program = build(config, fold({}, {}), jax.devices()[:1])
    wanted = check_tensors(folder, config.model, "mixtral")
    largest = max(tensor.num_bytes for tensor in folder.tensors.values())
    read = lambda: load(folder, wanted, targets(program.state), lambda *_: None, small_bytes=2**14)
    read()  # compiles
    tracemalloc.start()
    read()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * largest, (peak, largest)


def test_a_dense_run_becomes_one_of_experts(public, capsys):
    """The command, from a checkpoint of weights to another; equal logits are tested in tests/models/test_upcycle.py."""
    dense = ["--model.num-dense-layers=1", "--model.dense-width=48", *SMALL[1:]]
    config = cli.parse(["tiny", *dense, "--train.steps=1"]).config
    program = build(config, fold({}, {}), jax.devices()[:1])
    state = program.initial_state()
    source = public.tmp_path / "dense"
    save_weights(source, state.params, state.router_bias)
    (source / "config.json").write_text(cli.dump(config))
    new = public.tmp_path / "sparse"
    flags = ["--model.router.num-experts=8", "--model.router.top-k=4", "--model.expert-width=24", *FOLDED]
    assert main(["upcycle", str(source), str(new), *flags]) == 0
    assert "each MLP became 2 experts, repeated 4 times" in capsys.readouterr().out
    params, before = open_step(new)["params"], jax.device_get(state.params)
    experts = params["moe_layers"]["moe"]["experts"]
    gate = before["dense_layers"]["mlp"]["gate_up"][0, :, 0]
    np.testing.assert_array_equal(experts["gate_up"][0, 5, :, 0], gate[:, 24:])
    np.testing.assert_array_equal(params["ends"]["head"], before["ends"]["head"])
    assert main(["upcycle", str(new), str(public.tmp_path / "again"), *flags]) == 2
    assert "it must be dense" in capsys.readouterr().err
