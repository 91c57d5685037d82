"""Compiles the whole training step of a DeepSeek-V3-shaped model for 256 H100s, without a GPU, and reads the program.

    scripts/setup_aot.sh
    python benchmarks/compile_deepseek_v3.py

Exits with 1 when the step reduces anything in BF16, waits for the host or doesn't fit 80 GB.
"""

import argparse
import collections
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from moex.config import MemoryConfig, ParallelConfig, RunConfig, TrainConfig
from moex.models.families import deepseek_v3
from moex.plan.compiled import compile_step
from moex.plan.module import waits_for_host
from moex.validate import resolve_fold

TARGET = Path(__file__).parents[1] / "moex/plan/targets/h100.txtpb"
COLLECTIVE = re.compile(
    r"= \(?(\w+)\[.*? (all-reduce|reduce-scatter|all-gather|all-to-all|ragged-all-to-all|collective-permute)(-start)?\("
)
USABLE_GIB = 80e9 / 2**30


def configuration(num_layers: int) -> RunConfig:
    """The published shape without multi-token prediction: 671B parameters at 61 layers."""
    model = deepseek_v3(
        vocab_size=129_280, d_model=7168, num_layers=num_layers, num_dense_layers=3, dense_width=18_432,
        expert_width=2048, shared_width=2048, num_heads=128, nope_dim=128, rope_dim=64, value_dim=128,
        q_latent_dim=1536, kv_latent_dim=512, num_experts=256, top_k=8, num_groups=8, top_groups=4,
    )  # fmt: skip
    return RunConfig(
        model=model,
        parallel=ParallelConfig(tp=2, ep=64, zero=3, transport="alltoall", cell_factor=1.25, row_factor=1.25),
        train=TrainConfig(batch_size=128, seq_len=4096),
        memory=MemoryConfig(recompute=("layer",)),
    )


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--layers", type=int, default=61)
    arguments.add_argument("--python", type=Path, default=Path(__file__).parents[1] / ".venv-aot/bin/python")
    a = arguments.parse_args()
    config = configuration(a.layers)
    step = compile_step(config, 256, TARGET.read_text(), python=a.python)
    found = collections.Counter(
        f"{match[2]} {match[1]}" for line in step.text.splitlines() if (match := COLLECTIVE.search(line))
    )
    peak = step.peak_bytes / 2**30
    print(f"{a.layers} layers, {resolve_fold(config.parallel, 256).describe()}")
    print(f"compiled in {step.compile_s:.0f} s")
    print(f"GiB a GPU: arguments {step.argument_bytes / 2**30:.1f}, peak {peak:.1f} of {USABLE_GIB:.1f}")
    print("collectives in the program (loops counted once): " + ", ".join(f"{n} {c}" for n, c in sorted(found.items())))
    low = [name for name in found if name in ("all-reduce bf16", "reduce-scatter bf16")]
    print(f"reductions in BF16: {', '.join(low) or 'none'}")
    waits = waits_for_host(step.thunks, step.text)
    print(f"waits for the host: {', '.join(waits) or 'nowhere'}")
    return int(bool(low or waits) or peak > USABLE_GIB)


if __name__ == "__main__":
    sys.exit(main())
