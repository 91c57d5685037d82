"""Memory of the training step by what experts' rows are kept in, compiled for 8 H100s without a GPU.

    make .venv-aot once:  scripts/setup_aot.sh
    python benchmarks/stash.py [--layers 32] [--only "stash, layers recomputed"]

Layers of Qwen3-30B-A3B's sizes (D 2048, F 768, k 8), 4096 tokens a GPU, ep 8, buffers of four times the balanced rows. 8
experts by default, not 128: gradients of weights are temporaries, too, and depend on nothing that is compared here.
Exits with 1 when the stash with recomputed layers takes 12 GiB of temporaries or more, or buffers in every layer 33 or less
(at 32 layers and 8 experts), or a pool is copied.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from moex.config import AttentionConfig, MemoryConfig, ModelConfig, ParallelConfig, RouterConfig, RunConfig, TrainConfig
from moex.plan.compiled import compile_step
from moex.plan.module import copies, waits_for_host

ROOT = Path(__file__).parents[1]
TOKENS, TOP_K, D, F, ROWS = 4096, 8, 2048, 768, 4.0
STASH = dict(stash=("experts",), stash_factor=1.1)
RECIPES = {
    "buffers in every layer": MemoryConfig(recompute=("attention",)),
    "stash": MemoryConfig(recompute=("attention",), **STASH),
    "stash, layers recomputed": MemoryConfig(recompute=("layer",), **STASH),
    "layers recomputed, no stash": MemoryConfig(recompute=("layer",)),
}


def configuration(memory: MemoryConfig, num_layers: int, num_experts: int) -> RunConfig:
    return RunConfig(
        model=ModelConfig(
            vocab_size=2048, d_model=D, num_layers=num_layers, expert_width=F,
            attention=AttentionConfig(num_heads=32, num_kv_heads=4, head_dim=128, qk_norm=True),
            router=RouterConfig(num_experts=num_experts, top_k=TOP_K),
        ),
        parallel=ParallelConfig(ep=8, zero=3, transport="alltoall", cell_factor=1.25, spill_factor=0.35, row_factor=ROWS),
        train=TrainConfig(batch_size=8, seq_len=TOKENS),
        memory=memory,
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--python", type=Path, default=ROOT / ".venv-aot/bin/python")
    parser.add_argument("--only", choices=list(RECIPES), action="append")
    a = parser.parse_args()
    target = (ROOT / "benchmarks/targets/h100.txtpb").read_text()
    pool_bytes = int((1.1 * a.layers + ROWS) * TOKENS * TOP_K) * D * 2  # the smaller of the two large ones
    failed = []
    print(
        f"{a.layers} layers; GiB a GPU\n{'':30}{'temporaries':>12}{'peak':>8}{'copies of a pool':>18}{'compiled in':>13}"
    )
    for name in a.only or RECIPES:
        step = compile_step(configuration(RECIPES[name], a.layers, a.experts), 8, target, python=a.python)
        copied, gib = copies(step.text, pool_bytes), step.temporary_bytes / 2**30
        print(f"{name:30}{gib:12.2f}{step.peak_bytes / 2**30:8.2f}{len(copied):18}{step.compile_s:11.0f} s", flush=True)
        failed += [f"{name}: {problem}" for problem in waits_for_host(step.thunks, step.text)]
        failed += [f"{name}: {line[:160]}" for line in copied if "stash" in name]
        gate = (a.layers, a.experts) == (32, 8)
        if gate and name == "stash, layers recomputed" and gib >= 12:
            failed.append(f"{name}: {gib:.2f} GiB of temporaries, not under 12")
        if gate and name == "buffers in every layer" and gib <= 33:
            failed.append(f"{name}: {gib:.2f} GiB of temporaries, not over 33: compare with something else")
    print("\n".join(failed) or "as it should be")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
