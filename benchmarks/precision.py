"""Low-precision recipes on a trained model against their gates, and a planted fault that must not pass.

    python benchmarks/precision.py [--run FOLDER] [--steps 50] [--lr 6e-4] [--figure docs/precision.svg]

Trains the preset tiny for 300 steps, unless a folder with a checkpoint is given; then paired warm starts of every recipe by
`moex.compare_recipes`, and of FP8 blocks whose stored scale is rounded up to a power of two while their codes were made by
the exact one. About fifteen minutes on two cores.
"""

import argparse
import dataclasses
import sys
import tempfile
from pathlib import Path

from jax import lax

sys.path.insert(0, str(Path(__file__).parents[1]))

import train
from mesh import distributed
from moex import compare_recipes as compare
from moex.observe import gaps
from moex.precision.recipes import RECIPES
from pallas_kernels.quantize import scales

GATES = dict(null=0.001, fp8_block=0.003, mxfp8=0.003, fp8_tensor=0.005, nvfp4=0.010)
"""Largest mean gap in the loss from BF16, nats, either way."""
FAULT, LEAST = "planted fault", 0.05


def with_planted_fault(start: compare.Start, base: compare.Compared, steps: int) -> compare.Compared:
    """FP8 blocks whose codes don't fit their scales."""
    sound = scales.block_scales

    def faulty(amax, dtype, power_of_two, loud=False):
        encode, _ = sound(amax, dtype, False, loud)
        return lax.optimization_barrier(encode), sound(amax, dtype, True, loud)[1]

    scales.block_scales = faulty
    try:
        config = dataclasses.replace(compare.configured(start.config, "fp8_block"), name=FAULT)
        return base._replace(losses=compare.losses_of(start, config, steps))
    finally:
        scales.block_scales = sound


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, help="folder of a run with a checkpoint")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--figure", type=Path)
    a = parser.parse_args()
    if a.run is None:
        a.run = Path(tempfile.mkdtemp()) / "warm"
        quiet = ["--observe.sample_tokens", "0", "--observe.eval_every", "0"]
        assert train.main(["tiny", "--folder", str(a.run), "--train.steps", "300", *quiet]) == 0
    else:
        distributed.initialise()
    start = compare.open_run(a.run, a.lr, a.steps)
    found = compare.compare(start, list(RECIPES), a.steps)
    base = found.pop(compare.BASE)
    found[FAULT] = with_planted_fault(start, base, a.steps)
    print(f"{a.steps} steps from step {start.step} at lr {a.lr:g}, loss in BF16 {base.losses.mean():.4f}")
    failed = []
    for name, one in found.items():
        gap, off = one.gap(base), one.losses - base.losses
        good = gap > LEAST if name == FAULT else abs(gap) <= GATES[name]
        limit = f"above {LEAST}" if name == FAULT else f"within {GATES[name]}"
        print(
            f"{name:14} gap {gap:+.4f} ({limit}: {'yes' if good else 'NO'})  last 20 {off[-20:].mean():+.4f}  "
            f"sd {off.std():.4f}  experts changed {one.changed:.2%}"
        )
        failed += [name] * (not good)
    if a.figure:
        curves = {name: one.losses - base.losses for name, one in found.items() if name != FAULT}
        cosines = {"compute": base.cosines} | {n: one.cosines for n, one in found.items() if n in RECIPES}
        a.figure.write_text(gaps.figure(curves, cosines))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
