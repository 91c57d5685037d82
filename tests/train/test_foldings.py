"""One step on a folded mesh is the step of one device: loss, statistics, every parameter's gradient, every replica."""

from typing import NamedTuple

import jax
import numpy as np
import pytest

from moex.config import MemoryConfig, ParallelConfig


class Case(NamedTuple):
    """A folding of eight devices, and what else differs from the step that it is compared with."""

    dense: tuple[int, int, int]  # dp, cp, tp
    expert: tuple[int, int, int]  # edp, ep, etp
    transport: str
    model: str
    zero: int
    accumulation: int
    context: str = "gather"
    recompute: tuple[str, ...] = ()
    skewed: bool = False

    @property
    def parallel(self) -> ParallelConfig:
        (dp, cp, tp), (edp, ep, etp) = self.dense, self.expert
        sizes = dict(dp=dp, cp=cp, tp=tp, edp=edp, ep=ep, etp=etp)
        return ParallelConfig(**sizes, zero=self.zero, transport=self.transport, context=self.context)

    def __str__(self):
        parts = ["x".join(map(str, self.dense)), "x".join(map(str, self.expert)), self.transport, self.model]
        how = [f"zero{self.zero}", f"acc{self.accumulation}", self.context, *self.recompute, *["skewed"] * self.skewed]
        return "-".join([*parts, *how])


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
# More ways for experts to lie across the dense axes; skewed, where a bias sends every token to one expert.
CASES += [
    Case((2, 2, 2), (2, 4, 1), "alltoall", "gqa", zero=3, accumulation=1, context="ring"),
    Case((2, 2, 2), (1, 8, 1), "allgather", "mla", zero=1, accumulation=4, context="ulysses", skewed=True),
    Case((1, 4, 2), (2, 2, 2), "alltoall", "mla", zero=3, accumulation=2, context="ring", recompute=LAYER, skewed=True),
    Case((4, 1, 2), (1, 4, 2), "allgather", "gqa", zero=3, accumulation=4, recompute=PARTS),
    Case((8, 1, 1), (4, 2, 1), "allgather", "mla", zero=1, accumulation=1, recompute=DENSE_PARTS, skewed=True),
    Case((1, 8, 1), (1, 8, 1), "alltoall", "mla", zero=3, accumulation=1, context="ring", skewed=True),
    Case(
        (1, 2, 4), (1, 2, 4), "alltoall", "mla", zero=1, accumulation=4, context="ulysses", recompute=LAYER, skewed=True
    ),
    Case((2, 1, 4), (1, 4, 2), "alltoall", "gqa", zero=3, accumulation=2, recompute=LAYER),
]
# With the above, every way of context parallelism at cp 2 and at cp 4; and a window.
CASES.append(Case((2, 4, 1), (2, 4, 1), "allgather", "windowed", zero=3, accumulation=2, context="ulysses"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_step_equals_one_device(harness, case):
    config = harness.config(
        case.model,
        accumulation=case.accumulation,
        parallel=case.parallel,
        memory=MemoryConfig(recompute=case.recompute),
    )
    here = harness.one_step(config, 8, case.skewed)
    there = harness.one_step(harness.on_one_device(config), 1, case.skewed)
    if case.skewed:
        assert (here.metrics["expert_counts"][:, 1] >= 0.4 * here.metrics["expert_counts"].sum(axis=1)).all()
    jax.tree.map(np.testing.assert_array_equal, here.before.params, there.before.params)
    for name in ("loss", "lm_loss", "aux_loss", "z_loss", "grad_norm"):
        np.testing.assert_allclose(here.metrics[name], there.metrics[name], rtol=1e-6, err_msg=name)
    for name in ("valid_tokens", "expert_counts", "applied", "skipped", "overflow"):
        np.testing.assert_array_equal(here.metrics[name], there.metrics[name], err_msg=name)
    np.testing.assert_array_equal(here.after.router_bias, there.after.router_bias)

    def close(path, ours, theirs):
        name, largest = jax.tree_util.keystr(path), np.abs(theirs).max()
        assert largest > 0, name
        assert np.abs(ours - theirs).max() <= 1e-5 * largest, f"{name}: {np.abs(ours - theirs).max() / largest}"

    jax.tree_util.tree_map_with_path(close, here.change, there.change)
    assert_replicas_equal(here.state)


def assert_replicas_equal(state):
    """All copies of a shard hold the same bits."""

    def check(path, array):
        first = {}
        for shard in array.addressable_shards:
            value = np.asarray(shard.data)
            kept = first.setdefault(str(shard.index), value)
            assert kept.tobytes() == value.tobytes(), f"{jax.tree_util.keystr(path)} on {shard.device}"

    jax.tree_util.tree_map_with_path(check, state)
