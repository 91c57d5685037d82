"""Two processes on loopback train like one, and each continues what the other saved."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SMALL = [
    "tiny", "--train.steps", "4", "--train.batch_size", "8", "--train.seq_len", "32", "--model.num_layers", "1",
    "--model.d_model", "32", "--model.expert_width", "32", "--optimizer.warmup_steps", "1", "--observe.eval_every", "2",
    "--observe.eval_rows", "8", "--observe.sample_tokens", "4", "--checkpoint.every_steps", "2", "--checkpoint.keep", "3",
    "--parallel.tp", "2", "--parallel.ep", "4", "--parallel.transport", "alltoall",
]  # fmt: skip


def launch(folder: Path, num_processes: int, *overrides: str) -> None:
    """Runs train.py in one or two processes, eight devices in all; fails with their output when one does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    running = []
    for process in range(num_processes):
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={8 // num_processes}",
        }
        if num_processes > 1:
            environment |= {
                "COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
                "NUM_PROCESSES": str(num_processes),
                "PROCESS_ID": str(process),
            }
        command = [sys.executable, str(ROOT / "train.py"), *SMALL, "--folder", str(folder), *overrides]
        running.append(
            subprocess.Popen(
                command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        )
    outputs = [process.communicate(timeout=240)[0] for process in running]
    assert [process.returncode for process in running] == [0] * num_processes, "\n".join(outputs)


def steps(folder: Path) -> list[dict]:
    timed = ("time", "step_s", "tokens_per_s", "model_tflops")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in timed} for line in lines]


@pytest.mark.slow
def test_two_processes_equal_one_and_continue_each_other(tmp_path):
    one, two, mixed = tmp_path / "one", tmp_path / "two", tmp_path / "mixed"
    launch(one, 1)
    launch(two, 2)
    first, second = steps(one), steps(two)
    assert len(first) == len(second) == 4
    for a, b in zip(first, second, strict=True):
        for name in ("loss", "aux_loss", "grad_norm", *(["eval_loss"] if "eval_loss" in a else [])):
            assert a[name] == pytest.approx(b[name], rel=1e-6), (a["step"], name)
        assert a["expert_counts"] == b["expert_counts"]
    constant = ("--optimizer.schedule", "constant")  # so that a shorter run is the start of a longer one
    launch(mixed, 2, "--train.steps", "2", *constant)
    launch(mixed, 1, "--train.steps", "3", *constant)
    launch(mixed, 2, *constant)
    straight = tmp_path / "straight"
    launch(straight, 1, *constant)
    for a, b in zip(steps(mixed), steps(straight), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["expert_counts"] == b["expert_counts"]
