"""Replays the schedule of a compiled step on two streams: kernels on one, started collectives on the other.

Kernels run in the order that XLA has scheduled. A started collective begins when those before it are through, and whoever
awaits it waits; what isn't started apart stops the kernels. What collectives and kernels take from each other isn't known.
"""

import collections
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from mesh import Fold
from moex.plan.collectives import Collective, collectives, kind_of, phase_of, scope_of
from moex.plan.costs import FREE, Cost, cost
from moex.plan.hlo import Instruction, Module
from moex.plan.rates import Shares, collective_s, compute_s
from moex.plan.target import Target


class Event(NamedTuple):
    """Something that takes time, in one run of its computation.

    begins_s, lasts_s: from the computation's start.  exposed_s: of a collective, how long kernels wait for it.  times: runs
    in a step.  collective: what is sent, or None for a kernel.  trips: of a loop, whose inside is the computation `inside`.
    """

    name: str
    scope: str
    phase: str
    begins_s: float
    lasts_s: float
    exposed_s: float
    times: int
    cost: Cost
    collective: Collective | None = None
    trips: int = 0
    inside: str = ""
    source: str = ""


class Timeline(NamedTuple):
    """events: by computation, in order.  seconds: of each computation.  times: runs of each in a step.  entry: the step's."""

    events: dict[str, list[Event]]
    seconds: dict[str, float]
    times: dict[str, int]
    entry: str

    @property
    def step_s(self) -> float:
        return self.seconds[self.entry]

    def sent(self) -> Iterator[tuple[Event, Collective]]:
        """Every collective, with when it is."""
        return ((e, e.collective) for e in self.all_events() if e.collective is not None)

    def all_events(self) -> list[Event]:
        """All but loops, whose insides are there by themselves."""
        return [e for name in self.events for e in self.events[name] if not e.trips and e.times]


class _Replay:
    def __init__(self, module: Module, found: Sequence[Collective], target: Target, shares: Shares, row_share: float):
        self.module, self.gpu, self.shares, self.row_share = module, target.accelerator, shares, row_share
        self.collectives = {(c.computation, c.name): c for c in found}
        self.events: dict[str, list[Event]] = {}
        self.seconds: dict[str, float] = {}

    def run(self, computation: str) -> float:
        if computation in self.seconds:
            return self.seconds[computation]
        now = link_free = 0.0
        events: list[Event] = []
        pending: dict[str, tuple[int, float]] = {}  # started collective -> its event, and when it ends
        for i in self.module.computations[computation].values():
            kind, started = kind_of(i, self.module)
            if kind:
                sent = self.collectives[computation, i.name]
                lasts = collective_s(sent, self.gpu, self.shares)
                begins = max(now, link_free)
                link_free = begins + lasts
                if started:
                    pending[i.name] = len(events), link_free
                waits = 0.0 if started else link_free - now
                now += waits
                events.append(self._event(i, begins, lasts, waits, collective=sent))
            elif i.opcode.endswith("-done") and i.operands and i.operands[0] in pending:
                at, ends = pending.pop(i.operands[0])
                waits = max(0.0, ends - now)
                events[at] = events[at]._replace(exposed_s=waits)
                now += waits
            elif i.opcode in ("while", "call", "conditional", "async-start"):
                lasts, inside = self._nested(i)
                if lasts:
                    events.append(self._event(i, now, lasts, 0.0, trips=max(i.trips, 1), inside=inside))
                now += lasts
            elif i.opcode not in FREE and not i.opcode.endswith("-done"):
                spent = cost(self.module, computation, i, row_share=self.row_share)
                if not spent.num_bytes and not spent.flops:
                    continue
                lasts = compute_s(spent, self.gpu, self.shares)
                events.append(self._event(i, now, lasts, 0.0, cost=spent))
                now += lasts
        self.events[computation], self.seconds[computation] = events, max(now, link_free)
        return self.seconds[computation]

    def _nested(self, i: Instruction) -> tuple[float, str]:
        """Seconds of what an instruction runs, and the computation that takes longest."""
        each = {name: self.run(name) for name in i.calls}
        if not each:
            return 0.0, ""
        longest = max(each, key=lambda name: each[name])
        if i.opcode == "conditional":
            return each[longest], longest
        return max(i.trips, 1) * sum(each.values()), longest

    def _event(self, i: Instruction, begins: float, lasts: float, waits: float, **more: Any) -> Event:
        named = i.op_name
        return Event(
            name=i.name, scope=scope_of(named), phase=phase_of(named), begins_s=begins, lasts_s=lasts, exposed_s=waits,
            times=0, source=self.module.source(i), cost=more.pop("cost", Cost()), **more,
        )  # fmt: skip


def replay(
    module: Module, target: Target, shares: Shares, *, fold: Fold | None = None, row_share: float = 1.0
) -> Timeline:
    """When what happens in a step, by these rates.  row_share: see `moex.plan.costs.cost`."""
    found = collectives(module, target.domain, target.num_gpus, fold)
    run = _Replay(module, found, target, shares, row_share)
    run.run(module.entry)
    times: collections.Counter[str] = collections.Counter()
    first = {name: next(iter(inside), "") for name, inside in module.computations.items()}
    for instruction, computation, number in module.executed():
        if instruction.name == first[computation]:
            times[computation] += number
    events = {
        name: [e._replace(times=times[name]) for e in inside] for name, inside in run.events.items() if times[name]
    }
    return Timeline(events, run.seconds, dict(times), module.entry)
