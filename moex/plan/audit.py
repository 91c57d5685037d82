"""Looks through a compiled step for what should not be in it: waits for the host, reductions in BF16, dense experts ...

A *fault* makes `--audit` fail; a *note* costs time or memory and is told.
"""

import math
import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

import jax

from mesh import Fold, abstract_mesh
from moex.config import RunConfig
from moex.plan.collectives import Collective
from moex.plan.compiled import CompiledStep
from moex.plan.costs import SILENT_CALLS, kernel_name
from moex.plan.hlo import Instruction, Module
from moex.plan.memory import sizes
from moex.plan.module import waits_for_host
from moex.plan.target import Target
from moex.plan.timeline import Event, Timeline
from moex.train.program import build

_LARGE_BYTES = 1 << 20
_COSTLY_SHARE = 0.02
"""Share of a step from which on what XLA does again is a fault."""
_DENSE_RATIO = 2.0
"""From so many times the FLOPs of the rows that are there, pads among them, a product counts as dense."""
_ALONE_SHARE = 0.1
"""Share of all-to-alls' bytes that may have nothing beside them with overlap: a step's first ticks have nothing to offer."""
_HOST = {"infeed", "outfeed", "send", "recv", "send-done", "recv-done"}
_MODEL_VIEWS = {"tp", "cp", "ep", "etp"}
"""Views whose traffic grows with the tokens: their groups belong into an NVLink domain where they fit into one."""


class Finding(NamedTuple):
    """kind: what was looked for.  where: JAX's name of the operation and its source line, "" where XLA made it up."""

    level: Literal["fault", "note"]
    kind: str
    text: str
    where: str = ""


def audit(
    config: RunConfig, target: Target, fold: Fold, step: CompiledStep, module: Module, timeline: Timeline
) -> list[Finding]:
    """All findings, faults first."""
    found = [
        *host(step, module),
        *low_reductions(timeline),
        *wide_numbers(module),
        *dense_experts(_forward_flops(config, fold), timeline),
        *crossing(target, timeline),
        *not_donated(_state_bytes(config, fold), step, module),
        *again(step, timeline),
        *one_after_another(timeline),
        *overlap_given_up(config, step, timeline),
        *copies_of_state(module),
        *undeclared(timeline),
    ]
    return sorted(found, key=lambda f: f.level)


def _where(instruction: Instruction, module: Module) -> str:
    return " ".join(filter(None, (instruction.op_name or instruction.name, module.source(instruction))))


def host(step: CompiledStep, module: Module) -> Iterator[Finding]:
    """What makes the device wait for the host, with the operation; what only the list of thunks shows, without one."""
    told = 0
    for instruction, _, _ in module.executed():
        opcode = instruction.opcode
        callback = opcode == "custom-call" and "callback" in kernel_name(instruction)
        if opcode in _HOST or callback:
            text = f"{kernel_name(instruction) or opcode} hands data to the host"
        elif opcode == "conditional":
            text = "the branch of a conditional is chosen by the host"
        elif opcode == "while" and not instruction.trips:
            text = "the host reads after every iteration whether a loop of unknown length goes on"
        else:
            continue
        told += 1
        yield Finding("fault", "waits for the host", text, _where(instruction, module))
    if not told:
        yield from (Finding("fault", "waits for the host", text) for text in waits_for_host(step.thunks, step.text))


def low_reductions(timeline: Timeline) -> Iterator[Finding]:
    for _, c in timeline.sent():
        low = {"bf16", "f16"} | {d for d in c.dtypes if d.startswith("f8")}
        if c.reduces and c.phase in ("backward", "update") and low & set(c.dtypes):
            text = f"{c.kind} over {c.view} sums {', '.join(sorted(low & set(c.dtypes)))}: cast to float32 before"
            yield Finding("fault", "gradients reduced in low precision", text, f"{c.name} {c.source}")


def wide_numbers(module: Module) -> Iterator[Finding]:
    for computation in module.computations.values():
        for instruction in computation.values():
            if any(a.dtype in ("f64", "c128") for a in instruction.shapes):
                yield Finding("fault", "float64", f"{instruction.opcode} in float64", _where(instruction, module))
                return


