"""All families of tests/goldens/hf on one device and on every folding: how far from the reference implementation.

`python benchmarks/reference_models.py [FAMILY ...]`; exit code 1 when a difference is above the limits.
"""

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.models.golden import FOLDINGS, NAMES, golden, results

LIMITS = dict(logits=1e-4, loss=1e-5, gradient=1e-4)


def differences(name: str, folding: str) -> dict[str, float]:
    """Largest difference of logits, relative difference of the loss, and of the gradients relative to each one's largest."""
    g, r = golden(name), results(name, folding)
    scores = g.expected["logits"]
    parts = [(np.abs(r.gradients[k] - want).max(), np.abs(want).max()) for k, want in g.gradients.items()]
    return dict(
        logits=float(np.abs(r.logits[..., : scores.shape[-1]] - scores).max()),
        loss=float(abs(r.loss / g.expected["loss"][0] - 1)),
        gradient=max(float(error / largest) if largest else float(error > 0) for error, largest in parts),
    )


def main(names: list[str]) -> int:
    if odd := set(names) - set(NAMES):
        print(f"error: no family {', '.join(sorted(odd))}; there are {', '.join(NAMES)}", file=sys.stderr)
        return 2
    worst = dict.fromkeys(LIMITS, 0.0)
    for name in names or NAMES:
        for folding in FOLDINGS:
            found = differences(name, folding)
            worst = {key: max(value, found[key]) for key, value in worst.items()}
            print(f"{name:>12} {folding:>8}  " + "  ".join(f"{k} {v:.1e}" for k, v in found.items()), flush=True)
    print("worst  " + "  ".join(f"{k} {v:.1e} (limit {LIMITS[k]:.0e})" for k, v in worst.items()))
    return int(any(worst[key] > LIMITS[key] for key in worst))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(NAMES)}; all otherwise")
    sys.exit(main(parser.parse_args().families))
