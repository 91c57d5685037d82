"""Memory of the training step by what experts' rows are kept in, compiled for 8 H100s without a GPU.

    scripts/setup_aot.sh
    python benchmarks/stash.py [--layers 32] [--only "stash, layers recomputed"]

Layers of Qwen3-30B-A3B (D 2048, F 768, 128 experts, k 8), 4096 tokens a GPU, ep 8, buffers of four times the balanced rows.
Gradients of the weights are temporaries, too, as large as the weights themselves: the gates are on what is left without
them. Exits with 1 when, at 32 layers, a stash with recomputed layers leaves 12 GiB or more, or buffers in every layer 33 or
less, or a pool is copied, or a step waits for the host.
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


def configuration(memory: MemoryConfig, num_layers: int) -> RunConfig:
    return RunConfig(
        model=ModelConfig(
            vocab_size=2048, d_model=D, num_layers=num_layers, expert_width=F,
            attention=AttentionConfig(num_heads=32, num_kv_heads=4, head_dim=128, qk_norm=True),
            router=RouterConfig(num_experts=128, top_k=TOP_K),
        ),
        parallel=ParallelConfig(ep=8, zero=3, transport="alltoall", cell_factor=1.0, spill_factor=0.35, row_factor=ROWS),
        train=TrainConfig(batch_size=8, seq_len=TOKENS),
        memory=memory,
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--python", type=Path, default=ROOT / ".venv-aot/bin/python")
    parser.add_argument("--only", choices=list(RECIPES), action="append")
    a = parser.parse_args()
    target = (ROOT / "moex/plan/targets/h100.txtpb").read_text()
    pool_bytes = int((1.1 * a.layers + ROWS) * TOKENS * TOP_K) * D * 2  # the smaller of the two large ones
    failed = []
    columns = ("temporaries", "without gradients", "peak", "copies of a pool", "compiled in")
    print(f"{a.layers} layers; GiB a GPU\n{'':30}" + "".join(f"{name:>19}" for name in columns))
    for name in a.only or RECIPES:
        step = compile_step(configuration(RECIPES[name], a.layers), 8, target, python=a.python)
        copied, gradients = copies(step.text, pool_bytes), step.argument_bytes / 3  # the rest are AdamW's two moments
        left = (step.temporary_bytes - gradients) / 2**30
        numbers = "".join(f"{x:19.2f}" for x in (step.temporary_bytes / 2**30, left, step.peak_bytes / 2**30))
        print(f"{name:30}{numbers}{len(copied):19}{step.compile_s:17.0f} s", flush=True)
        failed += [f"{name}: {problem}" for problem in waits_for_host(step.thunks, step.text)]
        failed += [f"{name}: {line[:160]}" for line in copied if "stash" in name]
        if a.layers == 32 and name == "stash, layers recomputed" and left >= 12:
            failed.append(f"{name}: {left:.2f} GiB, not under 12")
        if a.layers == 32 and name == "buffers in every layer" and left <= 33:
            failed.append(f"{name}: {left:.2f} GiB, not over 33: compare with something else")
    print("\n".join(failed) or "as it should be")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
