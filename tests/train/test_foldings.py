"""One step on a folded mesh is the step of one device: loss, statistics, every parameter's gradient, every replica."""

import pytest

from tests.train.folded import Case, differences

LAYER, PARTS, DENSE_PARTS = ("layer",), ("attention", "moe"), ("attention", "mlp", "experts")
# Each dense folding with either model and either ZeRO, each kind of expert folding, each transport and way of context
# parallelism with either model, and every pair of ZeRO, accumulation and recompute. gqa has two key-value heads.
CASES = [
    Case((8, 1, 1), (8, 1, 1), "local", "gqa", zero=1, accumulation=1),
    Case((8, 1, 1), (1, 8, 1), "alltoall", "mla", zero=3, accumulation=2, recompute=LAYER),
    Case((2, 2, 2), (2, 2, 2), "alltoall", "gqa", zero=3, accumulation=4, context="ring", recompute=PARTS),
    Case((2, 2, 2), (1, 4, 2), "allgather", "mla", zero=1, accumulation=2, context="ulysses"),
    Case((1, 4, 2), (4, 1, 2), "local", "gqa", zero=1, accumulation=1, recompute=LAYER),
    Case((1, 4, 2), (1, 8, 1), "alltoall", "mla", zero=3, accumulation=1, context="ring"),
    Case((1, 1, 8), (1, 8, 1), "allgather", "gqa", zero=3, accumulation=4, recompute=LAYER),
    Case((1, 1, 8), (2, 2, 2), "alltoall", "mla", zero=1, accumulation=1, recompute=DENSE_PARTS),
    Case((1, 8, 1), (8, 1, 1), "local", "gqa", zero=3, accumulation=4, context="ring"),
    Case((1, 8, 1), (1, 2, 4), "allgather", "mla", zero=1, accumulation=2, context="ulysses", recompute=LAYER),
    Case((4, 2, 1), (2, 4, 1), "alltoall", "gqa", zero=1, accumulation=4, context="ulysses", recompute=PARTS),
    Case((4, 2, 1), (1, 1, 8), "local", "mla", zero=3, accumulation=2, recompute=DENSE_PARTS),
]
# Skewed, where a bias sends every token to one expert; tokens dropped. `benchmarks/invariance.py` has the whole product.
CASES += [
    Case((2, 2, 2), (1, 8, 1), "allgather", "mla", zero=1, accumulation=4, context="ulysses", skewed=True),
    Case((1, 4, 2), (2, 2, 2), "alltoall", "mla", zero=3, accumulation=2, context="ring", recompute=LAYER, skewed=True),
    Case((2, 2, 2), (1, 8, 1), "alltoall", "dropping", zero=3, accumulation=2, recompute=LAYER),
]
# With the above, every way of context parallelism at cp 2 and at cp 4; and a window.
CASES.append(Case((2, 4, 1), (2, 4, 1), "allgather", "windowed", zero=3, accumulation=2, context="ulysses"))
# Groups that trade heads inside a ring; documents dealt one by one.
CASES.append(
    Case((2, 4, 1), (2, 4, 1), "alltoall", "gqa", zero=1, accumulation=2, context="hierarchical", deal="document")
)
CASES.append(Case((1, 4, 2), (1, 8, 1), "alltoall", "mla", zero=3, accumulation=2, context="hierarchical"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_step_equals_one_device(case):
    assert not differences(case).problems()
