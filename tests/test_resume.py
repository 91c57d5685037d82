"""A run killed at any step and continued is the run that was never killed: every number of every step, and the state."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import train
from mesh.distributed import Start
from moex.checkpoint import open_step
from moex.data import Ramp, open_corpus
from moex.data.__main__ import main as data_main
from moex.observe.jsonl import read_jsonl
from moex.observe.metrics import TIMED
from moex.train.state import counted

ROOT = Path(__file__).resolve().parent.parent
STEPS, EVERY = 10, 3
RAMP = ["--train.batch-size=16", "--train.accumulation=2", "--train.ramp-sizes", "8", "--train.ramp-samples", "40"]
ARGUMENTS = [
    "tiny", "--model.d-model=32", "--model.num-layers=1", "--model.expert-width=16", f"--train.steps={STEPS}",
    "--train.seq-len=32", *RAMP, "--optimizer.warmup-steps=2", f"--optimizer.schedule-steps={STEPS}",
    "--optimizer.ema-decay=0.8",
    "--model.router.score-function=sigmoid", "--model.router.bias-rate=0.01", f"--checkpoint.every-steps={EVERY}",
    "--checkpoint.keep=9", "--observe.eval-every=4", "--observe.eval-rows=16", "--observe.sample-tokens=0",
    "--observe.sample-ids", "True", "--data.packing=documents", "--data.weights", "0.6", "0.4",
]  # fmt: skip
ONE_FOLDING = ["--parallel.ep=4", "--parallel.transport=alltoall"]
OTHER_FOLDING = ["--parallel.tp=2", "--parallel.ep=4", "--parallel.transport=alltoall"]

# The command line, with the process killed once it has logged a step and an earlier checkpoint is whole.
KILLED = """
import os, signal, sys, time
from pathlib import Path
import train
from moex.observe.metrics import RunLog

folder, at, saved = sys.argv[1], int(sys.argv[2]), sys.argv[3]
log_step = RunLog.step

def hooked(self, record):
    log_step(self, record)
    if record["step"] == at:
        while saved != "0" and not (Path(folder) / "checkpoints" / saved).is_dir():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)

RunLog.step = hooked
sys.exit(train.main(sys.argv[4:]))
"""


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> list[str]:
    """Two corpora of short documents, each with held-out ones."""
    folder, rng = tmp_path_factory.mktemp("text"), random.Random(0)
    flags = []
    for name, letters in (("one", "abcdef "), ("two", "uvwxyz ")):
        lines = ["".join(rng.choices(letters, k=rng.randint(3, 60))) for _ in range(200)]
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
        out = str(folder / name)
        assert data_main(["tokenize", str(folder / f"{name}.jsonl"), "--out", out, "--held-out", "0.2"]) == 0
        flags.append(out)
    return ["--data.corpus", *flags]


def here(folder: Path, arguments) -> None:
    """Runs the command line in this process, which has eight devices."""
    with pytest.MonkeyPatch.context() as patch:
        # `jax.distributed` cannot start in a process that has used devices.
        patch.setattr("mesh.distributed.initialise", lambda: Start("one process", None, 1, 0))
        assert train.main([*arguments, f"--folder={folder}"]) == 0


def launch(folder: Path, arguments, *, kill_at: int | None = None, num_processes: int = 1) -> None:
    """Runs train.py over eight devices in all, as one process or two of its own; one may be killed after a step."""
    saved = EVERY * ((kill_at or 0) // EVERY)
    start = ["-c", KILLED, str(folder), str(kill_at), str(saved)] if kill_at is not None else [str(ROOT / "train.py")]
    environ = os.environ | dict(PYTHONPATH=str(ROOT), JAX_PLATFORMS="cpu", PYTHONFAULTHANDLER="1")
    environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"  # as in this process
    environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={8 // num_processes}"
    places = [{}]
    if num_processes > 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        each = lambda i: dict(COORDINATOR_ADDRESS=address, NUM_PROCESSES=str(num_processes), PROCESS_ID=str(i))
        places = [each(i) for i in range(num_processes)]
    command = [sys.executable, *start, *arguments, f"--folder={folder}"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    running = [subprocess.Popen(command, cwd=ROOT, env=environ | place, **pipes) for place in places]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in running]
    except subprocess.TimeoutExpired:
        for process in running:
            process.send_signal(signal.SIGABRT)  # each says where it stands
        pytest.fail("\n".join(process.communicate()[0] for process in running))
    expected = -signal.SIGKILL if kill_at is not None else 0
    assert [process.returncode for process in running] == [expected] * num_processes, "\n".join(outputs)


def lines_of(folder: Path) -> list[dict]:
    return [{k: v for k, v in line.items() if k not in TIMED} for line in read_jsonl(folder / "metrics.jsonl")]


def events_of(folder: Path, kind: str) -> list[dict]:
    return [event for event in read_jsonl(folder / "events.jsonl") if event["kind"] == kind]


def leaves(tree, name=""):
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, f"{name}.{key}")
    elif isinstance(tree, list | tuple):
        for i, value in enumerate(tree):
            yield from leaves(value, f"{name}.{i}")
    else:
        yield name, np.asarray(tree)


@pytest.fixture(scope="module")
def straight(corpora, tmp_path_factory) -> Path:
    """The folder of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    here(folder, [*ARGUMENTS, *ONE_FOLDING, *corpora])
    return folder


