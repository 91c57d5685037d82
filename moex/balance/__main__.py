"""What a run's own routing would need on other numbers of ranks: `python -m moex.balance simulate RUN --ep 8 64`.

Reads the choices that the run recorded (`observe.record_routing_every`), a draw for each step, micro-batch and MoE layer:
the load of the busiest rank and what buffers need, without and with clones of hot experts. Without recorded choices it
takes the tokens of every expert from RUN/metrics.jsonl, which tell loads only. E experts, n ranks.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moex.balance.simulate import Cloning, Simulated, group_counts, overflowing, retries, simulate
from moex.cli import fail
from moex.observe import needs, routing
from moex.observe.jsonl import read_jsonl

QUANTILES = (0.5, 0.99, 1.0)


def recorded(run: Path, num_ranks: int, tokens_per_rank: int, first_step: int) -> np.ndarray | None:
    """Draws [D, n, E] of the recorded choices; None when there are none."""
    draws = [
        counts
        for _, experts_ABSLk, num_experts in routing.read(run, first_step)
        for micro in experts_ABSLk
        for layer in np.moveaxis(micro, 2, 0)
        for counts in group_counts(layer.reshape(-1, layer.shape[-1]), num_ranks, num_experts, tokens_per_rank)
    ]
    draws = [counts for counts in draws if counts.any()]
    return np.stack(draws) if draws else None


def counted(run: Path, first_step: int) -> np.ndarray:
    """Tokens of each expert by step and layer, int32 [D, E].  Raises ValueError when the folder has none."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{run} is no run folder: it has no metrics.jsonl")
    found = [counts for line in read_jsonl(path) if line["step"] >= first_step for counts in line["expert_counts"]]
    found = [counts for counts in found if sum(counts)]
    if not found:
        raise ValueError(f"{path} has no tokens of experts from step {first_step} on")
    return np.array(found, np.int32)


def simulated(a: argparse.Namespace, ep: int) -> tuple[Simulated, bool]:
    """Of one number of ranks; and whether sources are known, which cells and spill depend on."""
    if ep < 1:
        raise ValueError(f"--ep {ep} must be at least 1")
    draws = recorded(a.run, ep, a.tokens_per_rank, a.first_step)
    known = draws is not None
    if draws is None:
        counts_DE = counted(a.run, a.first_step)
        draws = np.concatenate([counts_DE[:, None], np.zeros((len(counts_DE), ep - 1, counts_DE.shape[1]))], axis=1)
    cloning = Cloning(slots=a.slots, hot_per_home=a.hot, cap=a.cap)
    return simulate(draws, a.cell, cloning), known


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m moex.balance", description=__doc__.splitlines()[0])
    command = parser.add_subparsers(required=True).add_parser(
        "simulate", help="loads and buffers of a run's routing on other meshes"
    )
    add = command.add_argument
    add("run", type=Path, help="run folder")
    add("--ep", type=int, nargs="+", default=[8], help="numbers of ranks that experts are split over")
    add("--tokens-per-rank", type=int, default=0, help="tokens of a rank; 0 deals a micro-batch to one ep group")
    add("--cell", type=float, default=1.0, help="parallel.cell_factor")
    add("--spill", type=float, default=0.35, help="parallel.spill_factor")
    add("--rows", type=float, default=1.25, help="parallel.row_factor")
    add("--slots", type=int, default=1, help="spare expert slots of a rank")
    add("--cap", type=float, default=1.1, help="load from which on experts are cloned")
    add("--hot", type=int, default=2, help="experts of a rank that may be cloned")
    add("--first-step", type=int, default=0, help="leave out the steps before this one")
    add("--figure", type=Path, help="write needs by number of ranks to this SVG file")
    a = parser.parse_args(arguments)
    try:
        if a.slots < 1 or a.hot < 1 or not 1 <= a.cap < 1024:
            raise ValueError(f"--slots {a.slots} and --hot {a.hot} must be at least 1, --cap {a.cap} at least 1")
        if min(a.cell, a.spill, a.rows) < 0 or a.tokens_per_rank < 0:
            raise ValueError("--cell, --spill, --rows and --tokens-per-rank must not be negative")
        found = {ep: simulated(a, ep) for ep in a.ep}
    except ValueError as error:
        return fail(error)
    results = {ep: result for ep, (result, _) in found.items()}
    known = all(known for _, known in found.values())
    _print_loads(results)
    if known:
        _print_buffers(results, a)
    else:
        print("cells and spill depend on who sends what: record it with --observe.record_routing_every")
    if a.figure:
        ways = lambda r: {"without clones": r.plain._asdict(), "with clones": r.cloned._asdict()}
        a.figure.write_text(needs.figure({ep: ways(found) for ep, found in results.items()}, sources_known=known))
        print(f"figure  {a.figure}")
    return 0


def _print_loads(results: dict[int, Simulated]) -> None:
    names = "".join(f"{f'{q:g}' if q < 1 else 'most':>8}" for q in QUANTILES)
    draws = ", ".join(f"{len(found.clones):,}" for found in results.values())
    print(f"draws (steps x micro-batches x layers): {draws}")
    print(f"load of the busiest rank{'':4}without clones{'':10}with clones\n{'ep':>8}    {names}{names}   clones")
    for ep, found in results.items():
        numbers = [np.quantile(x, q) for x in (found.plain.load, found.cloned.load) for q in QUANTILES]
        print(f"{ep:8}    {''.join(f'{x:8.2f}' for x in numbers)}{found.clones.mean():9.1f}")


def _print_buffers(results: dict[int, Simulated], a: argparse.Namespace) -> None:
    """For the budget asked for: what was needed at most, how many draws overflow, how many steps of 1, 10, 100 draws."""
    budget = dict(cell_factor=a.cell, spill_factor=a.spill, row_factor=a.rows)
    print(
        f"buffers: cell {a.cell:g}, spill {a.spill:g}, rows {a.rows:g}; needed at most, draws that overflow, steps of N draws"
    )
    print(f"{'ep':>8}    {'':8}{'cell':>8}{'spill':>8}{'rows':>8}{'draws':>9}{'N=1':>8}{'10':>8}{'100':>8}")
    for ep, found in results.items():
        for name, need in (("plain", found.plain), ("clones", found.cloned)):
            share = float(overflowing(need, **budget).mean())
            most = "".join(f"{x.max():8.2f}" for x in (need.cell, need.spill, need.load))
            steps = "".join(f"{retries(share, n):8.1%}" for n in (1, 10, 100))
            print(f"{ep:8}    {name:8}{most}{share:9.2%}{steps}")


if __name__ == "__main__":
    sys.exit(main())
