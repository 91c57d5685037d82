"""What uneven routing costs: buffers, bytes, clones, retries by simulation; memory by compiling for 64 and 256 H100s.

    python benchmarks/imbalance.py                      (a minute; --draws 8 for steadier figures)
    python benchmarks/imbalance.py --compile            (needs scripts/setup_aot.sh; minutes a row)

DeepSeek-V3's MoE layer: 256 experts, k 8, D 7168, F 2048, 4096 tokens a GPU. Routing is drawn, not recorded: uniform; one
sequence a rank whose tokens share topic logits of standard deviation s ("topics s"), within 4 of 8 groups; experts as
popular as 1 / rank^a ("Zipf a"); and two adversaries.

n ranks, T tokens of a rank, E experts, k experts a token.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from moex.balance.simulate import Cloning, Needs, group_counts, overflowing, simulate, wire_rows
from moex.config import MemoryConfig, ParallelConfig, RunConfig, TrainConfig
from moex.models.families import deepseek_v3
from moex.plan.compiled import compile_step

ROOT = Path(__file__).parents[1]
EXPERTS, TOP_K, GROUPS, TOP_GROUPS, D = 256, 8, 8, 4, 7168
BUDGET = dict(cell_factor=1.0, spill_factor=0.35, row_factor=1.25)
Routing = Callable[[np.random.Generator, int, int], np.ndarray]


def top(logits_TE: np.ndarray) -> np.ndarray:
    """The k highest of each token."""
    return np.argpartition(-logits_TE, TOP_K - 1, axis=1)[:, :TOP_K]


def uniform(rng, num_ranks: int, tokens: int) -> np.ndarray:
    return top(rng.random((num_ranks * tokens, EXPERTS), np.float32))


def topics(spread: float) -> Routing:
    def draw(rng, num_ranks: int, tokens: int) -> np.ndarray:
        topic = spread * rng.standard_normal((num_ranks, 1, EXPERTS), np.float32)
        logits = (topic + rng.standard_normal((num_ranks, tokens, EXPERTS), np.float32)).reshape(-1, EXPERTS)
        best = np.sort(logits.reshape(len(logits), GROUPS, -1), axis=2)[:, :, -2:].sum(axis=2)
        kept = best >= np.sort(best, axis=1)[:, -TOP_GROUPS, None]
        return top(np.where(np.repeat(kept, EXPERTS // GROUPS, axis=1), logits, -np.inf))

    return draw


def zipf(power: float) -> Routing:
    def draw(rng, num_ranks: int, tokens: int) -> np.ndarray:
        popularity = -power * np.log(rng.permutation(EXPERTS) + 1.0)
        return top(popularity[None] + rng.gumbel(size=(num_ranks * tokens, EXPERTS)))

    return draw


def one_rank_each(rng, num_ranks: int, tokens: int) -> np.ndarray:
    """Every source sends all to one or two ranks of its own; all ranks get the same."""
    local = EXPERTS // num_ranks
    first = (np.arange(num_ranks) * local)[:, None] + np.arange(max(TOP_K, local)) % EXPERTS
    return np.repeat(first[:, :TOP_K] % EXPERTS, tokens, axis=0)


def all_to_the_same(rng, num_ranks: int, tokens: int) -> np.ndarray:
    return np.tile(np.arange(TOP_K), (num_ranks * tokens, 1))


ROUTINGS: dict[str, Routing] = {
    "uniform": uniform,
    "topics 0.3": topics(0.3),
    "topics 0.6": topics(0.6),
    "topics 1.0": topics(1.0),
    "Zipf 0.5": zipf(0.5),
    "Zipf 1.0": zipf(1.0),
    "each source to its own rank": one_rank_each,
    "all tokens to the same 8": all_to_the_same,
}


def rung(needs: Needs) -> int:
    """The smallest of budget, twice the budget and worst case that holds all draws, by the spill over the budget's cells."""
    twice = {name: 2 * factor for name, factor in BUDGET.items()}
    return 0 if not overflowing(needs, **BUDGET).any() else 1 if not overflowing(needs, **twice).any() else 2


