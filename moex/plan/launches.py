"""What the host launches in a step: kernels one by one, and CUDA graphs (XLA's command buffers) with many of them at once.

Read off XLA's list of thunks, so it is what a host does; how long a launch takes isn't in it.
"""

import re
from typing import NamedTuple

from moex.plan.hlo import Module
from moex.plan.module import COLLECTIVES

_LINE = re.compile(r"^(\s*)(?:\d+: (k\w+)|(condition):|(body):)")
_KERNELS = {
    "kCustomKernel", "kKernel", "kCustomCall", "kGemm", "kCublasLtMatmul", "kConvolution", "kCholesky", "kFft", "kNorm",
    "kTriangularSolve", "kCubSort", "kSelectK", "kCopy", "kMemset32BitValue", "kMemzero", "kPartitionId", "kReplicaId",
    *COLLECTIVES,
}  # fmt: skip
_CONTAINERS = {
    "kAsyncStart",
    "kAsyncDone",
    "kDynamicSliceFusion",
    "kDynamicSlice",
    "kSequential",
    "kWhile",
    "kCommandBuffer",
}


class Launches(NamedTuple):
    """Of a step. alone: kernels, copies and collectives that the host launches one by one.  graphs: CUDA graphs that it
    launches.  inside: what those graphs hold.
    """

    alone: int
    graphs: int
    inside: int

    @property
    def by_host(self) -> int:
        return self.alone + self.graphs


def launches(sequence: str, module: Module) -> Launches:
    """Counts a list of thunks, each as often as the loops around it run.

    Raises ValueError for a kind of thunk that is not known, or where the loops are not those of the module.
    """
    trips = iter([i.trips for i, _, _ in module.executed() if i.opcode == "while"])
    around: list[tuple[int, str, int]] = []  # (depth, kind, factor) of what the line is inside of
    alone = graphs = inside = 0
    for line in sequence.splitlines():
        if not (match := _LINE.match(line)):
            continue
        depth, kind = len(match[1]), match[2]
        if match[3]:  # a loop's test, written at whatever depth: a loop of known length asks for none
            around.append((around[-1][0] + 1, "condition", 0))
            continue
        if match[4]:
            while around.pop()[1] != "condition":
                pass
            continue
        while around and around[-1][0] >= depth:
            around.pop()
        in_graph = any(name == "kCommandBuffer" for _, name, _ in around)
        times = 1
        for _, _, factor in around:
            times *= factor
        factor = 1
        if kind == "kWhile":
            if (found := next(trips, None)) is None:
                raise ValueError("the list of thunks has more loops than the module")
            factor = max(found, 1)
        elif kind == "kCommandBuffer":
            graphs += 0 if in_graph else times
        elif kind in _KERNELS:
            alone, inside = (alone, inside + times) if in_graph else (alone + times, inside)
        elif kind not in _CONTAINERS:
            raise ValueError(f"a thunk of kind {kind}: is it launched by the host? add it to moex.plan.launches")
        around.append((depth, kind, factor))
    if next(trips, None) is not None:
        raise ValueError("the module has more loops than the list of thunks")
    return Launches(alone, graphs, inside)
