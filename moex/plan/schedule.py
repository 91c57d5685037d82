"""The schedule of one layer, forward and backward: what runs when, and which collectives kernels cover or wait for."""

from collections.abc import Sequence

from moex.plan.timeline import Event, Timeline


def layer_computations(timeline: Timeline) -> dict[str, str]:
    """`forward` and `backward` -> the body of the layer loop that takes most time of a step; what has none is left out."""
    found: dict[str, tuple[float, str]] = {}
    for events in timeline.events.values():
        for e in events:
            if e.trips <= 1 or not any(
                inner.scope.startswith(("attention", "moe")) for inner in timeline.events[e.inside]
            ):
                continue
            inner = timeline.events[e.inside]
            if any(i.trips > 1 and any(x.scope == "attention" for x in timeline.events[i.inside]) for i in inner):
                continue  # micro-batches around layers
            phase = "backward" if any(x.phase == "backward" for x in inner) else "forward"
            spent = e.times * e.lasts_s
            found[phase] = max(found.get(phase, (0.0, "")), (spent, e.inside))
    return {phase: found[phase][1] for phase in ("forward", "backward") if phase in found}


def layer_schedule(timeline: Timeline, *, least_s: float = 2e-5) -> list[str]:
    """Lines of both passes.  least_s: kernels that are shorter are added up until the next line."""
    lines = []
    for phase, computation in layer_computations(timeline).items():
        lasts, times = timeline.seconds[computation] * 1e3, timeline.times[computation]
        lines.append(f"{phase} pass of a layer: {lasts:.3f} ms, {times:,} times a step")
        lines += _lines(timeline.events[computation], least_s)
    return lines


def _lines(events: Sequence[Event], least_s: float) -> list[str]:
    """`at ms | kernel or > started collective | takes | waits`; collectives stand where they are started."""
    lines, small, number = [], 0.0, 0
    for e in events:
        if e.collective is None and not e.trips and e.lasts_s < least_s:
            small, number = small + e.lasts_s, number + 1
            continue
        if e.collective is not None and e.collective.num_bytes < 1 << 16:
            continue
        if number:
            lines.append(f"{'':>10}    {number} short kernels, {small * 1e3:.3f} ms")
            small, number = 0.0, 0
        lines.append(_line(e))
    if number:
        lines.append(f"{'':>10}    {number} short kernels, {small * 1e3:.3f} ms")
    return lines


def _line(e: Event) -> str:
    at, lasts = f"{e.begins_s * 1e3:10.3f}", f"{e.lasts_s * 1e3:8.3f} ms"
    if e.collective is not None:
        c = e.collective
        sent = f"{c.num_bytes / 1e6:,.1f} MB over {c.view}"
        waits = "hidden" if e.exposed_s <= 0 else f"waits {e.exposed_s * 1e3:.3f} ms"
        return f"{at}  {'=' if c.synchronous else '>'} {c.kind:<19}{c.phase:<10}{c.module:<18}{lasts}  {sent}; {waits}"
    what = f"loop of {e.trips}" if e.trips else e.cost.kernel or e.name
    flops = f"  {e.cost.flops / 1e9:,.1f} GFLOP {e.cost.format}" if e.cost.flops else ""
    return f"{at}    {what[:18]:<19}{e.phase:<10}{e.scope:<18}{lasts}{flops}"
