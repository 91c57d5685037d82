"""One step on a folded mesh beside the same step on one device: what must be equal, and how far apart the rest is."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np

from moex.config import MemoryConfig, ModelConfig, ParallelConfig, RunConfig
from tests.train.tiny import MODELS, Harness, Step, one_step, tiny_config

METRICS = ("loss", "lm_loss", "aux_loss", "sequence_loss", "global_loss", "z_loss", "grad_norm")
COUNTS = ("valid_tokens", "expert_counts", "applied", "skipped", "overflow", "dropped")


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
    deal: str = "row"

    @property
    def parallel(self) -> ParallelConfig:
        (dp, cp, tp), (edp, ep, etp) = self.dense, self.expert
        sizes = dict(dp=dp, cp=cp, tp=tp, edp=edp, ep=ep, etp=etp)
        ulysses = 2 if self.context == "hierarchical" else 1
        how = dict(transport=self.transport, context=self.context, ulysses=ulysses, deal=self.deal)
        return ParallelConfig(**sizes, zero=self.zero, **how)

    def __str__(self):
        parts = ["x".join(map(str, self.dense)), "x".join(map(str, self.expert)), self.transport, self.model]
        how = [f"zero{self.zero}", f"acc{self.accumulation}", self.context, *self.recompute, *["skewed"] * self.skewed]
        how += [] if self.deal == "row" else [f"by-{self.deal}"]
        return "-".join([*parts, *how])

    def config(self, models: Mapping[str, ModelConfig] = MODELS) -> RunConfig:
        memory = MemoryConfig(recompute=self.recompute)
        return tiny_config(models[self.model], accumulation=self.accumulation, parallel=self.parallel, memory=memory)


class Differences(NamedTuple):
    """Largest relative errors, by name: of each parameter's change to its largest element, and of the metrics."""

    changes: dict[str, float]
    metrics: dict[str, float]

    @property
    def worst(self) -> tuple[float, str]:
        return max((error, name) for name, error in (self.changes | self.metrics).items())

    def problems(self) -> list[str]:
        over = lambda errors, limit: [f"{name}: off by {e:.1e}" for name, e in errors.items() if not e <= limit]
        return over(self.changes, 1e-5) + over(self.metrics, 1e-6)


def differences(case: Case, models: Mapping[str, ModelConfig] = MODELS) -> Differences:
    """The case's step against one device's.  Raises AssertionError where something differs that must be equal."""
    config = case.config(models)
    here = one_step(config, 8, case.skewed)
    there = one_step(Harness.on_one_device(config), 1, case.skewed)
    if case.skewed:
        counts = here.metrics["expert_counts"]
        assert (counts[:, 1] >= 0.4 * counts.sum(axis=1)).all()
    jax.tree.map(np.testing.assert_array_equal, here.before.params, there.before.params)
    for name in COUNTS:
        np.testing.assert_array_equal(here.metrics[name], there.metrics[name], err_msg=name)
    # Steps of a bias are equal to the bit; quantiles are of logits, whose sums over tp round.
    np.testing.assert_allclose(here.after.router_bias, there.after.router_bias, rtol=0, atol=1e-7)
    assert_replicas_equal(here)
    changes = {}

    def compare(path, ours, theirs):
        name, largest = jax.tree_util.keystr(path), np.abs(theirs).max()
        assert largest > 0, f"{name} does not change"
        changes[name] = float(np.abs(ours - theirs).max() / largest)

    jax.tree_util.tree_map_with_path(compare, here.change, there.change)
    relative = lambda a, b: float(abs(a - b) / abs(b)) if b else float(abs(a))
    names = [name for name in METRICS if name in there.metrics]  # some losses are measured only where they are on
    return Differences(changes, {name: relative(here.metrics[name], there.metrics[name]) for name in names})


def assert_replicas_equal(step: Step) -> None:
    """All copies of a shard hold the same bits."""

    def check(path, array):
        first = {}
        for shard in array.addressable_shards:
            value = np.asarray(shard.data)
            kept = first.setdefault(str(shard.index), value)
            assert kept.tobytes() == value.tobytes(), f"{jax.tree_util.keystr(path)} on {shard.device}"

    jax.tree_util.tree_map_with_path(check, step.state)