def test_what_is_on_in_these_runs(straight, corpora):
    """Packing, a mixture, a ramp, a moving bias, an average of parameters and evaluations: each leaves its trace."""
    lines = lines_of(straight)
    ramp = Ramp(16, (8,), (40,))
    assert [line["rows"] for line in lines] == [ramp.size(step) for step in range(STEPS)] == [8] * 5 + [16] * 5
    assert [np.size(line["sample_ids"]) for line in lines] == [line["rows"] for line in lines]
    num_first = open_corpus(corpora[1]).train.num_documents
    ids = np.concatenate([np.ravel(line["sample_ids"]) for line in lines])
    assert ids.min() < num_first < ids.max() or len(set(ids.tolist())) > 60
    state = open_step(straight)
    assert counted(state["samples"]) == ramp.samples_before(STEPS) == sum(line["rows"] for line in lines)
    assert counted(state["tokens"]) == sum(line["valid_tokens"] for line in lines)
    assert np.abs(state["router_bias"]).max() > 0
    pairs = zip(leaves(state["params"]), leaves(state["ema"]), strict=True)
    assert all((a != b).any() for (_, a), (_, b) in pairs)
    evaluated = [line["step"] for line in lines if "eval_loss" in line]
    assert evaluated == [3, 7, 9] and all("eval_loss_ema" in lines[step] for step in evaluated)


@pytest.mark.slow
@pytest.mark.parametrize("draw", range(3))
def test_a_run_killed_at_a_random_step_continues_to_the_same_bits(straight, corpora, tmp_path, draw):
    at = random.Random(draw).randrange(1, STEPS - 1)
    arguments = [*ARGUMENTS, *ONE_FOLDING, *corpora]
    launch(tmp_path, arguments, kill_at=at)
    saved = EVERY * (at // EVERY)
    here(tmp_path, arguments)
    assert [event["step"] for event in events_of(tmp_path, "resume")] == ([saved] if saved else [])
    assert lines_of(tmp_path) == lines_of(straight)
    ours, theirs = dict(leaves(open_step(tmp_path))), dict(leaves(open_step(straight)))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name].tobytes() != theirs[name].tobytes()] == []
    assert [event["step"] for event in events_of(tmp_path, "superseded_step")] == list(range(saved, at + 1))


def test_moments_on_the_host_continue_it(straight, corpora, tmp_path):
    """From step 6 on: where moments wait changes no bit of a run, nor what is saved."""
    folder = tmp_path / "run"
    shutil.copytree(straight, folder)
    for step in (9, STEPS):
        shutil.rmtree(folder / "checkpoints" / str(step))
    here(folder, [*ARGUMENTS, *ONE_FOLDING, *corpora, "--memory.optimizer=host"])
    assert [event["step"] for event in events_of(folder, "resume")] == [6]
    assert lines_of(folder) == lines_of(straight)
    ours, theirs = (dict(leaves(open_step(run))) for run in (folder, straight))
    assert {name: x.tobytes() for name, x in ours.items()} == {name: x.tobytes() for name, x in theirs.items()}


@pytest.mark.slow
def test_another_folding_and_another_number_of_processes_continue_it(straight, corpora, tmp_path):
    """From step 3 two processes on another folding, from step 6 one again: samples as they were, losses within 1e-5."""
    folder = tmp_path / "run"
    shutil.copytree(straight, folder)
    for step in (6, 9, STEPS):
        shutil.rmtree(folder / "checkpoints" / str(step))
    shorter = [a.replace(f"--train.steps={STEPS}", "--train.steps=6") for a in ARGUMENTS]
    launch(folder, [*shorter, *OTHER_FOLDING, *corpora], num_processes=2)
    before = dict(leaves(open_step(folder, 6)))
    here(folder, [*ARGUMENTS, *ONE_FOLDING, *corpora])
    ours, theirs = lines_of(folder), lines_of(straight)
    assert [line["sample_ids"] for line in ours] == [line["sample_ids"] for line in theirs]
    assert [line["lr"] for line in ours] == [line["lr"] for line in theirs]
    np.testing.assert_allclose([x["loss"] for x in ours], [x["loss"] for x in theirs], rtol=1e-5)
    np.testing.assert_allclose(ours[-1]["eval_loss"], theirs[-1]["eval_loss"], rtol=1e-5)
    # Expert e is still expert e, in parameters, average and moments.
    straight_at_6 = dict(leaves(open_step(straight, 6)))
    experts = [name for name in before if "experts" in name]
    assert len(experts) == 8  # gate_up and down: parameters, average, two moments
    for name in experts:
        a, b = before[name], straight_at_6[name]
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * np.abs(b).max(), err_msg=name)
        distance = np.abs(a[0, :, None] - b[0, None]).reshape(8, 8, -1).max(-1)  # of each expert to each
        assert (distance.argmin(axis=1) == np.arange(8)).all(), name
