"""Every kernel on the GPU at hand: right, how fast, beside what else there is; then a training run of a 2B model.

    python benchmarks/gpu.py [--out FILE] [--tune] [--seconds 420] [--tiny]

Each kernel's result is compared with its oracle first; a wrong one is reported and not timed. Figures go to FILE (gpu.json)
as JSON and to the terminal. --tune tries a few settings of each kernel and keeps the best under pallas_kernels/*/tuned/.
After --seconds no new case is begun, and what was left out is named. --tiny runs everything small, on a CPU in the GPU
interpreter: its times mean nothing. Exits with 1 when a result was wrong or a part failed.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

TRAINING = {  # about 1.9 B parameters, 0.5 B a token
    False: (
        "--model.d_model 2048 --model.num_layers 16 --model.expert_width 1024 --model.attention.num_heads 16 "
        "--model.attention.num_kv_heads 16 --model.attention.head_dim 128 --model.router.num_experts 16 "
        "--model.init_std 0.02 "
        "--train.batch_size 8 --train.seq_len 2048 --train.steps 24 --optimizer.warmup_steps 4 "
        "--memory.recompute layer --observe.eval_rows 8 --observe.sample_tokens 0"
    ),
    True: (
        "--model.num_layers 1 --model.expert_width 128 --train.steps 2 --train.seq_len 32 --train.batch_size 2 "
        "--optimizer.warmup_steps 1 --observe.eval_rows 2 --observe.sample_tokens 0"
    ),
}


def measure_kernels(arguments: argparse.Namespace) -> dict:
    """Checks and times all kernels; runs in a process of its own, since JAX keeps the GPU's memory."""
    import jax
    from gpu_cases import all_cases, triton_ragged_dot
    from gpu_timing import Clock, ceilings
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels import hopper

    tiny = arguments.tiny
    mode = contextlib.nullcontext()
    if tiny and jax.default_backend() == "cpu":
        mode = plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams())
    with mode:
        if reason := hopper.unavailable():
            sys.exit(f"the kernels don't run here: {reason} (--tiny runs them in the interpreter)")
        clock = Clock(flush_bytes=1 << 12 if tiny else 1 << 28, rounds=1 if tiny else 20)
        report = dict(
            device=jax.devices()[0].device_kind,
            jax=jax.__version__,
            interpreted=jax.default_backend() == "cpu",
            ceilings=ceilings(clock, tiny=tiny),
            triton="tokamax" if triton_ragged_dot() is not None else "not in this environment",
            kernels=[],
            left_out=[],
        )
        began, best = time.monotonic(), {}
        for bench in all_cases(tiny=tiny):
            if time.monotonic() - began > arguments.seconds:
                report["left_out"].append(bench.name)
                continue
            try:
                row = measure(bench, clock, report["ceilings"], best if arguments.tune else None)
            except Exception as error:  # told, and counted as wrong; the other kernels are still worth their time
                row = dict(name=bench.name, right=False, failed=f"{type(error).__name__}: {error}"[:2000])
            report["kernels"].append(row)
            print(line(row), flush=True)
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")  # a later crash leaves what was found
    if arguments.tune:
        report["tuned"] = keep(best, report["device"])
    return report


def measure(bench, clock, ceiling: dict, best: dict | None) -> dict:
    """One kernel's row: error, seconds, rates and shares of the ceilings, its rivals' seconds; the best setting if asked."""
    import jax

    inputs = [bench.make(seed) for seed in (0, 1)]
    row: dict = dict(name=bench.name, bytes=bench.num_bytes, flops=bench.flops, tolerance=bench.tolerance)
    call = jax.jit(bench.run)
    row["error"] = max(bench.check(call(*given), given) for given in inputs)
    row["right"] = bool(row["error"] <= bench.tolerance)
    if not row["right"]:
        return row
    row["seconds"] = clock.seconds(call, inputs)
    row["bytes_per_s"], row["flops_per_s"] = bench.num_bytes / row["seconds"], bench.flops / row["seconds"]
    row["share_of_copying"] = row["bytes_per_s"] / ceiling["copy_bytes_per_s"]
    row["share_of_bf16"] = row["flops_per_s"] / ceiling["bf16_flops"]
    row["rivals"] = {name: clock.seconds(rival, inputs) for name, rival in bench.rivals.items()}
    if best is not None and bench.settings:
        row["settings"] = tried = [
            dict(
                setting={k: vars(v) for k, v in setting.items()},
                seconds=clock.seconds(jax.jit(with_(bench, setting)), inputs),
            )
            for setting in bench.settings
        ]
        best.setdefault(bench.op, {})[bench.shape] = min(tried, key=lambda x: x["seconds"])["setting"]["tiles"]
    return row


