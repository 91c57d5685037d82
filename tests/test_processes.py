"""Two processes on loopback train like one, continue what the other saved, and say what keeps them from starting."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from moex.observe.metrics import TIMED

ROOT = Path(__file__).parents[1]
SMALL = [
    "tiny", "--train.steps", "4", "--train.batch_size", "8", "--train.seq_len", "32", "--model.num_layers", "1",
    "--model.d_model", "32", "--model.expert_width", "32", "--optimizer.warmup_steps", "1", "--observe.eval_every", "2",
    "--observe.eval_rows", "8", "--observe.sample_tokens", "4", "--checkpoint.every_steps", "2", "--checkpoint.keep", "3",
    "--parallel.tp", "2", "--parallel.ep", "4", "--parallel.transport", "alltoall",
]  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def begin(folder: Path, num_devices: int, *overrides: str, **variables: str) -> subprocess.Popen:
    """Starts train.py on `num_devices` CPU devices, with variables as a launcher sets them."""
    preset, *usual = SMALL
    kept = [word for flag in zip(usual[::2], usual[1::2], strict=True) if flag[0] not in overrides for word in flag]
    return start([str(ROOT / "train.py"), preset, *kept, "--folder", str(folder), *overrides], num_devices, **variables)


def start(command: list[str], num_devices: int, **variables: str) -> subprocess.Popen:
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}",
    }
    return subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, env=environment | variables, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip


def place(port: int, num_processes: int, process: int) -> dict[str, str]:
    names = ("COORDINATOR_ADDRESS", "NUM_PROCESSES", "PROCESS_ID")
    return dict(zip(names, (f"127.0.0.1:{port}", str(num_processes), str(process)), strict=True))


def launch(folder: Path, num_processes: int, *overrides: str) -> list[str]:
    """Runs train.py in one or two processes, eight devices in all; fails with their output when one does."""
    port = free_port()
    places = [place(port, num_processes, i) if num_processes > 1 else {} for i in range(num_processes)]
    running = [begin(folder, 8 // num_processes, *overrides, **variables) for variables in places]
    outputs = [process.communicate(timeout=240)[0] for process in running]
    assert [process.returncode for process in running] == [0] * num_processes, "\n".join(outputs)
    return outputs


def steps(folder: Path) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMED} for line in lines]


@pytest.mark.slow
def test_two_processes_equal_one_and_continue_each_other(tmp_path):
    one, two, mixed = tmp_path / "one", tmp_path / "two", tmp_path / "mixed"
    constant = ("--optimizer.schedule", "constant")  # so that a shorter run is the start of a longer one
    launch(one, 1, *constant)
    outputs = launch(two, 2, *constant)
    for i in range(2):  # the table of all processes, on the first one only
        assert f"process {i}  {socket.gethostname()}: 4 x cpu" in outputs[0] and f"process {i} " not in outputs[1]
    first, second = steps(one), steps(two)
    assert len(first) == len(second) == 4
    for a, b in zip(first, second, strict=True):
        for name in ("loss", "aux_loss", "grad_norm", *(["eval_loss"] if "eval_loss" in a else [])):
            assert a[name] == pytest.approx(b[name], rel=1e-6), (a["step"], name)
        assert a["expert_counts"] == b["expert_counts"]
    launch(mixed, 2, "--train.steps", "2", *constant)
    launch(mixed, 1, "--train.steps", "3", *constant)
    launch(mixed, 2, *constant)
    for a, b in zip(steps(mixed), first, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["expert_counts"] == b["expert_counts"]


@pytest.mark.slow
def test_two_processes_import_a_public_checkpoint(tmp_path):
    """Each reads what its devices hold; what one process exports of it is the checkpoint, bit for bit."""
    public, run, out = ROOT / "tests" / "goldens" / "hf" / "mixtral", tmp_path / "run", tmp_path / "out"
    split = ["--parallel.tp=2", "--parallel.ep=4", "--parallel.transport=alltoall", "--train.batch-size=4"]
    command, port = ["-m", "moex.hf", "import", str(public), str(run), *split], free_port()
    running = [start(command, 2, **place(port, 2, i)) for i in range(2)]
    outputs = [process.communicate(timeout=240)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], "\n".join(outputs)
    assert f"imported to {run}" in outputs[0] and "imported to" not in outputs[1]
    export = start(["-m", "moex.hf", "export", str(run), str(out)], 1)
    assert (export.communicate(timeout=120)[0], export.returncode)[1] == 0
    theirs, ours = (load_file(folder / "model.safetensors") for folder in (public, out))
    assert theirs.keys() == ours.keys() and all(theirs[name].tobytes() == ours[name].tobytes() for name in theirs)


@pytest.mark.slow
def test_unreachable_process_0_ends_the_others_within_the_limit(tmp_path):
    port, began = free_port(), time.monotonic()
    lonely = begin(tmp_path, 1, COORDINATOR_TIMEOUT_S="1", **place(port, 2, 1))
    output = lonely.communicate(timeout=60)[0]
    assert lonely.returncode == 2, output
    assert f"could not reach process 0 at 127.0.0.1:{port} within 1 s" in output and "Traceback" not in output
    assert time.monotonic() - began < 40  # nearly all of it imports


@pytest.mark.slow
@pytest.mark.parametrize(
    "devices, counts, message",
    [
        ((1, 1), (2, 3), "was told of 3 processes, process 0 on .* of 2: set NUM_PROCESSES alike on all"),
        ((2, 1), (2, 2), "process 0 on .* has 2 cpu devices, process 1 on .* has 1: a mesh needs as many on each"),
    ],
)
def test_wrong_counts_end_both_processes_before_anything_is_compiled(tmp_path, devices, counts, message):
    port = free_port()
    running = [begin(tmp_path / "run", devices[i], **place(port, counts[i], i)) for i in range(2)]
    for process in running:
        output = process.communicate(timeout=90)[0]
        assert process.returncode == 2, output
        assert re.search(message, output) and "Traceback" not in output
    assert not (tmp_path / "run").exists()
