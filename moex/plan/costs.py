"""FLOPs and bytes of memory traffic of one instruction of a compiled step.

Products count two FLOPs a multiply-add; nothing else counts FLOPs. Bytes are what a kernel must read and write at least:
of an array that it only slices, the slices; of one that it updates in place, the update.
"""

import math
import re
from collections.abc import Callable
from typing import NamedTuple

from moex.plan.hlo import Array, Instruction, Module

FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier", "partition-id",
    "replica-id", "while", "conditional", "call", "async-start", "async-done", "async-update", "fusion-done", "copy-done",
    "custom-call-done", "add-dependency", "domain",
}  # fmt: skip
"""Opcodes that move nothing by themselves."""

_RESHAPING = {"bitcast", "reshape", "copy", "transpose", "convert"}
_SLICING = {"dynamic-slice", "slice", "gather"}
_SORT_PASSES = 8
"""A radix sort of 32-bit keys reads and writes its arrays in four rounds."""

SILENT_CALLS = {
    "AllocateBuffer",
    "annotate_device_placement",
    "Sharding",
    "SPMDFullToShardShape",
    "SPMDShardToFullShape",
}
"""Custom calls that do nothing on the GPU."""


class Cost(NamedTuple):
    """flops by the format of the operands: `bf16`, `f8`, `f32`.  num_bytes: read and written.  kernel: name of the kernel of
    `pallas_kernels` that it is, or "".  undeclared: the name of a custom call whose FLOPs nobody has told, or "".
    """

    flops: float = 0.0
    format: str = ""
    num_bytes: float = 0.0
    kernel: str = ""
    undeclared: str = ""


def _by_rows(operands: list[Array], result: Array) -> float:
    """lhs [R, K] times one matrix a group: every row meets K x N weights."""
    return 2.0 * operands[0].size * result.dims[-1]


def _by_groups(operands: list[Array], result: Array) -> float:
    """lhs [R, K] and gradient [R, N], summed over rows into [E, K, N]."""
    return 2.0 * operands[0].dims[0] * math.prod(result.dims[-2:])


def _by_groups_across(operands: list[Array], result: Array) -> float:
    """gradient [N, R] and lhs [K, R], summed over rows into [E, N, K]."""
    return 2.0 * operands[0].dims[1] * math.prod(result.dims[-2:])


def _nothing(operands: list[Array], result: Array) -> float:
    return 0.0


KERNELS: dict[str, Callable[[list[Array], Array], float]] = {
    "grouped_matmul": _by_rows,
    "grouped_matmul_transposed": _by_rows,
    "grouped_wgrad": _by_groups,
    "scaled_grouped_matmul": _by_rows,
    "scaled_grouped_wgrad": _by_groups_across,
    "quantize_lines": _nothing,
    "quantize_squares": _nothing,
    "quantize_and_permute": _nothing,
    "permute": _nothing,
    "combine": _nothing,
}
"""Kernel of `pallas_kernels`, by the name that it is launched under -> FLOPs from its operands and first result, when every
row of its buffer is in use.
"""


def kernel_name(instruction: Instruction) -> str:
    """The name a Pallas kernel was launched under, from `.../NAME/mpmd_map`; a custom call's target otherwise."""
    parts = instruction.op_name.split("/")
    if len(parts) > 1 and parts[-1] in ("mpmd_map", "pallas_call"):
        return parts[-2]
    match = re.search(r'custom_call_target="([^"]*)"', instruction.rest)
    return match[1] if match else ""


def cost(module: Module, computation: str, instruction: Instruction, *, row_share: float = 1.0) -> Cost:
    """What one run of an instruction takes.

    row_share: part of an expert buffer's rows that are in use; grouped kernels skip the rest.
    """
    op = instruction.opcode.removesuffix("-start")
    if instruction.opcode in FREE or instruction.opcode.endswith("-done"):
        return Cost()
    operands = module.operands(instruction, computation)
    moved = float(sum(o.num_bytes for o in operands) + instruction.num_bytes)
    if op == "fusion":
        return _fusion(module, instruction, row_share)
    if op == "dot":
        return Cost(*_dot(instruction, operands), num_bytes=moved)
    if op == "custom-call":
        return _custom_call(instruction, operands, moved, row_share)
    if op == "sort":
        return Cost(num_bytes=_SORT_PASSES * float(instruction.num_bytes))
    if op == "dynamic-update-slice":
        return Cost(num_bytes=2.0 * operands[1].num_bytes if len(operands) > 1 else moved)
    if op in _SLICING:
        return Cost(num_bytes=2.0 * instruction.num_bytes)
    return Cost(num_bytes=moved)


