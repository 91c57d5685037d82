"""Argument shapes and group patterns that tests and benchmarks of the grouped matmul share.  R rows, E groups."""

import dataclasses

import numpy as np


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
