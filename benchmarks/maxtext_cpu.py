"""moex beside MaxText on this machine's CPU: the same small Mixtral-shaped model, in one run.

    python benchmarks/maxtext_cpu.py [--steps 12] [--rounds 2]

Installs MaxText 0.2.5 into `.venv-maxtext` the first time (2 GB). The two run in turns, each in processes of its own, so
that a noisy machine disturbs both alike; compare the smallest step times. Model: 4 layers, width 256, 8 query and 4
key-value heads of 32, 8 experts of 512, top 2, vocabulary 4096; 4 rows of 512 tokens; float32.
"""

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
VENV = ROOT / ".venv-maxtext"
REQUIREMENTS = [
    "jax==0.11.2",
    "flax>=0.12.9",
    "optax",
    "orbax-checkpoint>=0.12.4",
    "qwix>=0.1.8",
    "tokamax>=0.0.14",
    "aqtp",
    "grain[parquet]",
    "absl-py",
    "pydantic>=2.13",
    "omegaconf",
    "jsonlines",
    "sentencepiece",
    "tiktoken",
    "transformers>=5.8.0",
    "datasets",
    "tensorboardx",
    "pathwaysutils",
    "cloud-accelerator-diagnostics",
    "ml-goodput-measurement",
    "google-cloud-storage",
    "gcsfs",
    "drjax",
    "jaxtyping",
    "psutil",
    "ml-collections",
    "math-verify",
    "huggingface_hub",
    "jinja2",
    "pillow",
]
SHAPE = [
    "decoder_block=mixtral",
    "base_emb_dim=256",
    "base_num_query_heads=8",
    "base_num_kv_heads=4",
    "head_dim=32",
    "base_mlp_dim=512",
    "base_moe_mlp_dim=512",
    "base_num_decoder_layers=4",
    "vocab_size=4096",
    "num_experts=8",
    "num_experts_per_tok=2",
    "load_balance_loss_weight=0.01",
    "max_target_length=512",
    "per_device_batch_size=4",
    "sparse_matmul=true",
    "megablox=false",
    "capacity_factor=-1.0",
    "attention=dot_product",
    "dtype=float32",
    "weight_dtype=float32",
    "matmul_precision=highest",
    "remat_policy=minimal_with_context",
    "scan_layers=true",
]
SETTINGS = [
    "hardware=cpu",
    "skip_jax_distributed_system=true",
    "dataset_type=synthetic",
    "enable_checkpointing=false",
    "log_period=1",
    "learning_rate=1e-3",
]


def install() -> Path:
    python = VENV / "bin" / "python"
    if not (VENV / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
        pip = [str(python), "-m", "pip", "install", "-q"]
        subprocess.run([*pip, "--no-deps", "maxtext==0.2.5"], check=True)
        subprocess.run([*pip, *REQUIREMENTS], check=True)
        (VENV / "ready").touch()
    return python


def run_maxtext(python: Path, steps: int, folder: str) -> dict:
    """Step seconds as MaxText logs them, without the first two, and peak resident bytes of the process."""
    code = "import maxtext, pathlib; print(pathlib.Path(maxtext.__path__[0]) / 'configs' / 'base.yml')"
    base = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split()[-1]
    command = [
        str(python), "-m", "maxtext.trainers.pre_train.train", base, "run_name=peer", f"base_output_directory={folder}",
        f"steps={steps}", *SETTINGS, *SHAPE,
    ]  # fmt: skip
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "DECOUPLE_GCLOUD": "TRUE"}
    seconds, losses = [], []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if match := re.search(r"completed step: (\d+), seconds: ([\d.]+).*?loss: ([\d.]+)", line):
                seconds.append(float(match[2]))
                losses.append(float(match[3]))
        _, status, usage = os.wait4(process.pid, 0)  # of this child alone: RUSAGE_CHILDREN holds moex's peak too
        process.returncode, peak = os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024
    if process.returncode or len(seconds) < 4:
        raise RuntimeError(f"MaxText ended with {process.returncode}:\n{''.join(lines[-30:])}")
    return dict(seconds=seconds[2:], loss=losses[-1], peak=peak)


