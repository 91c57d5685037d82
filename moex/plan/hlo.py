"""Reads the text of a scheduled XLA module into computations and instructions, with the source line of each.

Only what a plan needs is kept: shapes, operands, attributes. Layouts are left out, so bytes are those of dense arrays.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_BITS = dict(
    pred=8, s2=2, u2=2, s4=4, u4=4, s8=8, u8=8, s16=16, u16=16, s32=32, u32=32, s64=64, u64=64, bf16=16, f16=16, f32=32,
    f64=64, c64=64, c128=128, token=0, opaque=0, f4e2m1fn=4,
)  # fmt: skip
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_START = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_CALLED = re.compile(r"(?:calls|body|condition|to_apply|true_computation|false_computation)=%([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


class Array(NamedTuple):
    """dtype: XLA's name of it.  dims: sizes."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        return -(-self.size * bits(self.dtype) // 8)


class Instruction(NamedTuple):
    """shapes: arrays of the result, tuples flattened.  operands: names.  given: text between the brackets where no operand
    is named: a parameter's number, a constant's value.  rest: attributes as text.  calls: computations that it runs.
    trips: iterations of a while loop, 0 where they are unknown.  root: the computation's result.
    """

    name: str
    opcode: str
    shapes: tuple[Array, ...]
    operands: tuple[str, ...]
    given: str
    rest: str
    calls: tuple[str, ...]
    trips: int
    root: bool

    @property
    def num_bytes(self) -> int:
        return sum(a.num_bytes for a in self.shapes)

    @property
    def op_name(self) -> str:
        """JAX's name of what it comes from: functions and named scopes, joined by slashes; "" where XLA made it up."""
        match = re.search(r'op_name="([^"]*)"', self.rest)
        return match[1].replace("\\'", "'") if match else ""

    @property
    def frame(self) -> int:
        match = re.search(r"stack_frame_id=(\d+)", self.rest)
        return int(match[1]) if match else 0

    def attribute(self, name: str) -> str:
        """Text of an attribute up to the comma after it, braces and brackets kept whole; "" without one."""
        at = self.rest.find(f"{name}=")
        return _balanced(self.rest[at + len(name) + 1 :]) if at >= 0 else ""


Computation = Mapping[str, Instruction]
"""Instructions by name, in the order in which they are scheduled."""


class Module(NamedTuple):
    """computations by name; the entry's name; sources: stack frame -> `file:line function`; head: the module's own line."""

    computations: Mapping[str, Computation]
    entry: str
    sources: Mapping[int, str]
    head: str

    def executed(self) -> Iterator[tuple[Instruction, str, int]]:
        """(instruction, its computation, how often it runs in a step) of all that is run by itself, not in a fusion.

        A loop of unknown length counts once, each branch of a conditional as if it were taken.
        """
        yield from self._executed(self.entry, 1)

    def _executed(self, computation: str, times: int) -> Iterator[tuple[Instruction, str, int]]:
        for instruction in self.computations[computation].values():
            yield instruction, computation, times
            if instruction.opcode in ("while", "call", "conditional", "async-start"):
                inside = times * max(instruction.trips, 1)
                for called in instruction.calls:
                    yield from self._executed(called, inside)

    def source(self, instruction: Instruction) -> str:
        """`file:line function` that the instruction comes from, "" where XLA made it up."""
        return self.sources.get(instruction.frame, "")

    def operands(self, instruction: Instruction, computation: str) -> tuple[Instruction, ...]:
        inside = self.computations[computation]
        return tuple(inside[name] for name in instruction.operands if name in inside)


def bits(dtype: str) -> int:
    """Bits of a number.  Raises ValueError for a type that this reader doesn't know."""
    if dtype in _BITS:
        return _BITS[dtype]
    if re.fullmatch(r"f8e\w+", dtype):
        return 8
    raise ValueError(f"the module has numbers of type {dtype!r}, whose size isn't known here")


def parse(text: str) -> Module:
    """Reads a module.  Raises ValueError when the text is none, or isn't scheduled."""
    head, _, body = text.partition("\n")
    if not head.startswith("HloModule") or "is_scheduled=true" not in head:
        raise ValueError("the text is no scheduled HLO module: has the format changed?")
    computations: dict[str, dict[str, Instruction]] = {}
    tables: dict[str, list[str]] = {}
    entry, inside, table = "", None, None
    for line in body.splitlines():
        if inside is not None:
            if line == "}":
                inside = None
            elif (instruction := _instruction(line)) is not None:
                inside[instruction.name] = instruction
        elif line in _TABLES:
            table = tables.setdefault(line, [])
        elif match := _HEADER.match(line):
            inside, table = computations.setdefault(match[2], {}), None
            entry = match[2] if match[1] else entry
        elif table is not None and line:
            table.append(line)
    if not entry:
        raise ValueError("the module has no entry computation: has the format changed?")
    return Module(computations, entry, _sources(tables), head)


def _instruction(line: str) -> Instruction | None:
    start = _START.match(line)
    if start is None:
        return None
    text = line[start.end() :]
    shape = _balanced(text, stop=" ")
    opcode = _OPCODE.match(text, len(shape))
    if opcode is None:
        raise ValueError(f"an instruction that can't be read: {line[:200]}")
    inner = _balanced(text[opcode.end() :], stop=")")
    rest = text[opcode.end() + len(inner) + 1 :]
    trips = _TRIPS.search(rest)
    branches = _BRANCHES.search(rest)
    plain = rest.partition("metadata={")[0]
    operands = tuple(_NAME.findall(inner))
    return Instruction(
        name=start[2],
        opcode=opcode[1],
        shapes=tuple(_array(*found) for found in _ARRAY.findall(shape)),
        operands=operands,
        given="" if operands else inner[:64],
        rest=rest,
        calls=tuple(_CALLED.findall(plain)) + (tuple(_NAME.findall(branches[1])) if branches else ()),
        trips=int(trips[1]) if trips else 0,
        root=bool(start[1]),
    )


def _array(dtype: str, dims: str) -> Array:
    return Array(dtype, tuple(int(d.removeprefix("<=")) for d in dims.split(",") if d))


def _balanced(text: str, stop: str = ",") -> str:
    """Up to the first `stop` (or the end) outside of brackets and quotes."""
    depth, quoted = 0, False
    for i, c in enumerate(text):
        if c == '"' and text[i - 1] != "\\":
            quoted = not quoted
        elif quoted:
            continue
        elif c == stop and depth == 0:
            return text[:i]
        elif c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
            if depth < 0:
                return text[:i]
    return text


def _sources(tables: Mapping[str, list[str]]) -> dict[int, str]:
    numbered = lambda name: {int(line.split(" ", 1)[0]): line.split(" ", 1)[1] for line in tables.get(name, [])}
    files = {i: text.strip('"') for i, text in numbered("FileNames").items()}
    functions = {i: text.strip('"') for i, text in numbered("FunctionNames").items()}
    number = lambda text, field: int((re.search(rf"\b{field}=(\d+)", text) or [0, 0])[1])
    places = {
        i: f"{files.get(number(t, 'file_name_id'), '?')}:{number(t, 'line')} "
        + functions.get(number(t, "function_name_id"), "")
        for i, t in numbered("FileLocations").items()
    }
    return {i: places.get(number(t, "file_location_id"), "") for i, t in numbered("StackFrames").items()}