def dense_experts(forward_flops: float, timeline: Timeline) -> Iterator[Finding]:
    """Experts that multiply far more rows than were sent to them.

    forward_flops: of all experts' products in a step's forward passes, for the rows that they get; backward takes twice that.
    """
    spent: dict[str, list[Event]] = {}
    for e in timeline.all_events():
        if e.cost.flops and e.scope.startswith("moe") and e.scope not in ("moe/router", "moe/shared_expert"):
            spent.setdefault(e.phase, []).append(e)
    for phase, events in spent.items():
        wanted = forward_flops * (2 if phase == "backward" else 1)
        ratio = sum(e.times * e.cost.flops for e in events) / wanted
        if ratio > _DENSE_RATIO:
            most = max(events, key=lambda e: e.times * e.cost.flops)
            text = (
                f"{phase}, experts take {ratio:.1f} times the FLOPs of their rows: dense over all, or over empty rows?"
            )
            yield Finding("fault", "dense over experts", text, f"{most.name} {most.scope} {most.source}")


def _forward_flops(config: RunConfig, fold: Fold) -> float:
    """Of gate, up and down over all layers and micro-batches; infinite without experts."""
    model = config.model
    if not model.num_moe_layers:
        return math.inf
    width = model.expert_width // fold.size(fold.expert.etp)
    rows = sizes(config, fold).used_rows * model.num_moe_layers * config.train.accumulation
    return 2.0 * rows * model.expert_in_width * 3 * width


def crossing(target: Target, timeline: Timeline) -> Iterator[Finding]:
    worst: dict[tuple[str, int, bool], tuple[float, Collective]] = {}
    for _, c in timeline.sent():
        if c.groups.domains > 1 and set(c.view.split(" x ")) <= _MODEL_VIEWS and c.num_bytes >= _LARGE_BYTES:
            key = c.view, c.groups.size, c.groups.size <= target.domain
            sent, first = worst.get(key, (0.0, c))
            worst[key] = sent + c.times * c.network_bytes, first
    for (view, size, fits), (sent, c) in worst.items():
        text = (
            f"groups of {size} over {view} cross domains of {target.domain} and bring a GPU {sent / 1e9:.1f} GB a step"
        )
        level, more = ("fault", ", though they would fit into one") if fits else ("note", "")
        yield Finding(level, "crosses NVLink domains", text + more, f"{c.name} {c.source}")


def not_donated(state_bytes: int, step: CompiledStep, module: Module) -> Iterator[Finding]:
    """Arrays of the state, `state_bytes` on a GPU, that the step doesn't write over."""
    if step.alias_bytes >= 0.99 * state_bytes:
        return
    aliased = {int(n) for n in re.findall(r"\{[\d, ]*\}: \((\d+),", module.head)}
    entry = module.computations[module.entry].values()
    left = [i for i in entry if i.opcode == "parameter" and int(i.given) not in aliased]
    named = sorted((i for i in left if not i.op_name.startswith("batch")), key=lambda i: -i.num_bytes)[:3]
    lost, whole = (state_bytes - step.alias_bytes) / 2**30, state_bytes / 2**30
    text = f"{lost:.2f} of {whole:.2f} GiB of the state are not written over: donate it"
    yield Finding("fault", "state not donated", text, ", ".join(i.op_name for i in named))


def _state_bytes(config: RunConfig, fold: Fold) -> int:
    state = build(config, fold, mesh=abstract_mesh(fold)).state
    return sum(x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(state))


