"""Pipeline stages and overlap as XLA compiles them for H100s that aren't there: memory, and how much of rows' way is hidden.

    scripts/setup_aot.sh
    python benchmarks/pipeline.py [--only "v=1, overlap"] [--micros 16 32] [--ep 32] [--steady]

16 layers of 64 experts (D 4096, F 1536, k 8), 4 rows of 1024 tokens a GPU and micro-batch, ep 8, pp 4 on 32 GPUs; attention
and experts are computed again. Hidden shares are of all-to-all bytes, by a replay of the schedule with links of 300 GB/s
(ep in one NVLink domain) and 50 GB/s between domains; --ep 32 takes 128 GPUs and goes across nodes. --steady compiles the
ticks alone that have both a forward and a backward unit, in a third of the time. Exits with 1 when temporaries grow with
the number of micro-batches, or overlap inside a domain hides less than 85 %.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from moex.cli import dump
from moex.config import AttentionConfig, MemoryConfig, ModelConfig, ParallelConfig, RouterConfig, RunConfig, TrainConfig
from moex.models.decoder import Decoder
from moex.plan import compiled
from moex.plan.compiled import compile_step
from moex.plan.hlo import parse
from moex.plan.memory import sizes
from moex.plan.rates import Shares
from moex.plan.target import Target, parse_target
from moex.plan.timeline import Timeline, replay
from moex.train import pipelined
from moex.train.pipelined import layout_of, schedule_of
from moex.validate import resolve_fold

ROOT = Path(__file__).parents[1]
LINK_BYTES_PER_S = 300e9
AGAIN = MemoryConfig(recompute=("attention", "experts"))
CASES = {
    "v=1": dict(pp=4),
    "v=1, overlap": dict(pp=4, overlap=True),
    "v=2": dict(pp=4, virtual_pp=2),
    "v=2, overlap": dict(pp=4, virtual_pp=2, overlap=True),
    "no stages": dict(pp=1),
    "no stages, overlap": dict(pp=1, overlap=True),
}


def configuration(case: str, micros: int, memory: MemoryConfig = AGAIN, ep: int = 8) -> RunConfig:
    stages = CASES[case]
    model = ModelConfig(
        vocab_size=32_768, d_model=4096, num_layers=16, expert_width=1536,
        attention=AttentionConfig(num_heads=32, num_kv_heads=8, head_dim=128, qk_norm=True),
        router=RouterConfig(num_experts=64, top_k=8, aux_coefficient=1e-3, bias_rate=1e-3),
    )  # fmt: skip
    rows = 4 * 4 * ep // stages["pp"]
    return RunConfig(
        model=model,
        parallel=ParallelConfig(**stages, ep=ep, transport="alltoall", cell_factor=1.25, row_factor=1.25),
        memory=memory,
        train=TrainConfig(batch_size=micros * rows, accumulation=micros, seq_len=1024),
    )


def timeline_of(config: RunConfig, text: str, target: Target) -> Timeline:
    fold = resolve_fold(config.parallel, target.num_gpus)
    shares = Shares(nvlink=LINK_BYTES_PER_S / target.accelerator.nvlink_bytes_per_s)
    return replay(parse(text), target, shares, fold=fold, row_share=sizes(config, fold).row_share)


def rows_on_their_way(timeline: Timeline, least_bytes: int = 1 << 20) -> dict[str, float]:
    """bytes, seconds and exposed seconds of rows' all-to-alls in a step; alone: how many have nothing beside them."""
    found = dict(bytes=0.0, hidden_bytes=0.0, seconds=0.0, exposed_s=0.0, alone=0.0)
    for e, c in timeline.sent():
        if c.kind == "all-to-all" and c.num_bytes >= least_bytes and c.module in ("moe/dispatch", "moe/combine"):
            found["bytes"] += e.times * c.num_bytes
            found["hidden_bytes"] += e.times * c.num_bytes * (1 - min(1.0, e.exposed_s / e.lasts_s))
            found["seconds"] += e.times * e.lasts_s
            found["exposed_s"] += e.times * e.exposed_s
            found["alone"] += e.times * c.synchronous
    return found