def run_moex(steps: int) -> dict:
    done = subprocess.run(
        [sys.executable, __file__, "--moex", "--steps", str(steps)],
        capture_output=True, text=True, check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def moex_steps(steps: int) -> dict:
    """The step of moex in this process: seconds a step without the first two, last loss, peak resident bytes."""
    sys.path.insert(0, str(ROOT))
    import jax
    import numpy as np

    from moex.config import AttentionConfig, ModelConfig, PrecisionConfig, RouterConfig, RunConfig, TrainConfig
    from moex.models.flops import train_flops_per_token
    from moex.train.placing import place_batch
    from moex.train.program import build
    from moex.validate import resolve_fold

    jax.config.update("jax_default_matmul_precision", "highest")
    model = ModelConfig(
        vocab_size=4096, d_model=256, num_layers=4, expert_width=512,
        attention=AttentionConfig(num_heads=8, num_kv_heads=4, head_dim=32),
        router=RouterConfig(num_experts=8, top_k=2, aux_coefficient=0.01),
    )  # fmt: skip
    config = RunConfig(
        model=model,
        train=TrainConfig(steps=1000, batch_size=4, seq_len=512),
        precision=PrecisionConfig(compute_dtype="float32"),
    )
    program = build(config, resolve_fold(config.parallel, 1))
    rows = np.random.default_rng(0).integers(0, 4096, (1, 4, 513)).astype(np.int32)
    ones = np.ones((1, 4, 512), np.int32)
    arrays = dict(tokens=rows[..., :-1], labels=rows[..., 1:], mask=ones > 0, segments=ones)
    arrays["positions"] = np.broadcast_to(np.arange(512, dtype=np.int32), (1, 4, 512))
    state, seconds, metrics = program.initial_state(), [], {}
    for step in range(steps):
        batch = jax.block_until_ready(place_batch(lambda _: arrays, step, program.batch))
        began = time.perf_counter()
        state, metrics = jax.block_until_ready(program.train(state, batch))
        seconds.append(time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    gflop = train_flops_per_token(model, 512) * 4 * 512 / 1e9
    return dict(seconds=seconds[2:], loss=float(metrics["lm_loss"]), peak=peak, gflop=gflop)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--moex", action="store_true", help="only moex, in this process (used by the script itself)")
    arguments = parser.parse_args()
    if arguments.moex:
        print(json.dumps(moex_steps(arguments.steps)))
        return 0
    python, results = install(), {"MaxText 0.2.5": [], "moex": []}
    for _ in range(arguments.rounds):
        results["moex"].append(run_moex(arguments.steps))
        with tempfile.TemporaryDirectory() as folder:
            results["MaxText 0.2.5"].append(run_maxtext(python, arguments.steps, folder))
    gflop = results["moex"][0]["gflop"]
    heads = ("min s", "median s", "GFLOP/s", "peak MB", "last loss")
    print(" " * 14 + "".join(f"{head:>10}" for head in heads) + f"   ({gflop:.1f} useful GFLOP a step)")
    least = {}
    for name, runs in results.items():
        seconds = [s for run in runs for s in run["seconds"]]
        least[name] = min(seconds)
        print(
            f"{name:14}{min(seconds):10.3f}{statistics.median(seconds):10.3f}{gflop / min(seconds):10.1f}"
            f"{max(run['peak'] for run in runs) / 1e6:10.0f}{runs[-1]['loss']:10.3f}"
        )
    ratio = least["moex"] / least["MaxText 0.2.5"]
    print(f"moex takes {ratio:.3f} of MaxText's step time (gate: 0.333)")
    return int(ratio > 1 / 3)


if __name__ == "__main__":
    sys.exit(main())
