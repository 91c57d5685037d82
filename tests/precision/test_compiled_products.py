"""Each quantised product as XLA compiles it for a GPU: on tensor cores for 8 or 4 bits, three of a weight, none in BF16.

XLA for GPUs may take a rounding and its undoing away (and does, without a barrier): only the compiled program tells.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEFINED = re.compile(r"^\s*(?:ROOT )?%([\w.-]+) = \(?(\w+)\[", re.M)


def factors(text: str, opcode: str) -> list[tuple[str, str]]:
    """Types of the two factors of every instruction of that kind in a module."""
    types = dict(DEFINED.findall(text))
    operands = re.findall(rf" {opcode}\(%([\w.-]+), %([\w.-]+)", text)
    return [(types[a], types[b]) for a, b in operands]


def kernels(text: str) -> list[str]:
    """Types of the operands of each call of this project's kernels."""
    call = r' custom-call\(.*custom_call_target="mosaic_gpu_v2", operand_layout_constraints=\{(.*?)\}, a'
    return [" ".join(re.findall(r"(\w+)\[", layouts)) for layouts in re.findall(call, text)]


def compiled(python: Path, recipe: str, target: str) -> str:
    environment = os.environ | dict(PYTHONPATH=str(ROOT), JAX_PLATFORMS="cpu", JAX_ENABLE_COMPILATION_CACHE="0")
    command = [python, ROOT / "tests/precision/compile_products.py", recipe, ROOT / f"moex/plan/targets/{target}.txtpb"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.needs_aot
@pytest.mark.parametrize(
    ("recipe", "target", "opcode", "types"),
    [
        ("fp8_tensor", "h100", "dot", {"f8e4m3fn", "f8e5m2"}),
        ("fp8_tensor", "b200", "dot", {"f8e4m3fn", "f8e5m2"}),
        ("mxfp8", "b200", "scaled-dot", {"f8e4m3fn"}),
        ("nvfp4", "b200", "scaled-dot", {"f4e2m1fn"}),
    ],
)
def test_three_products_of_codes_and_none_of_other_numbers(recipe, target, opcode, types, aot_python):
    text = compiled(aot_python, recipe, target)
    found = factors(text, opcode)
    assert len(found) == 3
    assert {kind for pair in found for kind in pair} == types
    assert [pair for other in {"dot", "scaled-dot"} - {opcode} for pair in factors(text, other)] == []


@pytest.mark.needs_aot
def test_blocks_are_multiplied_by_the_kernels(aot_python):
    """Three products of codes, after three quantisations: of x and the gradient both ways from one read, and of w."""
    text = compiled(aot_python, "fp8_block", "h100")
    calls = kernels(text)
    assert sum("f8e4m3fn" in operands for operands in calls) == 3
    assert sum(operands == "bf16" for operands in calls) == 3
    assert factors(text, "dot") == []


@pytest.mark.needs_aot
def test_in_the_compute_dtype_the_same_reading_finds_bf16(aot_python):
    text = compiled(aot_python, "compute", "h100")
    assert factors(text, "dot") == [("bf16", "bf16")] * 3
    assert kernels(text) == []


def test_the_reading():
    text = """
  %a = bf16[8,4]{1,0} parameter(0)
  %b.1 = f8e4m3fn[8,4]{1,0} parameter(1)
  ROOT %c = f32[8,8]{1,0} dot(%a, %b.1), lhs_contracting_dims={1}
"""
    assert factors(text, "dot") == [("bf16", "f8e4m3fn")]