def again(step: CompiledStep, timeline: Timeline) -> Iterator[Finding]:
    """Work that XLA does twice on its own account, to get below the GPU's memory."""
    if match := re.search(r".*[Ii]nvoluntary full rematerialization.*", step.log):
        yield Finding("fault", "involuntary rematerialisation", match[0].strip()[:300])
    again = [e for e in timeline.all_events() if re.search(r"\.remat\d*(\.|$)", e.name)]
    seconds = sum(e.times * (e.lasts_s if e.collective is None else e.exposed_s) for e in again)
    if again:
        longest = max(again, key=lambda e: e.times * e.lasts_s)
        text = (
            f"XLA computes {len(again)} kernels and collectives again to save memory, {seconds:.3f} of "
            f"{timeline.step_s:.3f} s: a smaller step before it is compiled costs less"
        )
        level = "fault" if seconds > _COSTLY_SHARE * timeline.step_s else "note"
        yield Finding(level, "involuntary rematerialisation", text, f"{longest.name} {longest.scope} {longest.source}")


def one_after_another(timeline: Timeline) -> Iterator[Finding]:
    """Collectives that stop the kernels because nothing is scheduled beside them: the three scopes that cost most."""
    sums: dict[tuple[str, str, str], tuple[float, int, Collective]] = {}
    for e, c in timeline.sent():
        if c.synchronous and c.groups.size > 1 and c.num_bytes >= _LARGE_BYTES:
            key = c.phase, c.module, c.kind
            seconds, runs, first = sums.get(key, (0.0, 0, c))
            sums[key] = seconds + e.times * e.exposed_s, runs + e.times, first
    for (phase, scope, kind), (seconds, runs, c) in sorted(sums.items(), key=lambda item: -item[1][0])[:3]:
        text = (
            f"{runs:,} {kind} of {scope}, {phase}, have nothing beside them: {seconds:.3f} of {timeline.step_s:.3f} s"
        )
        yield Finding("note", "not overlapped", text, f"{c.name} {c.source}")


def overlap_given_up(config: RunConfig, step: CompiledStep, timeline: Timeline) -> Iterator[Finding]:
    """XLA runs all-to-alls one after another, without an error, where a step comes near the memory of its GPU, or rows go
    from one NVLink domain to another.
    """
    large = [
        (e.times * c.num_bytes, c) for e, c in timeline.sent() if c.kind == "all-to-all" and c.num_bytes >= _LARGE_BYTES
    ]
    alone = [(sent, c) for sent, c in large if c.synchronous]
    if not config.parallel.overlap or sum(sent for sent, _ in alone) <= _ALONE_SHARE * sum(sent for sent, _ in large):
        return
    _, most = max(alone, key=lambda one: one[0])
    remedy = "have more computed again (memory.recompute), or take smaller micro-batches"
    if most.groups.domains > 1:
        remedy = (
            f"groups of {most.groups.size} touch {most.groups.domains} domains; make parallel.ep smaller, or {remedy}"
        )
    text = (
        f"{len(alone)} of {len(large)} all-to-alls have nothing beside them though parallel.overlap is on, at a peak of "
        f"{step.peak_bytes / 1e9:.1f} GB: {remedy}"
    )
    yield Finding("fault", "overlap given up", text, f"{most.name} {most.source}")


def copies_of_state(module: Module) -> Iterator[Finding]:
    """Whole copies of parameters that XLA keeps in another layout, outside all loops."""
    entry = module.computations[module.entry]
    copies = []
    for i in entry.values():
        copying = i.opcode in ("copy", "transpose") or (
            i.opcode == "fusion" and re.match("wrapped_(transpose|copy)", i.name)
        )
        source = entry.get(i.operands[0]) if i.operands else None
        if copying and source is not None and source.opcode == "parameter" and i.num_bytes >= 16 * _LARGE_BYTES:
            copies.append((i.num_bytes, source.op_name or source.name))
    if copies:
        names = ", ".join(name for _, name in sorted(copies, reverse=True)[:3])
        gib = sum(c[0] for c in copies) / 2**30
        text = f"{len(copies)} arrays of the state are copied into another layout, {gib:.2f} GiB"
        yield Finding("note", "state copied", text, names)


def undeclared(timeline: Timeline) -> Iterator[Finding]:
    names = {e.cost.undeclared for e in timeline.all_events() if e.cost.undeclared} - SILENT_CALLS
    for name in sorted(names):
        yield Finding(
            "note", "unknown kernel", f"custom call {name!r} declares no FLOPs: it counts as memory traffic only"
        )
