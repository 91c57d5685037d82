"""The kernels of quantise, permute and combine, and their XLA forms, as NVIDIA's compiler makes them for an H100."""

import os
import subprocess
from pathlib import Path

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import sass
from pallas_kernels.case import find
from pallas_kernels.combine import Tiles as CombineTiles
from pallas_kernels.permute import Tiles as PermuteTiles

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "moex/plan/targets/h100.txtpb"
MULTIPROCESSORS, REGISTERS, SHARED_BYTES = 132, 65536, 227 * 1024
CASES = [  # op, case, thread blocks that its default grid puts on one multiprocessor
    ("quantize", "quantize rows e4m3 1x128 bf16 8192x7168", 4),
    ("quantize", "quantize both e4m3 1x128 bf16 8192x7168", 2),
    ("quantize", "quantize both e4m3 1x128 bf16 8192x768", 2),
    ("quantize", "quantize both e5m2 1x128 bf16 8192x7168", 2),
    ("quantize", "quantize both e4m3 128x128 f32 4x4096x28672 Mixtral", 2),
    ("permute", "quantize_and_permute e4m3 8192x7168 k8", PermuteTiles().blocks // MULTIPROCESSORS),
    ("permute", "quantize_and_permute e4m3 8192x2048 k8", PermuteTiles().blocks // MULTIPROCESSORS),
    ("permute", "permute bf16 8192x7168 k8", PermuteTiles().blocks // MULTIPROCESSORS),
    ("permute", "permute bf16 8192x2880 k4", PermuteTiles().blocks // MULTIPROCESSORS),
    ("combine", "combine bf16 8192x7168 k8", CombineTiles().blocks // MULTIPROCESSORS),
]


@pytest.mark.parametrize(("op", "name"), [case[:2] for case in CASES], ids=[name for _, name, _ in CASES])
def test_lowers_for_an_h100(op, name):
    """Layouts, transfers and shared memory as Pallas of this JAX checks them; no compiler of NVIDIA's is needed."""
    case = find(f"pallas_kernels.{op}.specs", name)
    h100 = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=MULTIPROCESSORS, platform="cuda")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=h100)):
        lowered = jax.jit(case.function).trace(*case.arguments).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.needs_aot
@pytest.mark.parametrize(("op", "name", "side_by_side"), CASES, ids=[name for _, name, _ in CASES])
def test_no_spills_and_the_whole_grid_at_once(op, name, side_by_side, aot_python):
    """Nothing in local memory; registers and shared memory leave room for all thread blocks of the default grid."""
    (report,) = sass.inspect(f"pallas_kernels.{op}.specs", name, TARGET.read_text(), python=aot_python)
    assert (report.spill_bytes, report.local_instructions) == (0, 0)
    assert -(-report.registers // 8) * 8 * 128 * side_by_side <= REGISTERS
    assert (report.shared_bytes + 1024) * side_by_side <= SHARED_BYTES  # of which the driver takes 1 KiB a block


PROGRAM = """
import sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from pallas_kernels.quantize import dequantize, quantize

topology = topologies.get_topology_desc(platform="cuda", target_config=open(sys.argv[1]).read(), topology="1x1x1")
mesh = topologies.make_mesh(topology, (1,), ("x",))
x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec()))
for name in sys.argv[2:]:
    run = lambda x: dequantize(quantize(x, name, implementation="xla"), jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        print("FORMAT", name, jax.jit(run).lower(x).compile().as_text())
"""


@pytest.mark.needs_aot
def test_the_compiler_keeps_the_rounding(aot_python):
    """XLA for GPUs drops a conversion to few bits and back where it sees both: a program would train in bfloat16."""
    codes = dict(e4m3_1x128="f8e4m3fn", e5m2_tensor="f8e5m2", mx_e4m3="f8e4m3fn", nvfp4="f4e2m1fn")
    tools = sass.toolchain(aot_python)
    environment = os.environ | dict(
        PATH=f"{tools}{os.pathsep}{os.environ['PATH']}", PYTHONPATH=str(ROOT), JAX_ENABLE_COMPILATION_CACHE="0"
    )
    command = [str(aot_python), "-c", PROGRAM, str(TARGET), *codes]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    modules = dict(part.split(maxsplit=1) for part in done.stdout.split("FORMAT ")[1:])
    assert modules.keys() == codes.keys()
    for name, dtype in codes.items():
        assert f" = {dtype}[" in modules[name], f"{name}: no value of type {dtype} is left"
        assert " convert(" in modules[name]
