"""`benchmarks/gpu.py` runs from end to end on a CPU, so that it works when a GPU is at hand for minutes."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def module(name: str):
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[name] = found  # dataclasses look their module up
    spec.loader.exec_module(found)
    return found


@pytest.mark.slow
def test_one_command_checks_times_and_trains(tmp_path):
    environment = os.environ | dict(JAX_PLATFORMS="cpu", XLA_FLAGS="")
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--tiny", "--tune", "--out", str(tmp_path / "gpu.json")]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["interpreted"]
    assert len(report["kernels"]) == 10
    assert all(row["right"] and row["seconds"] > 0 for row in report["kernels"])
    assert {"xla"} == report["kernels"][0]["rivals"].keys()
    assert len(report["kernels"][0]["settings"]) == 2
    assert report["tuned"] == []  # what an interpreter took is nothing to keep
    run = report["training"]["--precision.compute_dtype bfloat16"]
    assert run["steps"] == 2
    assert run["mfu"] is None  # no peak is listed for a CPU
    assert "e4m3_by_cublaslt" in report["ceilings"]


def test_a_wrong_kernel_is_reported_and_not_timed(monkeypatch):
    import jax.numpy as jnp

    cases = module("gpu_cases")
    bench = cases.Bench(
        name="one",
        make=lambda seed: (jnp.ones(4),),
        run=lambda x: x + 1,
        rivals={},
        check=lambda got, given: cases.relative_error(got, given[0]),
        num_bytes=32,
    )
    gpu = module("gpu")
    row = gpu.measure(bench, None, dict(copy_bytes_per_s=1.0, bf16_flops=1.0), None)
    assert not row["right"]
    assert row["error"] == 1.0
    assert "seconds" not in row
    assert "WRONG" in gpu.line(row)


def test_production_cases_name_every_op():
    names = {bench.op or bench.name.split()[0] for bench in module("gpu_cases").all_cases(tiny=False)}
    assert {"quantize", "permute", "combine", "grouped_matmul", "scaled_grouped_matmul"} <= names
