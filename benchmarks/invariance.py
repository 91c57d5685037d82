"""One step of training on every folding, transport, ZeRO, recompute, accumulation and context, against one device.

    python benchmarks/invariance.py [--only SUBSTRING] [--sample N] [--shard 1/4] [--list]

Eight CPU devices, a tiny model, packed documents, one SGD step with half of all (token, expert) pairs on one expert. Every
parameter's change must be one device's at the same accumulation to 1e-5 of its largest element, loss, auxiliary losses and
gradient norm to 1e-6; initial values, counts and replicas to the bit. Plain SGD at a rate of a power of two, so that the
change is the gradient, scaled exactly.

Prints a line a combination and the worst of all; exits with 1 if one failed. A combination takes 10 to 20 s, nearly all of
it compilation, so the whole product is hours on one machine: --shard i/n deals it to several, --sample draws some (seeded),
--only keeps those whose name contains the text. JAX_COMPILATION_CACHE_DIR keeps compiled programs.
"""

import argparse
import dataclasses
import itertools
import os
import random
import sys
import time
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).parents[1]))

from moex.validate import ConfigError, check_on, resolve_fold
from tests.foldings import FOLDINGS
from tests.train import tiny
from tests.train.folded import Case, differences

# A router bias sends every token to one expert; four key-value heads are shared at tp 8 and trade places at cp 2.
GQA = tiny.MODELS["gqa"]
MODELS = dict(
    gqa=dataclasses.replace(
        GQA,
        attention=dataclasses.replace(GQA.attention, num_kv_heads=4),
        router=dataclasses.replace(GQA.router, bias_rate=1e-3),
    ),
    mla=tiny.MODELS["mla"],
)
TRANSPORTS = ("allgather", "alltoall")
CONTEXTS = ("gather", "ring", "ulysses", "hierarchical")


def product() -> list[Case]:
    """All combinations that can run: ring, ulysses and hierarchical where sequence and heads divide."""
    rest = itertools.product(FOLDINGS, TRANSPORTS, MODELS, (1, 3), (1, 2, 4), CONTEXTS, ((), ("layer",)))
    cases = [
        Case(dense, expert, transport, model, zero, accumulation, context, recompute, skewed=True)
        for (dense, expert), transport, model, zero, accumulation, context, recompute in rest
    ]
    return [case for case in cases if case.context == "gather" or runs(case)]


def runs(case: Case) -> bool:
    config = case.config(MODELS)
    try:
        check_on(config, resolve_fold(config.parallel, 8), "cpu")
    except ConfigError:
        return False
    return True


def chosen(cases: list[Case], *, only: str = "", sample: int = 0, shard: tuple[int, int] = (1, 1)) -> list[Case]:
    """Those of the cases that this call runs."""
    cases = [case for case in cases if only in str(case)]
    if sample:
        cases = random.Random(0).sample(cases, min(sample, len(cases)))
    return cases[shard[0] - 1 :: shard[1]]


def part_of(text: str) -> tuple[int, int]:
    """`2/4` -> (2, 4)."""
    part, parts = map(int, text.split("/"))
    if not 1 <= part <= parts:
        raise ValueError(f"shard {text}: i/n with i from 1 to n")
    return part, parts


def start() -> None:
    """Eight CPU devices that wait for each other on a busy machine, and full-precision products, as in the tests."""
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_collective_call_terminate_timeout_seconds=600"
    )
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_default_matmul_precision", "highest")


def run(case: Case) -> tuple[float, str, list[str]]:
    """(largest relative error, of what, problems)."""
    try:
        found = differences(case, MODELS)
    except AssertionError as error:
        return float("inf"), "what must be equal is not", [" ".join(str(error).split())]
    return *found.worst, found.problems()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of a combination's name")
    parser.add_argument("--sample", type=int, default=0, help="run this many, drawn at random with a fixed seed")
    parser.add_argument("--shard", type=part_of, default=(1, 1), help="i/n: the i-th of n parts")
    parser.add_argument("--list", action="store_true", help="print the names only")
    args = parser.parse_args()
    everything = product()
    cases = chosen(everything, only=args.only, sample=args.sample, shard=args.shard)
    if args.list or not cases:
        print(*cases, f"{len(cases)} of {len(everything)} combinations", sep="\n")
        return 0 if cases else 1
    start()
    failed, worst = [], (0.0, "", "")
    for case in cases:
        began = time.perf_counter()
        error, what, problems = run(case)
        line = f"{case}  {error:.1e} ({what})  {time.perf_counter() - began:.1f} s"
        print(line, *(["FAILED", *problems] if problems else []), sep="  ", flush=True)
        failed += [case] if problems else []
        worst = max(worst, (error, what, str(case)))
    error, what, name = worst
    summary = f"{len(cases)} of {len(everything)} combinations, {len(failed)} failed"
    print(f"{summary}; worst {error:.1e}: {what}, {name}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
