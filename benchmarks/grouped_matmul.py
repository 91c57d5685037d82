"""The grouped matmul beside one dense matmul of the same useful FLOPs and `jax.lax.ragged_dot`, in one run.

    python benchmarks/grouped_matmul.py [--check] [--quick]

Competitors run in turns and the smallest time counts. --check exits with 1 below the gates: forward, and forward with
backward, at least 0.6 of the dense matmul's speed, and over 20 times ragged_dot. --quick takes small shapes.
GLIBC_TUNABLES=glibc.malloc.hugetlb=1 in the environment makes fresh buffers cheaper for all of them alike.
"""

import argparse
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_matmul.specs import GATE, SMALL, TINY_PRESET, Spec, pattern


def forward_and_backward(multiply):
    def run(lhs, rhs, sizes, g):
        out, pull = jax.vjp(lambda a, b: multiply(a, b, sizes), lhs, rhs)
        return out, *pull(g)

    return run


def competitors(dtype):
    dense = lambda lhs, rhs, sizes: lhs @ rhs[0]  # one matrix for all rows
    found = {"dense": dense, "grouped_matmul": grouped_matmul}
    return found if dtype == jnp.bfloat16 else found | {"ragged_dot": jax.lax.ragged_dot}


def measure(spec: Spec, dtype, rounds: int) -> dict[tuple[str, str], float]:
    """Least seconds by (competitor, pass)."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    lhs, rhs = draw(spec.rows, spec.inner), draw(spec.groups, spec.inner, spec.outer)
    g, sizes = draw(spec.rows, spec.outer), jnp.asarray(pattern("uneven", spec))
    calls = {}
    for name, multiply in competitors(dtype).items():
        alone = rhs[:1] if name == "dense" else rhs
        calls[name, "forward"] = (jax.jit(multiply), (lhs, alone, sizes))
        calls[name, "forward+backward"] = (jax.jit(forward_and_backward(multiply)), (lhs, alone, sizes, g))
    least = dict.fromkeys(calls, float("inf"))
    for function, arguments in calls.values():
        jax.block_until_ready(function(*arguments))
    for i in range(rounds):
        for key, (function, arguments) in calls.items():
            if key[0] == "ragged_dot" and i >= max(rounds // 4, 1):
                continue  # some thirty times slower: a few rounds tell
            began = time.perf_counter()
            jax.block_until_ready(function(*arguments))
            least[key] = min(least[key], time.perf_counter() - began)
    return least


def report(title: str, spec: Spec, least: dict[tuple[str, str], float]) -> None:
    print(f"{title}: {spec.groups} groups, {spec.rows} rows, {spec.inner} x {spec.outer}, uneven")
    print(f"  {'':16}{'pass':18}{'ms':>9}{'GFLOP/s':>9}{'of dense':>10}")
    for (name, which), seconds in least.items():
        gflop = 2 * spec.rows * spec.inner * spec.outer * (1 if which == "forward" else 3) / 1e9
        ratio = least["dense", which] / seconds
        print(f"  {name:16}{which:18}{seconds * 1e3:9.2f}{gflop / seconds:9.1f}{ratio:10.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    if arguments.quick:
        report("quick, float32", SMALL, measure(SMALL, jnp.float32, 2))
        return 0
    gate = measure(GATE, jnp.float32, arguments.rounds)
    report("float32", GATE, gate)
    report("the tiny preset's, float32", TINY_PRESET, measure(TINY_PRESET, jnp.float32, arguments.rounds))
    report("bfloat16", GATE, measure(GATE, jnp.bfloat16, max(arguments.rounds // 4, 2)))
    failed = []
    for which in ("forward", "forward+backward"):
        of_dense = gate["dense", which] / gate["grouped_matmul", which]
        over_ragged = gate["ragged_dot", which] / gate["grouped_matmul", which]
        print(f"{which}: {of_dense:.2f} of dense (gate 0.6), {over_ragged:.0f} times ragged_dot (gate 20)")
        failed += [which] * (of_dense < 0.6 or over_ragged <= 20)
    return int(arguments.check and bool(failed))


if __name__ == "__main__":
    sys.exit(main())