def wire_gb(level: int, num_ranks: int, tokens: int, clone_slots: int) -> float:
    """GB that a rank sends in a layer's forward pass: rows there and back, in BF16, and weights of clones."""
    budget = {name: 2**level * BUDGET[name] if level < 2 else 0.0 for name in ("cell_factor", "spill_factor")}
    rows = wire_rows(tokens, TOP_K, num_ranks, num_local=EXPERTS // num_ranks, **budget)
    weights = (Cloning.hot_per_home + clone_slots) * 3 * D * 2048 if clone_slots else 0
    return (2 * rows * D + weights) * 2 / 1e9


def simulated(num_draws: int, tokens: int, ranks: list[int]) -> list[str]:
    """The table's lines: needs without and with clones, largest of all draws."""
    columns = f"{'rank':>7}{'cell':>7}{'spill':>7}{'rung':>6}{'GB':>7}"
    head = f"{'':28}{columns}  |{columns}{'clones':>8}"
    lines = []
    for num_ranks in ranks:
        lines += [
            f"ep {num_ranks}, {tokens} tokens a rank, {num_draws} draws; without clones | with clones",
            head + f"{'clones':>8}",
        ]
        for name, routing in ROUTINGS.items():
            rng = np.random.default_rng(7)
            draws = [
                c for _ in range(num_draws) for c in group_counts(routing(rng, num_ranks, tokens), num_ranks, EXPERTS)
            ]
            found = simulate(np.stack(draws), BUDGET["cell_factor"], Cloning())
            parts = []
            for needs, slots in ((found.plain, 0), (found.cloned, Cloning.slots)):
                level = rung(needs)
                numbers = "".join(f"{x.max():7.2f}" for x in (needs.load, needs.cell, needs.spill))
                parts.append(f"{numbers}{level:6}{wire_gb(level, num_ranks, tokens, slots):7.2f}")
            lines.append(f"{name:28}{parts[0]}  |{parts[1]}{found.clones.mean():8.1f}")
    return lines


def budgets() -> dict[str, tuple[dict, MemoryConfig]]:
    """Name -> (fields of `ParallelConfig`, what is kept)."""
    layer = MemoryConfig(recompute=("layer",))
    stash = dataclasses.replace(layer, stash=("experts",))
    clones = dict(echo_slots=1)
    return {
        "worst case": ({}, layer),
        "worst case in 32 waves": (dict(waves=32), layer),
        "cells 4, rows 2": (dict(cell_factor=4.0, row_factor=2.0), layer),
        "cells 1 + spill 0.35, rows 1.25": (BUDGET, layer),
        "the same with clones": (BUDGET | clones, layer),
        "the same with clones and a stash": (BUDGET | clones, stash),
    }


def compiled(num_gpus: int, tokens: int, python: Path) -> list[str]:
    """Temporaries by budget: 4 layers, of which a scan runs one at a time."""
    model = deepseek_v3(
        vocab_size=2048, d_model=D, num_layers=4, num_dense_layers=0, dense_width=0, expert_width=2048,
        shared_width=2048, num_heads=16, nope_dim=128, rope_dim=64, value_dim=128, q_latent_dim=1536, kv_latent_dim=512,
        num_experts=EXPERTS, top_k=TOP_K, num_groups=GROUPS, top_groups=TOP_GROUPS,
    )  # fmt: skip
    target = (ROOT / "moex/plan/targets/h100.txtpb").read_text()
    lines = [f"{num_gpus} H100s, ep 64, {tokens} tokens a GPU, 4 layers recomputed: GiB a GPU"]
    lines.append(f"{'':36}{'temporaries':>12}{'peak':>8}{'compiled in':>13}")
    for name, (fields, memory) in budgets().items():
        config = RunConfig(
            model=model,
            parallel=ParallelConfig(ep=64, zero=3, transport="alltoall", **fields),
            train=TrainConfig(batch_size=num_gpus * tokens // 128, seq_len=128),
            memory=memory,
        )
        step = compile_step(config, num_gpus, target, python=python)
        gib = step.temporary_bytes / 2**30, step.peak_bytes / 2**30
        lines.append(f"{name:36}{gib[0]:12.2f}{gib[1]:8.2f}{step.compile_s:11.0f} s")
        print(lines[-1], file=sys.stderr, flush=True)
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--ep", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--gpus", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--python", type=Path, default=ROOT / ".venv-aot/bin/python")
    a = parser.parse_args(arguments)
    if a.compile:
        for num_gpus in a.gpus:
            print("\n".join(compiled(num_gpus, a.tokens, a.python)))
    else:
        print("\n".join(simulated(a.draws, a.tokens, a.ep)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
