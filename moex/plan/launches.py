"""What the host launches in a step: kernels one by one, and CUDA graphs (XLA's command buffers) with many of them at once.

Read off XLA's list of thunks, so it is what a host does; how long a launch takes isn't in it.
"""

import math
from typing import NamedTuple

from moex.plan.hlo import Module
from moex.plan.module import COLLECTIVES, thunks

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
    trips = [i.trips or 1 for i, _, _ in module.executed() if i.opcode == "while"]
    listed = list(thunks(sequence))
    if (num_loops := sum(t.kind == "kWhile" for t in listed)) != len(trips):
        more, less = ("list of thunks", "module") if num_loops > len(trips) else ("module", "list of thunks")
        raise ValueError(f"the {more} has more loops than the {less}")
    alone = graphs = inside = 0
    for t in (t for t in listed if not t.test):
        times, in_graph = math.prod(trips[loop] for loop in t.loops), "kCommandBuffer" in t.around
        if t.kind == "kCommandBuffer":
            graphs += 0 if in_graph else times
        elif t.kind in _KERNELS:
            alone, inside = (alone, inside + times) if in_graph else (alone + times, inside)
        elif t.kind not in _CONTAINERS:
            raise ValueError(f"a thunk of kind {t.kind}: is it launched by the host? add it to moex.plan.launches")
    return Launches(alone, graphs, inside)
