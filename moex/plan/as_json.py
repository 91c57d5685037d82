"""A plan as JSON values, for programs and for the page."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from moex.plan.plan import Plan, by_scope, by_view
from moex.plan.remedies import Remedy
from moex.plan.schedule import layer_computations


def as_json(plan: Plan, remedies: Sequence[Remedy] = ()) -> dict[str, Any]:
    """All of it but the program's text. Bytes, seconds and FLOPs are of one GPU and step unless a name says otherwise."""
    step = plan.step
    return dict(
        config=dataclasses.asdict(plan.config),
        gpus=dict(
            kind=plan.target.name,
            number=plan.target.num_gpus,
            nvlink_domain=plan.target.domain,
            usable_bytes=plan.target.usable_bytes,
        ),
        mesh=plan.fold.describe(),
        fits=plan.fits,
        verdict=plan.verdict(),
        memory=dict(
            peak_bytes=step.peak_bytes,
            argument_bytes=step.argument_bytes,
            temporary_bytes=step.temporary_bytes,
            host_bytes=step.host_bytes,
            at_peak=[p._asdict() for p in plan.live],
            by_formula=[p._asdict() for p in plan.formula],
            remedies=[r._asdict() | dict(config=dataclasses.asdict(r.config)) for r in remedies],
        ),
        communication=by_view(plan),
        compute=by_scope(plan),
        launches=plan.launches._asdict() | dict(by_host=plan.launches.by_host),
        estimate=dataclasses.asdict(plan.estimate),
        shares=dataclasses.asdict(plan.shares) | dict(reasons=plan.shares.reasons()),
        audit=[f._asdict() for f in plan.findings],
        layer={phase: _events(plan, name) for phase, name in layer_computations(plan.timeline).items()},
        compile_s=step.compile_s,
    )


def _events(plan: Plan, computation: str) -> dict[str, Any]:
    """The schedule of one computation: kernels, and collectives with what they send."""
    return dict(
        seconds=plan.timeline.seconds[computation],
        runs=plan.timeline.times[computation],
        events=[
            dict(
                name=e.cost.kernel or e.name,
                scope=e.scope,
                phase=e.phase,
                begins_s=e.begins_s,
                lasts_s=e.lasts_s,
                exposed_s=e.exposed_s,
                flops=e.cost.flops,
                bytes=e.collective.num_bytes if e.collective else e.cost.num_bytes,
                collective=e.collective.kind if e.collective else "",
                view=e.collective.view if e.collective else "",
                domains=e.collective.groups.domains if e.collective else 0,
                source=e.source,
            )
            for e in plan.timeline.events[computation]
        ],
    )