@dataclasses.dataclass(frozen=True)
class Step:
    text: str
    temporary_bytes: int
    peak_bytes: int
    compile_s: float


def compile_steady(config: RunConfig, num_gpus: int, target: Target, python: Path) -> Step:
    """The step without the ticks of its beginning and end: its results are wrong, its middle is what it is."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(dump(config))
        (folder / "target").write_text(target.description)
        environment = os.environ | dict(PYTHONPATH=str(ROOT), JAX_PLATFORMS="cpu", JAX_ENABLE_COMPILATION_CACHE="0")
        subprocess.run([python, __file__, "--child", name, str(num_gpus)], env=environment, check=True, cwd=name)
        numbers = json.loads((folder / "numbers.json").read_text())
        of = {field: numbers[field] for field in ("temporary_bytes", "peak_bytes", "compile_s")}
        return Step(text=(folder / "module").read_text(), **of)


def child(folder: Path, num_gpus: int) -> None:
    whole = pipelined.schedule_of

    def steady(config, placed):
        schedule = whole(config, placed)
        both = lambda phase: all(any(does.forward) and any(does.backward) for _, does in phase.runs)
        most = max(filter(both, schedule.phases), key=lambda p: p.repeats * sum(length for length, _ in p.runs))
        return schedule._replace(phases=(most,))

    pipelined.schedule_of = steady
    compiled._child(folder, num_gpus, 8)


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        child(Path(sys.argv[2]), int(sys.argv[3]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", type=Path, default=ROOT / ".venv-aot/bin/python")
    parser.add_argument("--only", choices=list(CASES), action="append")
    parser.add_argument("--micros", type=int, nargs="+", default=[16])
    parser.add_argument("--ep", type=int, default=8, help="of four times as many GPUs")
    parser.add_argument("--keep-all", action="store_true", help="recompute nothing: near a GPU's memory")
    parser.add_argument("--steady", action="store_true")
    parser.add_argument("--save", type=Path, help="folder for the scheduled modules")
    a = parser.parse_args()
    target, failed = parse_target(f"h100:{4 * a.ep}"), []
    memory = MemoryConfig() if a.keep_all else AGAIN
    columns = (
        "temporaries MiB",
        "peak MiB",
        "bubble",
        "ticks",
        "a2a ms",
        "exposed",
        "hidden",
        "alone",
        "step ms",
        "compiled s",
    )
    print(f"{'':26}" + "".join(f"{name:>17}" for name in columns))
    for case in a.only or CASES:
        found = {}
        for micros in a.micros:
            config = configuration(case, micros, memory, a.ep)
            schedule = schedule_of(config, layout_of(config, Decoder(config.model, config.parallel)))
            if a.steady:
                step = compile_steady(config, target.num_gpus, target, a.python)
            else:
                step = compile_step(config, target.num_gpus, target.description, python=a.python)
            if a.save:
                (a.save / f"{case.replace(', ', '-').replace(' ', '_')}-{micros}.hlo").write_text(step.text)
            timeline = timeline_of(config, step.text, target)
            rows = rows_on_their_way(timeline)
            hidden = rows["hidden_bytes"] / rows["bytes"]
            found[micros] = step.temporary_bytes
            numbers = (
                f"{step.temporary_bytes / 2**20:,.0f}", f"{step.peak_bytes / 2**20:,.0f}", f"{schedule.bubble:.1%}",
                f"{schedule.num_ticks}", f"{rows['seconds'] * 1e3:.1f}", f"{rows['exposed_s'] * 1e3:.1f}", f"{hidden:.0%}",
                f"{rows['alone']:.0f}", f"{timeline.step_s * 1e3:.0f}", f"{step.compile_s:.0f}",
            )  # fmt: skip
            print(f"{case + f', M={micros}':26}" + "".join(f"{number:>17}" for number in numbers), flush=True)
            failed += [f"{case}: {hidden:.0%} hidden, under 85 %"] * (
                config.parallel.overlap and a.ep <= 8 and hidden < 0.85
            )
        if max(found.values()) > 1.01 * min(found.values()):
            failed.append(f"{case}: temporaries grow with micro-batches: {found}")
    print("\n".join(failed) or "as it should be")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
