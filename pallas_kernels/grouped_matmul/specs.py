"""Argument shapes and group patterns that tests and benchmarks of the grouped matmul share.  R rows, E groups."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.case import Case
from pallas_kernels.grouped_matmul import grouped_matmul


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """rows R, groups E, inner K and outer N of one call."""

    rows: int
    groups: int
    inner: int
    outer: int


SMALL = Spec(rows=300, groups=6, inner=40, outer=24)
TINY_PRESET = Spec(rows=4096, groups=8, inner=128, outer=384)
GATE = Spec(rows=8192, groups=32, inner=512, outer=512)
PRODUCTION = Spec(rows=1 << 20, groups=32, inner=7168, outer=4096)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """Widths of a published model's routed experts, and rows that a device may have to compute at once."""

    name: str
    hidden: int
    expert: int
    rows: int = 32768


MODELS = (
    Model(name="DeepSeek-V3", hidden=7168, expert=2048),
    Model(name="Qwen3-235B", hidden=4096, expert=1536),
    Model(name="Qwen3-30B", hidden=2048, expert=768),
    Model(name="Mixtral-8x7B", hidden=4096, expert=14336),
)


def products(model: Model) -> tuple[tuple[str, int, int], ...]:
    """(name, summed dim, output columns) of a step's six products; of a weight gradient, the dims of the matrix."""
    up, down = (model.hidden, 2 * model.expert), (model.expert, model.hidden)
    return (
        ("up", *up), ("down", *down), ("dgrad up", *up[::-1]), ("dgrad down", *down[::-1]),
        ("wgrad up", *up), ("wgrad down", *down),
    )  # fmt: skip


def pattern(name: str, spec: Spec) -> np.ndarray:
    """int32 sizes [E] of a named pattern: even, uneven, holes, one_row, around_128, all_to_one, trailing_empty, none."""
    rows, groups = spec.rows, spec.groups
    sizes = np.zeros(groups, np.int64)
    if name == "even":
        sizes[:] = rows // groups
    elif name == "uneven":
        share = np.random.default_rng(0).dirichlet(np.full(groups, 1.5))
        sizes[:] = np.random.default_rng(1).multinomial(rows, share)
    elif name == "holes":
        sizes[1::2] = rows // groups
    elif name == "one_row":
        sizes[groups // 2] = 1
    elif name == "around_128":
        sizes[: min(groups, 2)] = (127, 129)[: min(groups, 2)]
    elif name == "all_to_one":
        sizes[groups - 2] = rows
    elif name == "trailing_empty":
        sizes[: groups // 2] = rows // groups
    elif name != "none":
        raise ValueError(f"no group pattern {name!r}")
    return sizes.astype(np.int32)


PATTERNS = ("even", "uneven", "holes", "one_row", "around_128", "all_to_one", "trailing_empty", "none")


def production_cases() -> tuple[Case, ...]:
    """The products of a training step's experts in bfloat16, each with both of its gradients."""
    cases = []
    for model in MODELS:
        for groups in (4, 8):
            for kind, inner, outer in products(model)[:2]:
                struct = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
                lhs, rhs, g = struct((model.rows, inner)), struct((groups, inner, outer)), struct((model.rows, outer))
                sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)
                name = f"grouped_matmul {model.name} {kind} {groups} groups"
                cases.append(Case(name, forward_and_backward, (lhs, rhs, sizes, g)))
    sums = functools.partial(forward_and_backward, preferred_element_type=jnp.float32)
    g = jax.ShapeDtypeStruct((MODELS[0].rows, MODELS[0].hidden), jnp.float32)
    down = next(case for case in cases if case.name == f"grouped_matmul {MODELS[0].name} down 4 groups")
    return (*cases, Case("grouped_matmul float32 result", sums, (*down.arguments[:3], g)))


def forward_and_backward(lhs, rhs, sizes, g, implementation: str | None = "mosaic", **options):
    """(result, gradient in lhs, gradient in rhs) for the result's gradient `g`."""
    multiply = lambda lhs, rhs: grouped_matmul(lhs, rhs, sizes, implementation=implementation, **options)
    out, pull = jax.vjp(multiply, lhs, rhs)
    return out, *pull(g)