def _dot(instruction: Instruction, operands) -> tuple[float, str]:
    lhs = operands[0].shapes[0]
    contracted = [int(d) for d in re.findall(r"\d+", instruction.attribute("lhs_contracting_dims"))]
    narrow = min((o.shapes[0].dtype for o in operands[:2]), key=_width)
    return 2.0 * instruction.shapes[0].size * math.prod(lhs.dims[d] for d in contracted), _format(narrow)


def _width(dtype: str) -> int:
    return {"bf": 2, "f1": 2, "f8": 1}.get(dtype[:2], 4)


def _format(dtype: str) -> str:
    return {1: "f8", 2: "bf16"}.get(_width(dtype), "f32")


def _custom_call(instruction: Instruction, operands, moved: float, row_share: float) -> Cost:
    name = kernel_name(instruction)
    if name in SILENT_CALLS:
        return Cost()
    arrays = [o.shapes[0] for o in operands if o.shapes]
    if "cublas" in name and (found := re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.rest)):
        inner = math.prod(arrays[0].dims[int(d)] for d in re.findall(r"\d+", found[1]))
        return Cost(2.0 * instruction.shapes[0].size * inner, _format(arrays[0].dtype), moved)
    if name not in KERNELS:
        return Cost(num_bytes=moved, undeclared=name)
    flops = KERNELS[name](arrays, instruction.shapes[0]) * row_share
    return Cost(flops, _format(arrays[0].dtype), moved, kernel=name)


def _fusion(module: Module, instruction: Instruction, row_share: float) -> Cost:
    """A fusion's products, and the traffic of its parameters and results. One that holds a custom call is that call, with
    slices of larger arrays as operands or result.
    """
    if not instruction.calls:
        return Cost(num_bytes=float(instruction.num_bytes))
    name = instruction.calls[0]
    inner = [
        _custom_call(i, module.operands(i, name), 0.0, row_share)
        for i in module.computations[name].values()
        if i.opcode == "custom-call"
    ]
    called = next((c for c in inner if c.kernel or c.flops or c.undeclared), Cost())
    formats = _products(module, name)
    if called.flops:
        formats[called.format] = formats.get(called.format, 0.0) + called.flops
    inside = module.computations[name]
    root = next(i for i in inside.values() if i.root)
    results = module.operands(root, name) if root.opcode == "tuple" else (root,)
    updated, written = set(), 0.0
    for result in results:
        source = _behind(inside, result)
        if source.opcode in ("dynamic-update-slice", "scatter"):
            operands = [inside[o] for o in source.operands if o in inside]
            written += operands[1 if source.opcode == "dynamic-update-slice" else -1].num_bytes
            updated.add(_behind(inside, operands[0]).name)
        else:
            written += result.num_bytes
    read = sum(_read(inside, p) for p in inside.values() if p.opcode == "parameter" and p.name not in updated)
    format = max(formats, key=lambda f: formats[f], default="")
    return Cost(sum(formats.values()), format, read + written, called.kernel, called.undeclared)


def _products(module: Module, computation: str) -> dict[str, float]:
    """FLOPs by format of all dots in a fusion."""
    formats: dict[str, float] = {}
    for inner in module.computations[computation].values():
        if inner.opcode == "dot":
            flops, format = _dot(inner, module.operands(inner, computation))
            formats[format] = formats.get(format, 0.0) + flops
        elif inner.opcode == "fusion":
            for called in inner.calls:
                for format, flops in _products(module, called).items():
                    formats[format] = formats.get(format, 0.0) + flops
    return formats


def _behind(inside, instruction: Instruction) -> Instruction:
    """What a value was before it was reshaped or cast."""
    while instruction.opcode in _RESHAPING and instruction.operands and instruction.operands[0] in inside:
        instruction = inside[instruction.operands[0]]
    return instruction


def _read(inside, parameter: Instruction) -> float:
    """Bytes of a fusion's parameter that it reads: of slices only, where nothing else is done with it."""
    wanted, todo = 0.0, [parameter.name]
    while todo:
        name = todo.pop()
        for user in inside.values():
            if name not in user.operands:
                continue
            if user.opcode in _SLICING and user.operands[0] == name:
                wanted += user.num_bytes
            elif user.opcode in ("bitcast", "reshape"):
                todo.append(user.name)
            else:
                return float(parameter.num_bytes)
    return min(wanted, float(parameter.num_bytes))
