"""Reads a compiled step: does anything wait for the host, is what is sent started and awaited apart, is something copied.

The texts are those of XLA for GPUs: the scheduled module (HLO), and the sequence of thunks, which is what is really run.
"""

import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

_THUNK = re.compile(r"^(\s*)(?:\d+: (k\w+)|(condition|body):)")
_INSTRUCTION = re.compile(r" = (.*?) ([a-z][\w\-]*)\(")
_DEFINED = re.compile(r"^\s+(?:ROOT )?(%[\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*?)\)(?:, |$)")
_ON_HOST = "S(5)"
"""In a shape's layout: pinned memory of the host."""
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_HOST_THUNKS = ("kInfeed", "kOutfeed", "kSend", "kRecv", "kHostSend", "kHostRecv", "kHostExecute", "kHostSendDone")
_HOST_CALLS = ("xla_python_gpu_callback", "xla_ffi_python_gpu_callback", "xla_buffer_python_gpu_callback")
_BYTES = dict(pred=1, s8=1, u8=1, bf16=2, f16=2, s16=2, u16=2, f32=4, s32=4, u32=4, f64=8, s64=8, u64=8)
COLLECTIVES = ("kAllToAll", "kAllGather", "kAllReduce", "kReduceScatter", "kCollectivePermute", "kRaggedAllToAll")


class Thunk(NamedTuple):
    """kind: e.g. kCustomKernel.  depth: of indentation, in loops and asynchronous parts.  around: kinds of the parts that it
    is inside of.  loops: of those that are loops, their numbers, in the order of the list.  test: whether it belongs to a
    loop's condition, which is asked for only where a loop's length is unknown.
    """

    kind: str
    depth: int
    around: tuple[str, ...]
    loops: tuple[int, ...]
    test: bool

    @property
    def asynchronous(self) -> bool:
        """Inside of a started part that something else may run beside."""
        return "kAsyncStart" in self.around


def thunks(sequence: str) -> Iterator[Thunk]:
    """What XLA runs, in its order.  Raises ValueError when the text is no sequence of thunks."""
    open_: list[tuple[int, str, int]] = []  # depth and kind of the parts that are open, and which loop it is
    num_thunks = num_loops = 0
    test = False
    for line in sequence.splitlines():
        if not (match := _THUNK.match(line)):
            continue
        if match[3]:  # these headings stand at whatever depth
            test = match[3] == "condition"
            continue
        depth, kind = len(match[1]), match[2]
        while open_ and depth <= open_[-1][0]:
            open_.pop()
        loops = tuple(loop for _, outer, loop in open_ if outer == "kWhile")
        yield Thunk(kind, depth, tuple(outer for _, outer, _ in open_), loops, test)
        open_.append((depth, kind, num_loops))
        num_thunks, num_loops = num_thunks + 1, num_loops + (kind == "kWhile")
    if not num_thunks:
        raise ValueError("no thunk in this text: has the format changed?")


def waits_for_host(sequence: str, module: str) -> list[str]:
    """What makes the device wait for the host, in words; empty when nothing does.

    A conditional's branch and a loop's length are read by the host unless the length is known when compiled.
    """
    kinds = Counter(thunk.kind for thunk in thunks(sequence))
    found = [f"{kinds[kind]} x {kind}" for kind in (*_HOST_THUNKS, "kConditional") if kinds[kind]]
    loops = [line for line in module.splitlines() if " while(" in line]
    unknown = [line.split(" = ")[0].strip() for line in loops if "known_trip_count" not in line]
    found += [f"loop of unknown length: {name}" for name in unknown]
    if len(loops) < kinds["kWhile"]:
        found.append(f"{kinds['kWhile']} loops run, but the module shows {len(loops)}")
    found += [f"call of {name}" for name in _HOST_CALLS if name in module]
    return found


def exposed(sequence: str, kinds=COLLECTIVES) -> Counter:
    """Collectives that nothing can run beside, by kind: those outside asynchronous parts."""
    return Counter(t.kind for t in thunks(sequence) if t.kind in kinds and not t.asynchronous)


def unpaired(module: str, operation: str) -> list[str]:
    """Names of a collective's instructions that aren't in a start and a done, between which other work may stand."""
    found = re.compile(rf"^\s*(?:ROOT )?(%\S+) = .*? {operation}\(")
    return [match[1] for line in module.splitlines() if (match := found.match(line))]


def number_of(sequence: str, kind: str) -> int:
    """How many thunks of a kind stand in the program, a loop's counted once."""
    return sum(t.kind == kind for t in thunks(sequence))


def copies(module: str, at_least_bytes: int) -> list[str]:
    """Copies of arrays of at least so many bytes, as lines of the module."""
    found = []
    for line in module.splitlines():
        match = _INSTRUCTION.search(line)
        if match and match[2] in ("copy", "copy-start") and _size(match[1]) >= at_least_bytes:
            found.append(line.strip())
    return found


def _size(shape: str) -> int:
    """Bytes of the largest array in a shape's text."""
    sizes = [0]
    for kind, dims in _SHAPE.findall(shape):
        number = _BYTES.get(kind, 1)  # 8-bit floats have one
        for dim in filter(None, dims.split(",")):
            number *= int(dim)
        sizes.append(number)
    return max(sizes)


def host_reads(module: str) -> dict[str, bool]:
    """What innermost loops read from the host's memory, by the name of the instruction that awaits it: whether only the next
    pass of the loop uses it, so that a whole pass hides the way. Reads that begin such a loop are not among it.
    """
    found = {}
    for lines in _bodies(module):
        defined = {match[1]: (match[2], match[3], match[4]) for line in lines if (match := _DEFINED.match(line))}
        root = next((match[1] for line in lines if "ROOT " in line and (match := _DEFINED.match(line))), "")
        for name, (shape, opcode, given) in defined.items():
            started = defined.get((re.findall(r"%[\w.\-]+", given) or [""])[0], ("", "", ""))[0]
            if opcode.endswith("-done") and _ON_HOST in started and _ON_HOST not in shape:
                found[name] = _reaches(name, defined) == {root}
    return found


def _bodies(module: str) -> Iterator[list[str]]:
    """Lines of each computation that a loop without loops inside runs."""
    called = set(re.findall(r"body=(%[\w.\-]+)", module))
    for text in re.split(r"\n(?=%|ENTRY)", module):
        if text.split(" ", 1)[0] in called and " while(" not in text:
            yield text.splitlines()[1:]


def _reaches(name: str, defined: dict[str, tuple[str, str, str]]) -> set[str]:
    """The instructions that use an array, seen through those that only give it another name, shape or place."""
    found = set()
    for user, (_, opcode, given) in defined.items():
        if name in re.findall(r"%[\w.\-]+", given):
            found |= _reaches(user, defined) if opcode in ("bitcast", "copy", "get-tuple-element") else {user}
    return found
