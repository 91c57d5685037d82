"""What a run's own routing would need on other numbers of ranks: `python -m moex.balance simulate RUN --ep 8 64`.

Reads the tokens of every expert from RUN/metrics.jsonl, a draw for each step and MoE layer, and prints the load of the
busiest rank over the mean, without and with clones of hot experts. E experts, n ranks.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from moex.balance.echo import plan_clones
from moex.cli import fail
from moex.observe.jsonl import read_jsonl

QUANTILES = (0.5, 0.99, 1.0)


class Loads(NamedTuple):
    """Of every draw: the busiest rank's rows over the mean, without and with clones; how many clones."""

    before: np.ndarray
    after: np.ndarray
    clones: np.ndarray


def draws(run: Path, first_step: int) -> np.ndarray:
    """Tokens of each expert, int32 [draws, E].  Raises ValueError when the folder has none."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{run} is no run folder: it has no metrics.jsonl")
    found = [counts for line in read_jsonl(path) if line["step"] >= first_step for counts in line["expert_counts"]]
    found = [counts for counts in found if sum(counts)]
    if not found:
        raise ValueError(f"{path} has no tokens of experts from step {first_step} on")
    return np.array(found, np.int32)


def simulate(counts_DE: np.ndarray, num_ranks: int, *, slots: int, hot_per_home: int, cap: float) -> Loads:
    """Loads of each draw on `num_ranks` ranks.  Raises ValueError when experts don't divide by ranks."""
    num_experts = counts_DE.shape[1]
    if num_ranks < 1 or num_experts % num_ranks:
        raise ValueError(f"{num_experts} experts don't divide by {num_ranks} ranks")
    means = counts_DE.sum(axis=1) / num_ranks
    homes = counts_DE.reshape(len(counts_DE), num_ranks, -1).sum(axis=2)

    def planned(counts_E):
        plan = plan_clones(counts_E, num_ranks, slots=slots, hot_per_home=hot_per_home, cap=cap)
        return plan.loads(counts_E).max(), (plan.slot_nS >= 0).sum()

    most, clones = map(np.asarray, jax.jit(jax.vmap(planned))(counts_DE))
    return Loads(homes.max(axis=1) / means, most / means, clones)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m moex.balance", description=__doc__.splitlines()[0])
    command = parser.add_subparsers(required=True).add_parser(
        "simulate", help="loads of a run's routing on other meshes"
    )
    add = command.add_argument
    add("run", type=Path, help="run folder")
    add("--ep", type=int, nargs="+", default=[8], help="numbers of ranks that experts are split over")
    add("--slots", type=int, default=1, help="spare expert slots of a rank")
    add("--cap", type=float, default=1.1, help="load from which on experts are cloned")
    add("--hot", type=int, default=2, help="experts of a rank that may be cloned")
    add("--first-step", type=int, default=0, help="leave out the steps before this one")
    a = parser.parse_args(arguments)
    try:
        if a.slots < 1 or a.hot < 1 or not 1 <= a.cap < 1024:
            raise ValueError(f"--slots {a.slots} and --hot {a.hot} must be at least 1, --cap {a.cap} at least 1")
        counts = draws(a.run, a.first_step)
        loads = {ep: simulate(counts, ep, slots=a.slots, hot_per_home=a.hot, cap=a.cap) for ep in a.ep}
    except ValueError as error:
        return fail(error)
    names = "".join(f"{f'{q:g}' if q < 1 else 'most':>8}" for q in QUANTILES)
    print(f"{counts.shape[1]} experts, {len(counts):,} draws (steps x layers, all micro-batches and devices of a step)")
    print(f"load of the busiest rank{'':4}without clones{'':10}with clones\n{'ep':>8}    {names}{names}   clones")
    for ep, found in loads.items():
        numbers = [np.quantile(x, q) for x in (found.before, found.after) for q in QUANTILES]
        print(f"{ep:8}    {''.join(f'{x:8.2f}' for x in numbers)}{found.clones.mean():9.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
