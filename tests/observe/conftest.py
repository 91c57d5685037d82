"""A made-up run folder, with the curves of a real one and everything the report shows."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from moex.observe.jsonl import encode


def step_record(step: int, counts: np.ndarray, num_steps: int, rng: np.random.Generator) -> dict:
    smooth = 1.4 + 4.1 * math.exp(-9 * step / num_steps)
    lm_loss = smooth + 0.05 * rng.normal()
    warm_up = max(1, num_steps // 20)
    lr = 1e-3 * min((step + 1) / warm_up, 0.1 + 0.45 * (1 + math.cos(math.pi * step / num_steps)))
    record = {
        "step": step,
        "loss": lm_loss + 0.011,
        "lm_loss": lm_loss,
        "aux_loss": 1.0 + 0.3 * math.exp(-20 * step / num_steps) + 0.01 * rng.random(),
        "z_loss": 0.8 + 0.05 * rng.random(),
        "grad_norm": 0.4 + 3 * math.exp(-15 * step / num_steps) + 0.2 * rng.random() ** 4,
        "lr": lr,
        "valid_tokens": 16384,
        "tokens_per_s": 120_000 * (0.95 + 0.1 * rng.random()) * (0.3 if step == 0 else 1),
        "model_tflops": 310.0,
        "mfu": None,
        "expert_counts": counts.tolist(),
        "dropped": 0,
        "overflow": False,
        "skipped": False,
        "step_s": 0.137,
        "time": 1.8e9 + 0.15 * step,
    }
    if (step + 1) % max(1, num_steps // 12) == 0:
        record |= {"eval_loss": smooth + 0.03, "eval_tokens": 65536}
    return record


def expert_counts(
    num_steps: int, layers: int, experts: int, rng: np.random.Generator, tokens: int = 16384
) -> np.ndarray:
    """Poisson counts [N, L, E] around shares that start uneven and become even."""
    skew = (
        rng.normal(size=(layers, experts))[None]
        * (0.12 + 0.6 * np.exp(-np.arange(num_steps) / (0.15 * num_steps)))[:, None, None]
    )
    share = np.exp(skew)
    return rng.poisson(tokens * 2 * share / share.sum(-1, keepdims=True))


def write_run(
    folder: Path, num_steps: int = 60, layers: int = 2, experts: int = 8, *, finish: bool = True, change=None
) -> Path:
    """Writes the folder; `change(record)` may alter each step's record before it is written."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    counts = expert_counts(num_steps, layers, experts, rng)
    lines = []
    for step in range(num_steps):
        record = step_record(step, counts[step], num_steps, rng)
        if change is not None:
            change(record)
        lines.append(encode(record))
    (folder / "metrics.jsonl").write_bytes(b"".join(lines))
    time = 1.8e9
    events = [
        {
            "kind": "start",
            "time": time,
            "total_steps": num_steps,
            "parameters": 12_345_678,
            "active_parameters": 2_345_678,
        },
        {
            "kind": "data",
            "time": time + 1,
            "train_tokens": 1_000_000,
            "held_out_tokens": 65536,
            "unigram_entropy": 3.1,
            "train_files": ["a.txt", "b.txt"],
            "held_out_files": ["c.txt"],
        },
        {"kind": "sample", "time": time + 5, "step": num_steps // 3, "prompt": "Once ", "text": "Once upoin teh tme"},
        {"kind": "checkpoint", "time": time + 6, "step": num_steps // 2},
        {"kind": "superseded_step", "time": time + 7, "step": num_steps // 2, "record": {"step": num_steps // 2}},
        {"kind": "resume", "time": time + 7, "step": num_steps // 2},
        {
            "kind": "sample",
            "time": time + 8,
            "step": num_steps - 1,
            "prompt": "Once ",
            "text": "upon a time <script>alert('x')</script> & <b>bold\x1b[0m",
        },
    ]
    if finish:
        events.append({"kind": "finish", "time": time + 0.15 * num_steps})
    (folder / "events.jsonl").write_bytes(b"".join(encode(event) for event in events))
    config = {
        "name": "tiny-moe",
        "model": {"num_layers": layers, "vocab_size": 256},
        "optim": {"lr": 1e-3, "betas": [0.9, 0.95]},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "env.json").write_text(json.dumps({"python": "3.12", "devices": ["cpu:0"]}))
    return folder


@pytest.fixture(name="write_run", scope="session")
def write_run_fixture():
    return write_run
