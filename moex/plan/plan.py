"""One plan: a configuration's step compiled for a target, and everything that is read off the program."""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

from mesh import Fold
from moex.config import RunConfig
from moex.models.flops import train_flops_per_token
from moex.plan.audit import Finding, audit
from moex.plan.cache import compiled_for
from moex.plan.compiled import CompiledStep
from moex.plan.hlo import Module, parse
from moex.plan.launches import Launches, launches
from moex.plan.memory import Part, at_peak, by_formula, sizes
from moex.plan.rates import DEFAULT, Shares
from moex.plan.target import KINDS, Target
from moex.plan.timeline import Timeline, replay
from moex.validate import check, check_on, resolve_fold


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """What to expect of a step, by the rates of `shares`.

    compute_s: kernels.  exposed_s: that kernels wait for collectives.  hidden_s: of collectives beside kernels.
    model_flops, executed_flops: of one GPU and step; the second by format.  mfu: of the BF16 peak.
    """

    step_s: float
    compute_s: float
    exposed_s: float
    hidden_s: float
    tokens_per_s: float
    model_flops: float
    executed_flops: dict[str, float]
    model_flops_per_s: float
    mfu: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """formula, live: what a GPU holds, by formula and by the compiler.  launches: by the host, in a step.
    findings: of the audit.
    """

    config: RunConfig
    target: Target
    fold: Fold
    step: CompiledStep
    module: Module
    timeline: Timeline
    shares: Shares
    estimate: Estimate
    formula: tuple[Part, ...]
    live: tuple[Part, ...]
    launches: Launches
    findings: tuple[Finding, ...]

    @property
    def fits(self) -> bool:
        return self.step.peak_bytes <= self.target.usable_bytes

    def verdict(self) -> str:
        """One sentence: does it fit, and by how much."""
        peak, usable = self.step.peak_bytes / 1e9, self.target.usable_bytes / 1e9
        gap = abs(usable - peak)
        return (
            f"fits: {peak:.1f} of {usable:.0f} GB, {gap:.1f} GB free"
            if self.fits
            else f"does NOT fit: {peak:.1f} of {usable:.0f} GB, {gap:.1f} GB too much"
        )


def make_plan(
    config: RunConfig, target: Target, *, shares: Shares = DEFAULT, tell: Callable[[str], None] = lambda _: None
) -> Plan:
    """Compiles (or finds compiled) and reads.

    Raises ConfigError when the configuration doesn't fit the GPUs' number; CompileError with the compiler's text.
    """
    check(config)
    fold = resolve_fold(config.parallel, target.num_gpus)
    check_on(config, fold, device_kind=KINDS[target.name])
    return read_plan(config, target, compiled_for(config, target, tell=tell), shares=shares)


def read_plan(config: RunConfig, target: Target, step: CompiledStep, *, shares: Shares = DEFAULT) -> Plan:
    """Everything from the compiled step's texts; nothing is compiled."""
    fold = resolve_fold(config.parallel, target.num_gpus)
    module = parse(step.text)
    timeline = replay(module, target, shares, fold=fold, row_share=sizes(config, fold).row_share)
    return Plan(
        config=config,
        target=target,
        fold=fold,
        step=step,
        module=module,
        timeline=timeline,
        shares=shares,
        estimate=estimate(config, target, timeline),
        formula=tuple(by_formula(config, fold)),
        live=tuple(at_peak(step)),
        launches=launches(step.thunks, module),
        findings=tuple(audit(config, target, fold, step, module, timeline)),
    )


def estimate(config: RunConfig, target: Target, timeline: Timeline) -> Estimate:
    """Adds up a timeline."""
    executed: dict[str, float] = collections.defaultdict(float)
    compute = exposed = lasts = 0.0
    for e in timeline.all_events():
        if e.collective is None:
            compute += e.times * e.lasts_s
            executed[e.cost.format] += e.times * e.cost.flops
        else:
            exposed += e.times * e.exposed_s
            lasts += e.times * e.lasts_s
    tokens = config.train.batch_size * config.train.seq_len
    model = train_flops_per_token(config.model, config.train.seq_len) * tokens / target.num_gpus
    step_s = timeline.step_s
    return Estimate(
        step_s=step_s,
        compute_s=compute,
        exposed_s=exposed,
        hidden_s=max(0.0, lasts - exposed),
        tokens_per_s=tokens / target.num_gpus / step_s,
        model_flops=model,
        executed_flops={name: flops for name, flops in executed.items() if flops},
        model_flops_per_s=model / step_s,
        mfu=model / step_s / target.accelerator.bf16_flops,
    )


def by_scope(plan: Plan) -> list[dict[str, Any]]:
    """Kernels' seconds, FLOPs and bytes in a step by phase and named scope, longest first."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for e in plan.timeline.all_events():
        if e.collective is None:
            row = rows.setdefault(
                (e.phase, e.scope), dict(phase=e.phase, scope=e.scope, seconds=0.0, flops=0.0, bytes=0.0)
            )
            row["seconds"] += e.times * e.lasts_s
            row["flops"] += e.times * e.cost.flops
            row["bytes"] += e.times * e.cost.num_bytes
    return sorted(rows.values(), key=lambda row: -row["seconds"])


def by_view(plan: Plan) -> list[dict[str, Any]]:
    """Collectives in a step by view, phase, scope and kind, those that send most first."""
    rows: dict[tuple, dict[str, Any]] = {}
    for e, c in plan.timeline.sent():
        names = dict(
            view=c.view, phase=c.phase, scope=c.module, kind=c.kind, gpus=c.groups.size, domains=c.groups.domains
        )
        row = rows.setdefault(
            tuple(names.values()),
            names
            | dict(runs=0, bytes=0.0, nvlink_bytes=0.0, network_bytes=0.0, seconds=0.0, exposed_s=0.0, dtypes=set()),
        )
        row["runs"] += c.times
        row["bytes"] += c.times * c.num_bytes
        row["nvlink_bytes"] += c.times * c.nvlink_bytes
        row["network_bytes"] += c.times * c.network_bytes
        row["seconds"] += c.times * e.lasts_s
        row["exposed_s"] += c.times * e.exposed_s
        row["dtypes"] |= set(c.dtypes)
    for row in rows.values():
        row["dtypes"] = sorted(row["dtypes"])
    return sorted(rows.values(), key=lambda row: -row["seconds"])
