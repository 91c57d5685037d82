"""What FP8 blocks, wire and weight gathers in codes save DeepSeek-V3 on 256 H100s: memory and bytes, read off compiled steps.

    scripts/setup_aot.sh
    python benchmarks/precision_deepseek_v3.py [--preset deepseek_v3_256xh100] [--only bf16]

No GPU is needed; a step compiles in a few minutes and is kept.
"""

import argparse
import collections
import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from moex.cli import parse
from moex.config import PrecisionConfig
from moex.plan.plan import make_plan
from moex.plan.target import parse_target

WAYS = {
    "bf16": PrecisionConfig(),
    "fp8_block": PrecisionConfig(recipe="fp8_block"),
    "with FP8 wire and gathers": PrecisionConfig(recipe="fp8_block", wire="both", gather="codes"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="deepseek_v3_256xh100")
    parser.add_argument("--gpus", default="h100:256")
    parser.add_argument("--only", nargs="+", choices=list(WAYS), default=list(WAYS))
    a = parser.parse_args()
    config, target = parse([a.preset]).config, parse_target(a.gpus)
    for name in a.only:
        plan = make_plan(dataclasses.replace(config, precision=WAYS[name]), target)
        step = plan.step
        sent: collections.Counter = collections.Counter()
        for _, one in plan.timeline.sent():
            moved = (one.nvlink_bytes + one.network_bytes) * one.times / 1e9
            sent[one.kind, "+".join(one.dtypes)] += moved
        gib = lambda x: x / 2**30
        print(
            f"{name}: arguments {gib(step.argument_bytes):.1f} GiB, temporaries {gib(step.temporary_bytes):.1f}, peak "
            f"{gib(step.peak_bytes):.1f}; compiled in {step.compile_s:.0f} s; estimated step {plan.estimate.step_s:.1f} s"
        )
        for (kind, dtypes), moved in sent.most_common():
            if moved > 0.005 * sum(sent.values()):
                print(f"    {kind:20} {dtypes:24} {moved:10,.1f} GB received by a GPU in a step")
        print(f"    all {sum(sent.values()):,.1f} GB", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
