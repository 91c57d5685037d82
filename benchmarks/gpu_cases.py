"""What `benchmarks/gpu.py` checks and times: every kernel at shapes of published models, its rivals, bytes and FLOPs.

T tokens, k choices, E experts, R rows, D model width, F expert width, K and N the dims of a matrix.
"""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import combine, grouped_matmul, permute, quantize
from pallas_kernels import scaled_grouped_matmul as scaled
from pallas_kernels.permute.specs import choices


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """make: seed -> arguments.  run: the kernel, `run(*arguments, **setting)`.  rivals: the same by other means, of the same
    arguments.  check: (kernel's result, arguments) -> largest error, which may be at most `tolerance`.  num_bytes, flops:
    what the call must read and write, and compute.  settings: what --tune tries.  op, shape: where the best one is kept.
    """

    name: str
    make: Callable[[int], tuple]
    run: Callable[..., Any]
    rivals: dict[str, Callable]
    check: Callable[[Any, tuple], float]
    num_bytes: float
    tolerance: float = 0.0
    flops: float = 0.0
    settings: tuple[dict, ...] = ()
    op: str = ""
    shape: str = ""


def bit_error(got, want) -> float:
    """Share of bytes that differ."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    different = [
        (lax.bitcast_convert_type(a, jnp.uint8) != lax.bitcast_convert_type(b, jnp.uint8)).mean() for a, b in pairs
    ]
    return float(max(different))


def relative_error(got, want) -> float:
    """Largest difference over the largest value, of the worst of all arrays."""
    wide = lambda x: x.astype(jnp.float32)
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return float(max(jnp.abs(wide(a) - wide(b)).max() / jnp.abs(wide(b)).max() for a, b in pairs))


def normal(seed: int, shape, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def quantising(rows: int, columns: int) -> Iterator[Bench]:
    make = lambda seed: (normal(seed, (rows, columns)),)
    grid = tuple(dict(tiles=quantize.Tiles(blocks=132 * b, stages=s)) for b in (1, 2, 4) for s in (1, 2, 3))
    for about, function, options, codes in (
        ("rows", quantize.quantize, {}, 1),
        ("columns", quantize.quantize, dict(transpose=True), 1),
        ("rows and columns", quantize.quantize_both, {}, 2),
    ):
        by = lambda name, f=function, o=options: functools.partial(f, format="e4m3_1x128", implementation=name, **o)
        xla = jax.jit(by("xla"))
        yield Bench(
            name=f"quantize {about} [{rows}, {columns}]",
            make=make,
            run=by("mosaic"),
            rivals={"xla": xla},
            check=functools.partial(against_oracle, xla=xla, oracle=jax.jit(by("reference"))),
            num_bytes=rows * columns * (2 + codes * (1 + 4 / 128)),
            settings=grid,
            op="quantize",
            shape=f"{columns} columns, {about}",
        )


def against_oracle(got, given: tuple, *, xla, oracle) -> float:
    """The kernel against XLA on everything, and XLA against the oracle, which takes much memory, on the first rows."""
    few = (given[0][:128],)
    return max(bit_error(got, xla(*given)), bit_error(xla(*few), oracle(*few)))


def weights(experts: int, rows: int, columns: int) -> Bench:
    by = lambda name: functools.partial(quantize.quantize_both, format="e4m3_128x128", implementation=name)
    xla = jax.jit(by("xla"))
    oracle = jax.jit(by("reference"))
    return Bench(
        name=f"quantize weights [{experts}, {rows}, {columns}] both ways",
        make=lambda seed: (normal(seed, (experts, rows, columns), jnp.float32),),
        run=by("mosaic"),
        rivals={"xla": xla},
        check=lambda got, given: max(
            bit_error(got, xla(*given)), bit_error(xla(given[0][:1, :128]), oracle(given[0][:1, :128]))
        ),
        num_bytes=experts * rows * columns * 6,
    )


def moving(tokens: int, columns: int, top_k: int, experts: int) -> Iterator[Bench]:
    """Rows to their experts and back. The oracle walks token by token, so it is asked about 64 of them."""
    rows_for = lambda tokens: -(-tokens * top_k // 128) * 128 + 128 * experts

    def maps(seed, tokens):
        chosen = np.random.default_rng(seed).permuted(choices("even", tokens, top_k, experts), axis=0)
        return tuple(permute.sort_rows(jnp.asarray(chosen), experts, rows_for(tokens))[:2])

    into = lambda seed, tokens=tokens: (normal(seed, (tokens, columns)), *maps(seed, tokens))
    back = lambda seed, tokens=tokens: (normal(seed, (rows_for(tokens), columns)), *maps(seed, tokens))
    width, num_rows = tokens * columns, rows_for(tokens)
    grid = tuple(dict(tiles=permute.Tiles(blocks=132 * b, tokens=n)) for b in (2, 4, 6) for n in (0, 1, 2))
    pieces = tuple(dict(tiles=combine.Tiles(blocks=132 * b, columns=c)) for b in (4, 6, 8) for c in (512, 1024, 2048))
    in_codes = 2 * width + (1 + 4 / 128) * num_rows * columns
    for name, function, make, kept, num_bytes, settings in (
        ("quantize_and_permute", permute.quantize_and_permute, into, ", in codes", in_codes, grid),
        ("permute", permute.permute, into, "", 2 * width + 2 * num_rows * columns, grid),
        ("combine", combine.combine, back, "", 2 * width * (top_k + 1), pieces),
    ):
        by = lambda name, f=function: jax.jit(functools.partial(f, implementation=name))
        xla, oracle, few = by("xla"), by("reference"), make(2, min(tokens, 64))

        def check(got, given, xla=xla, oracle=oracle, few=few):
            return max(bit_error(got, xla(*given)), bit_error(xla(*few), oracle(*few)))

        yield Bench(
            name=f"{name} [{tokens}, {columns}] k={top_k}",
            make=make,
            run=functools.partial(function, implementation="mosaic"),
            rivals={"xla": xla},
            check=check,
            num_bytes=num_bytes,
            settings=settings,
            op="combine" if name == "combine" else "permute",
            shape=f"{columns} columns, {top_k} choices{kept}",
        )


def sizes_of(rows: int, experts: int):
    return jnp.full((experts,), rows // experts, jnp.int32)


SMALL = (  # configurations of the three products for the interpreter, which simulates one multiprocessor after the other
    grouped_matmul.HopperConfig(columns=128, stages=2, num_sms=1),
    scaled.Config(columns=128, stages=2, num_sms=1),
    scaled.GradConfig(stages=2, num_sms=1),
)


def products(rows: int, inner: int, outer: int, experts: int, configs=(None, None, None)) -> Iterator[Bench]:
    """Grouped products in bfloat16 and FP8, beside one dense product of as many FLOPs."""
    flops = 2.0 * rows * inner * outer
    sizes = sizes_of(rows, experts)
    shape = f"{experts}x{rows // experts} rows, K {inner}, N {outer}"
    dense = jax.jit(lambda lhs, rhs, *rest: lhs @ rhs[0])
    ragged = jax.jit(lambda lhs, rhs: lax.ragged_dot(lhs, rhs, sizes))
    by = lambda name: functools.partial(
        lambda lhs, rhs, **o: grouped_matmul.grouped_matmul(lhs, rhs, sizes, **o), implementation=name
    )
    rivals = {"xla": jax.jit(by("xla")), "lax.ragged_dot": ragged, "dense bf16 by XLA and cuBLAS": dense}
    if (triton := triton_ragged_dot()) is not None:
        rivals["Triton of tokamax"] = jax.jit(lambda lhs, rhs: triton(lhs, rhs, sizes))
    yield Bench(
        name=f"grouped_matmul bf16 {shape}",
        make=lambda seed: (normal(seed, (rows, inner)), normal(seed + 1, (experts, inner, outer))),
        run=functools.partial(by("mosaic"), config=configs[0]),
        rivals=rivals,
        check=lambda got, given: relative_error(got, jax.jit(by("reference"))(*given)),
        tolerance=8e-3,
        num_bytes=2.0 * (rows * inner + experts * inner * outer + rows * outer),
        flops=flops,
    )
    codes = lambda seed, dims, format: quantize.quantize(normal(seed, dims, jnp.float32), format)[:2]
    multiply = lambda name: functools.partial(
        lambda *given, **o: scaled.scaled_grouped_matmul(*given, sizes, **o), implementation=name
    )
    dense_codes = jax.jit(
        lambda a, sa, b, sb: lax.dot_general(a, b[0], (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)
    )
    yield Bench(
        name=f"scaled_grouped_matmul e4m3 {shape}",
        make=lambda seed: (
            *codes(seed, (rows, inner), "e4m3_1x128"),
            *codes(seed + 1, (experts, outer, inner), "e4m3_128x128"),
        ),
        run=functools.partial(multiply("mosaic"), config=configs[1]),
        rivals={"dense e4m3 by XLA (no block scales)": dense_codes},
        check=lambda got, given: relative_error(got, jax.jit(multiply("reference"))(*given)),
        tolerance=8e-3,
        num_bytes=rows * inner + experts * inner * outer + 2.0 * rows * outer,
        flops=flops,
    )
    gradient = lambda name: functools.partial(lambda *given, **o: scaled.wgrad(*given, sizes, **o), implementation=name)
    yield Bench(
        name=f"scaled_grouped_matmul wgrad e4m3 {shape}",
        make=lambda seed: (*codes(seed, (outer, rows), "e4m3_1x128"), *codes(seed + 1, (inner, rows), "e4m3_1x128")),
        run=functools.partial(gradient("mosaic"), config=configs[2]),
        rivals={},
        check=lambda got, given: relative_error(got, jax.jit(gradient("reference"))(*given)),
        tolerance=2e-5,
        num_bytes=rows * (inner + outer) + 4.0 * experts * inner * outer,
        flops=flops,
    )


def triton_ragged_dot() -> Callable | None:
    """tokamax' Triton grouped product, where the environment has it."""
    if importlib.util.find_spec("tokamax") is None:
        return None
    return functools.partial(importlib.import_module("tokamax").ragged_dot, implementation="triton")


def all_cases(*, tiny: bool) -> list[Bench]:
    if tiny:
        found = [
            *quantising(128, 128),
            weights(1, 128, 128),
            *moving(3, 1024, 2, 2),
            *products(128, 128, 128, 2, SMALL),
        ]
        return [
            dataclasses.replace(bench, settings=bench.settings[:2] if i == 0 else ()) for i, bench in enumerate(found)
        ]
    found = [*quantising(32768, 7168), *quantising(32768, 2048), weights(4, 7168, 4096)]
    found += [*moving(16384, 7168, 8, 8), *moving(16384, 2048, 8, 16)]
    for shape in ((32768, 7168, 4096, 4), (32768, 2048, 7168, 4), (32768, 4096, 3072, 8), (32768, 2048, 1536, 8)):
        found += products(*shape)
    return found
