"""One step over pipeline stages, on every number of ranks, virtual stages, folding, overlap and layout, against one device.

    python benchmarks/stages.py [--only SUBSTRING] [--sample N] [--list]

As benchmarks/invariance.py, whose limits hold. A combination takes half a minute or more, nearly all of it compilation.
"""

import argparse
import itertools
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from invariance import start

from moex.config import ParallelConfig
from moex.validate import ConfigError, check_on, resolve_fold
from tests.pipeline.staged import DEEP, Staged
from tests.train.folded import differences

FOLDINGS = {  # within a rank of the pipeline: (dp, cp, tp), (edp, ep, etp), transport
    1: [((4, 1, 2), (1, 8, 1), "alltoall"), ((2, 2, 2), (2, 2, 2), "allgather")],
    2: [((2, 1, 2), (1, 4, 1), "alltoall"), ((1, 2, 2), (2, 2, 1), "allgather"), ((2, 2, 1), (1, 2, 2), "alltoall")],
    4: [((2, 1, 1), (1, 2, 1), "alltoall"), ((1, 1, 2), (1, 2, 1), "allgather")],
}
LAYOUTS = {("further", 2, 1): ("", "Et|ttmL", "Ett|tmL"), ("gqa", 2, 2): ("", "Ett|t||tL")}


def product() -> list[Staged]:
    """All combinations that can run."""
    found = []
    ways = itertools.product(
        FOLDINGS, (1, 2), (1, 3), (False, True), ("gqa", "further"), ((), ("attention", "experts"))
    )
    for pp, chunks, zero, overlap, model, recompute in ways:
        for (dp, cp, tp), (edp, ep, etp), transport in FOLDINGS[pp]:
            sizes = dict(pp=pp, virtual_pp=chunks, dp=dp, cp=cp, tp=tp, edp=edp, ep=ep, etp=etp, zero=zero)
            for layout in LAYOUTS.get((model, pp, chunks), ("",)):
                parallel = ParallelConfig(**sizes, transport=transport, overlap=overlap, layout=layout)
                found.append(Staged(parallel, model, recompute=recompute))
    return [case for case in found if (case.parallel.pp > 1 or case.parallel.overlap) and runs(case)]


def runs(case: Staged) -> bool:
    try:
        config = case.config()
        check_on(config, resolve_fold(config.parallel, 8), "cpu")
    except ConfigError:
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of a combination's name")
    parser.add_argument("--sample", type=int, default=0, help="run this many, drawn at random with a fixed seed")
    parser.add_argument("--list", action="store_true", help="print the names only")
    args = parser.parse_args()
    cases = [case for case in product() if args.only in str(case)]
    cases = random.Random(0).sample(cases, min(args.sample, len(cases))) if args.sample else cases
    if args.list or not cases:
        print(*cases, f"{len(cases)} combinations", sep="\n")
        return 0 if cases else 1
    start()
    failed = 0
    for case in cases:
        began = time.perf_counter()
        found = differences(case, DEEP)
        error, what = found.worst
        print(
            f"{case}  {error:.1e} ({what})  {time.perf_counter() - began:.1f} s",
            *found.problems(),
            sep="  ",
            flush=True,
        )
        failed += bool(found.problems())
    print(f"{len(cases)} combinations, {failed} failed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