def with_(bench, setting: dict):
    return lambda *given: bench.run(*given, **setting)


def keep(best: dict, device: str) -> list[str]:
    """Writes the best settings beside their ops, for devices that are GPUs; returns the files."""
    from pallas_kernels import tuned

    files = []
    for op, by_shape in best.items():
        file = tuned.file_of(op, device)
        if device == "cpu":
            continue
        file.parent.mkdir(exist_ok=True)
        old = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(old | by_shape, indent=1, sort_keys=True) + "\n")
        files.append(str(file.relative_to(ROOT)))
    return files


def line(row: dict) -> str:
    """A kernel's line of the printed table."""
    if "failed" in row:
        return f"{row['name']:58} FAILED: {row['failed'][:300]}"
    if not row["right"]:
        return f"{row['name']:58} WRONG: error {row['error']:.2e}, at most {row['tolerance']:.0e} is right"
    rivals = ", ".join(f"{name} {s * 1e6:,.0f}" for name, s in row["rivals"].items())
    work = f"{row['flops_per_s'] / 1e12:7.1f} TFLOP/s ({row['share_of_bf16']:5.1%})" if row["flops"] else " " * 24
    rate = f"{row['bytes_per_s'] / 1e9:7.0f} GB/s ({row['share_of_copying']:5.1%})"
    return f"{row['name']:58}{row['seconds'] * 1e6:10,.0f} us {work} {rate}  | us of {rivals or 'no rival'}"


def float8_recipes() -> list[str]:
    """Flags of the FP8 recipes that this device computes all products in."""
    import jax

    from moex.precision.products import missing_hardware
    from moex.precision.recipes import RECIPES

    kind = jax.devices()[0].device_kind
    lacks = lambda recipe: any(missing_hardware(recipe, kind, grouped=grouped) for grouped in (False, True))
    return [f"--precision {name}" for name, recipe in RECIPES.items() if "fp8" in name and not lacks(recipe)]


def train(flags: str, *, tiny: bool) -> dict:
    """A short training run on one GPU: tokens/s and MFU, medians of its second half."""
    flags = f"{TRAINING[tiny]} {flags}"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "train.py"), "tiny", "--folder", folder, *flags.split()]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        if done.returncode:
            return dict(failed=f"exit {done.returncode}: {done.stderr[-2000:]}")
        steps = [json.loads(text) for text in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
        plan = json.loads((Path(folder) / "plan.json").read_text())
    steps = [step for step in steps if "tokens_per_s" in step]
    late = steps[len(steps) // 2 :]
    shares = [step["mfu"] for step in late if step["mfu"] is not None]
    return dict(
        flags=flags,
        plan=plan,
        steps=len(steps),
        tokens_per_s=statistics.median(step["tokens_per_s"] for step in late),
        mfu=statistics.median(shares) if shares else None,
        loss=late[-1]["loss"],
    )


def told(run: dict) -> str:
    """A training run in one line."""
    if "failed" in run:
        return run["failed"]
    share = "no listed peak" if run["mfu"] is None else f"{run['mfu']:.1%} of the listed bfloat16 peak"
    return f"{run['tokens_per_s']:,.0f} tokens/s, {share}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--kernels-only", action="store_true", help="no training run; in this process")
    arguments = parser.parse_args()
    if arguments.kernels_only:
        report = measure_kernels(arguments)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
        return int(not all(row["right"] for row in report["kernels"]))
    arguments.out.unlink(missing_ok=True)
    child = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--kernels-only"], check=False)
    if not arguments.out.exists():
        return 1
    report = json.loads(arguments.out.read_text())
    in_float8 = float8_recipes()[: 1 if arguments.tiny else None]  # a CPU would emulate each for half a minute
    recipes = ["--precision.compute_dtype bfloat16", *in_float8]
    report["training"] = runs = {recipe: train(recipe, tiny=arguments.tiny) for recipe in recipes}
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    for recipe, run in runs.items():
        print(f"training {recipe}: {told(run)}")
    if len(recipes) == 1:
        print("training in FP8: moex has no such precision")
    print("left out for want of time: " + (", ".join(report["left_out"]) or "nothing"))
    print(f"Triton grouped product: {report['triton']}; figures in {arguments.out}")
    return child.returncode or int(any("failed" in run for run in runs.values()))


if __name__ == "__main__":
    sys.exit(main())
