"""Compiles the whole training step of a DeepSeek-V3-shaped model for 256 H100s, without a GPU, and reads the program.

    python -m venv .venv-aot
    .venv-aot/bin/pip install jax==0.12.0.1 flax optax
    .venv-aot/bin/pip install --no-deps jax-cuda13-plugin==0.12.0.1 jax-cuda13-pjrt==0.12.0.1 \
        nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm
    PATH=$(echo $PWD/.venv-aot/lib/python3*/site-packages/nvidia/cu13/bin):$PATH JAX_PLATFORMS=cpu \
        .venv-aot/bin/python benchmarks/compile_deepseek_v3.py

The CUDA plugin must not stand in the environment of CPU runs, hence one of its own. Exits with 1 when the step reduces
anything in BF16 or doesn't fit 80 GB.
"""

import argparse
import collections
import re
import sys
import time
from pathlib import Path

import jax
from jax.experimental import topologies

sys.path.insert(0, str(Path(__file__).parents[1]))

from mesh import fold
from moex.config import MemoryConfig, ParallelConfig, RunConfig, TrainConfig
from moex.models.families import deepseek_v3
from moex.train.program import build

TARGET = Path(__file__).parent / "targets" / "h100.txtpb"
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
    num_layers = arguments.parse_args().layers
    folded = fold(dict(dp=128, tp=2), dict(edp=4, ep=64))
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=TARGET.read_text(), topology="1x32x8"
    )  # 32 hosts of 8 GPUs
    mesh = topologies.make_mesh(topology, folded.shape, folded.names)
    program = build(configuration(num_layers), folded, mesh=mesh)
    began = time.perf_counter()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = program.train.lower(program.state, program.batch).compile()
    seconds = time.perf_counter() - began
    memory = compiled.memory_analysis()
    found = collections.Counter(
        f"{match[2]} {match[1]}" for line in compiled.as_text().splitlines() if (match := COLLECTIVE.search(line))
    )
    peak = memory.peak_memory_in_bytes / 2**30
    print(f"{num_layers} layers, {folded.describe()}")
    print(f"compiled in {seconds:.0f} s")
    print(f"GiB a GPU: arguments {memory.argument_size_in_bytes / 2**30:.1f}, peak {peak:.1f} of {USABLE_GIB:.1f}")
    print("collectives in the program (loops counted once): " + ", ".join(f"{n} {c}" for n, c in sorted(found.items())))
    low = [name for name in found if name in ("all-reduce bf16", "reduce-scatter bf16")]
    print(f"reductions in BF16: {', '.join(low) or 'none'}")
    return int(bool(low) or peak > USABLE_GIB)


if __name__ == "__main__":
    sys.exit(main())
