"""Plans and audits every preset that names its GPUs, one after the other: `make plans` (ARGS="NAME ..." for some).

Prints a table; exits with 1 when one doesn't fit, has a fault or can't be compiled.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from moex.cli import GPUS, PRESETS
from moex.plan.compiled import CompileError
from moex.plan.plan import make_plan
from moex.plan.target import parse_target


def main(names: list[str]) -> int:
    bad = 0
    print(
        "| preset | compiled in | peak GB of usable | step, estimated | MFU | waits | faults |\n|---|---|---|---|---|---|---|"
    )
    for name in names or GPUS:
        try:
            plan = make_plan(PRESETS[name](), parse_target(GPUS[name]))
        except CompileError as error:
            print(f"| {name} | not compiled: {str(error).strip().splitlines()[-1][:200]} | | | | | |", flush=True)
            bad += 1
            continue
        e, faults = plan.estimate, [f for f in plan.findings if f.level == "fault"]
        cells = (
            name,
            f"{plan.step.compile_s:.0f} s",
            f"{plan.step.peak_bytes / 1e9:.1f} of {plan.target.usable_bytes / 1e9:.0f}",
            f"{e.step_s:.1f} s",
            f"{e.mfu:.1%}",
            f"{e.exposed_s / e.step_s:.0%}",
            "; ".join(f"{f.kind}: {f.text}" for f in faults) or "none",
        )
        print(f"| {' | '.join(cells)} |", flush=True)
        bad += bool(faults) or not plan.fits
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
