"""What every collective of a compiled step sends: by group, over NVLink and over the network, by view and phase.

Devices are numbers along the line that a fold cuts; device i lies in NVLink domain i // domain. Bytes are those that one
GPU receives, in the mean over its group.
"""

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from mesh import Fold
from moex.plan.hlo import Instruction, Module

KINDS = (
    "all-to-all", "ragged-all-to-all", "all-gather", "all-reduce", "reduce-scatter", "collective-permute",
    "collective-broadcast",
)  # fmt: skip
_REDUCING = ("all-reduce", "reduce-scatter")


class Groups(NamedTuple):
    """size: devices of a group.  domains: NVLink domains that a group touches, at most.  inside: of one group, the most
    devices in one domain.  axes: mesh axes that a group lies along, where the text names them.
    """

    size: int
    domains: int
    inside: int
    axes: tuple[str, ...]


class Collective(NamedTuple):
    """One collective of the program.  times: runs in a step.  synchronous: nothing is scheduled beside it.  num_bytes: of
    its largest side on one GPU, each run.  nvlink_bytes, network_bytes: received by a GPU, each run.  view: axes of the
    fold, as `ep` or `dp x cp`.  phase: forward, backward, recompute, update.  module: the named scope.  dtypes: of what is
    sent.
    """

    name: str
    computation: str
    kind: str
    times: int
    synchronous: bool
    groups: Groups
    num_bytes: int
    nvlink_bytes: float
    network_bytes: float
    view: str
    phase: str
    module: str
    dtypes: tuple[str, ...]
    source: str

    @property
    def reduces(self) -> bool:
        return self.kind in _REDUCING


def kind_of(instruction: Instruction, module: Module) -> tuple[str, bool]:
    """(kind of collective or "", whether it is one that is only started here)."""
    opcode = instruction.opcode
    if opcode in KINDS:
        return opcode, False
    if opcode.endswith("-start"):
        kind = opcode.removesuffix("-start")
        if kind in KINDS:
            return kind, True
        if kind == "async" and instruction.calls:
            inner = module.computations[instruction.calls[0]].values()
            return next((i.opcode for i in inner if i.opcode in KINDS), ""), True
    return "", False


def collectives(module: Module, domain: int, num_devices: int, fold: Fold | None = None) -> list[Collective]:
    """All of a step's, in the order of the program.

    Args:
      domain: GPUs of an NVLink domain.
      fold: names the views of groups; without it they are named by their size.
    """
    found = []
    for instruction, computation, times in module.executed():
        kind, started = kind_of(instruction, module)
        if not kind or _inside_async(instruction, computation, module):
            continue
        carrier = _carrier(instruction, module)
        groups = read_groups(carrier, kind, domain, num_devices)
        num_bytes = _payload(instruction, computation, kind, started, module)
        nvlink, network = traffic(kind, num_bytes, groups)
        op_name = instruction.op_name or carrier.op_name
        found.append(
            Collective(
                name=instruction.name,
                computation=computation,
                kind=kind,
                times=times,
                synchronous=not started,
                groups=groups,
                num_bytes=num_bytes,
                nvlink_bytes=nvlink,
                network_bytes=network,
                view=view_of(groups, op_name, fold),
                phase=phase_of(op_name),
                module=scope_of(op_name),
                dtypes=tuple(sorted({a.dtype for a in instruction.shapes if a.size > 1})) or ("scalar",),
                source=module.source(instruction) or module.source(carrier),
            )
        )
    return found


def _inside_async(instruction: Instruction, computation: str, module: Module) -> bool:
    """Whether it is the body of an async-start, which stands for it."""
    return instruction.root and len(module.computations[computation]) <= 4 and "async" in computation


def _carrier(instruction: Instruction, module: Module) -> Instruction:
    if instruction.opcode == "async-start":
        inner = module.computations[instruction.calls[0]].values()
        return next(i for i in inner if i.opcode in KINDS)
    return instruction


def _payload(instruction: Instruction, computation: str, kind: str, started: bool, module: Module) -> int:
    """Bytes of the larger side: what an all-gather gives, what all others take."""
    taken = sum(o.num_bytes for o in module.operands(instruction, computation))
    if kind != "all-gather":
        return taken
    return instruction.num_bytes - taken if started else instruction.num_bytes


def traffic(kind: str, num_bytes: int, groups: Groups) -> tuple[float, float]:
    """(NVLink, network) bytes that a GPU receives, in the mean over its group.

    Rings and trees over several domains bring every domain one copy over the network, which its GPUs share out by NVLink;
    an all-to-all sends each pair its own part.
    """
    n, m, g = groups.size, groups.domains, max(groups.inside, 1)
    if n <= 1:
        return 0.0, 0.0
    if kind in ("all-to-all", "ragged-all-to-all"):
        return num_bytes * (g - 1) / n, num_bytes * (n - g) / n
    if kind == "collective-permute":
        return (0.0, float(num_bytes)) if m > 1 else (float(num_bytes), 0.0)
    copies = 2 if kind == "all-reduce" else 1
    network = copies * num_bytes * (m - 1) / m / g
    return copies * num_bytes * (n - 1) / n - network, network


