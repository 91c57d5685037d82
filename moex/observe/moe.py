"""How a run routes: per MoE layer the load, its entropy and dead experts, and what was dropped, by cause.

N steps, L MoE layers, E experts. The "end" is that of `health`.
"""

from typing import NamedTuple

import numpy as np

from moex.observe.health import dead_experts, end_loads, end_window
from moex.observe.load import load_entropy, relative_load
from moex.observe.run import Run, as_number

CAUSES = {
    "dropped": "beyond a capacity: not computed",
    "overflow": "no room in a buffer: the step was run again with larger ones, nothing lost",
    "router_not_finite": "a router logit that is not finite",
}


class LayerRouting(NamedTuple):
    """Of one MoE layer at the end of a run.  load: busiest expert over the mean.  least: idlest over the mean.  entropy: of
    the experts' shares, over the most it could be.  gates: heaviest expert's weights over the mean, NaN where the log has
    none; above `load`, the busiest expert's results also weigh more.  dead: experts without a token.
    """

    layer: int
    load: float
    least: float
    entropy: float
    gates: float
    dead: tuple[int, ...]


def layers(run: Run) -> list[LayerRouting]:
    """Each MoE layer, means over the steps of the end; none without tokens."""
    window = run.counts[-end_window(len(run.steps)) :]
    loads_L, dead = end_loads(run), dead_experts(run)
    relative_LE, entropy_L = relative_load(window), load_entropy(window)
    found = []
    for layer, load in enumerate(loads_L.tolist()):
        if np.isfinite(load):
            mine = tuple(expert for where, expert in dead if where == layer)
            least = float(_means(relative_LE[:, layer]).min())
            entropy = float(_means(entropy_L[:, layer, None])[0])
            gates = _means(run.gate_loads[-len(window) :, layer : layer + 1])
            found.append(LayerRouting(layer, load, least, entropy, float(gates[0]) if len(gates) else np.nan, mine))
    return found


def _means(values: np.ndarray) -> np.ndarray:
    """Means over dim 0 of what is finite, of the columns that have something finite."""
    seen = np.isfinite(values)
    number = seen.sum(0)
    return (np.where(seen, values, 0).sum(0)[number > 0]) / number[number > 0]


def lost_pairs(run: Run) -> dict[str, int]:
    """Pairs of token and choice by cause, over the whole run; those that occurred.

    A step that overflowed leaves no line of its own, so those are counted from the events of steps that were run again.
    """
    totals = {name: int(np.nansum(run[name])) for name in CAUSES}
    totals["overflow"] += sum(int(as_number(event.get("overflow")) or 0) for event in run.events_of("retry"))
    return {name: total for name, total in totals.items() if total}