def read_groups(instruction: Instruction, kind: str, domain: int, num_devices: int) -> Groups:
    """Who talks to whom.  Raises ValueError for a form of groups that this reader doesn't know."""
    if kind == "collective-permute":
        pairs = re.findall(r"\{(\d+),(\d+)\}", instruction.attribute("source_target_pairs"))
        crossing = any(int(a) // domain != int(b) // domain for a, b in pairs)
        return Groups(size=2 if pairs else 1, domains=2 if crossing else 1, inside=1 if crossing else 2, axes=())
    text = instruction.attribute("replica_groups")
    members, axes = _members(text, num_devices)
    domains = [{int(d) // domain for d in group} for group in members]
    inside = max(int(np.bincount([int(d) // domain for d in group]).max()) for group in members)
    return Groups(size=len(members[0]), domains=max(map(len, domains)), inside=inside, axes=axes)


def _members(text: str, num_devices: int) -> tuple[list, tuple[str, ...]]:
    """Lists of devices, and names of mesh axes where the text has them."""
    if match := re.fullmatch(r"mesh\[(.*?)\]\s*\{(.*)\}", text):
        mesh = [(name, int(size)) for name, size in re.findall(r"'([^']+)'=(\d+)", match[1])]
        wanted = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", match[2])
        return _along(mesh, wanted), tuple(name for name, _, _ in wanted)
    if match := re.fullmatch(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape, source = ([int(d) for d in part.split(",")] for part in (match[1], match[2]))
        ids = np.arange(math.prod(source)).reshape(source)
        if match[3]:
            ids = ids.transpose([int(d) for d in match[3].split(",")])
        return list(ids.reshape(shape)), ()
    if text in ("", "{}"):
        return [list(range(num_devices))], ()
    if groups := re.findall(r"\{([\d,]+)\}", text):
        return [[int(d) for d in group.split(",")] for group in groups], ()
    raise ValueError(f"groups of devices in a form that isn't known: {text[:200]!r}")


def _along(mesh: list[tuple[str, int]], wanted: list[tuple[str, str, str]]) -> list[np.ndarray]:
    """Groups along axes of a mesh; `'x':(2)4` is the part of x of size 4 with 2 positions before it."""
    sizes = dict(mesh)
    cut: list[tuple[str, int]] = []
    chosen = []
    parts = {name: (int(before or 1), int(size) if size else sizes[name]) for name, before, size in wanted}
    for name, size in mesh:
        before, part = parts.get(name, (1, size))
        after = size // (before * part)
        for label, n in ((f"{name}<", before), (name, part), (f"{name}>", after)):
            if n > 1 or label == name:
                cut.append((label, n))
    names = [label for label, _ in cut]
    chosen = [names.index(name) for name, _, _ in wanted]
    ids = np.arange(math.prod(n for _, n in cut)).reshape([n for _, n in cut])
    rest = [i for i in range(len(cut)) if i not in chosen]
    return list(ids.transpose([*rest, *chosen]).reshape(-1, math.prod(cut[i][1] for i in chosen)))


def view_of(groups: Groups, op_name: str, fold: Fold | None) -> str:
    """The view axes that a group lies along: expert ones for what belongs to experts, else dense ones; else its size."""
    if fold is None or not groups.axes:
        return f"{groups.size} GPUs"
    expert = ("edp", "ep", "etp")
    dense = ("dp", "cp", "tp")
    moe = "/moe/" in op_name and "/router" not in op_name and "/shared_expert" not in op_name
    for names in (expert, dense) if moe else (dense, expert):
        for chosen in _runs(names):
            axes = {axis for name in chosen for axis in fold.view(name)}
            if axes == set(groups.axes):
                return " x ".join(name for name in chosen if fold.size(name) > 1)
    return " x ".join(groups.axes)


def _runs(names: tuple[str, ...]) -> Iterable[tuple[str, ...]]:
    """Every choice of names, small ones first."""
    masks = sorted(range(1, 2 ** len(names)), key=lambda mask: mask.bit_count())
    return (tuple(n for i, n in enumerate(names) if mask >> i & 1) for mask in masks)


def phase_of(op_name: str) -> str:
    """forward, recompute (forward once more, for the backward pass), backward or update (optimizer, clipping)."""
    if "rematted_computation" in op_name:
        return "recompute"
    if "transpose(" in op_name:
        return "backward"
    return "forward" if "jvp(" in op_name else "update"


_SCOPES = (
    "moe/dispatch", "moe/combine", "moe/experts", "moe/router", "moe/clones", "moe/shared_expert", "moe", "attention",
    "mlp", "final_norm", "embed", "loss", "optimizer",
)  # fmt: skip


def scope_of(op_name: str) -> str:
    """The named scope of the model that an operation is of; `parameters` for what gathers or reduces them."""
    plain = re.sub(
        r"\b(?:transpose|jvp|vmap)\(([^()]*)\)", r"\1", re.sub(r"\b(?:transpose|jvp)\(([^()]*)\)", r"\1", op_name)
    )
    for scope in _SCOPES:
        if re.search(rf"(^|/){scope}(/|$)", plain):
            return scope
    last = plain.rpartition("/")[2]
    if re.search(r"all_gather|reduce_scatter|psum_scatter", last):
        return "parameters"
    return "step"
