"""What of a pipeline or of overlap contradicts itself, has no effect, or meets something that runs without them only."""

from moex.config import ParallelConfig, RunConfig
from moex.dispatch.legs import IN_LEGS
from moex.models.pattern import kinds
from moex.pipeline.layout import layout


def pipeline_problems(config: RunConfig) -> list[str]:
    parallel, problems = config.parallel, []
    if parallel.pp > 1:
        problems += _stage_problems(config)
    else:
        problems += [
            f"parallel.{name}={value!r} has no effect with parallel.pp=1"
            for name in ("virtual_pp", "layout")
            if (value := getattr(parallel, name)) != getattr(ParallelConfig, name)
        ]
    if parallel.overlap:
        problems += _overlap_problems(config)
    if config.memory.stash and (parallel.pp > 1 or parallel.overlap):
        problems.append(
            f"memory.stash={','.join(config.memory.stash)} keeps rows in the order of one backward pass, which neither a "
            "pipeline nor parallel.overlap has: use memory.recompute"
        )
    if config.optimizer.qk_clip and (parallel.pp > 1 or parallel.overlap):
        problems.append(
            f"optimizer.qk_clip={config.optimizer.qk_clip} reads attention's logits where one device has all layers of a "
            "micro-batch: set it to 0, or use pp=1 without parallel.overlap"
        )
    return problems


def _stage_problems(config: RunConfig) -> list[str]:
    parallel, train, problems = config.parallel, config.train, []
    if parallel.virtual_pp < 1:
        problems.append(f"parallel.virtual_pp={parallel.virtual_pp} must be at least 1")
    rows = max(train.batch_size // max(train.accumulation, 1), 1)
    for size in (train.batch_size, *train.ramp_sizes):
        if left := size // rows % parallel.pp:
            problems.append(
                f"train.accumulation: {size} rows are {size // rows} micro-batches, of which parallel.pp={parallel.pp} ranks "
                f"leave {left} over; make it a multiple of {parallel.pp}"
            )
    if every := config.observe.measure_precision_every:
        problems.append(
            f"observe.measure_precision_every={every} measures where one device has all layers: set it to 0, or use pp=1"
        )
    return problems


def _overlap_problems(config: RunConfig) -> list[str]:
    parallel, problems = config.parallel, []
    if not config.model.num_moe_layers or parallel.transport == "local":
        problems.append("parallel.overlap has no effect without rows that travel: set a transport, or overlap to False")
    elif parallel.transport not in IN_LEGS:
        problems.append(
            f"parallel.overlap: transport {parallel.transport} waits for sizes on the host: use {' or '.join(IN_LEGS)}"
        )
    if config.train.accumulation == 1:
        problems.append(
            "parallel.overlap has no effect with train.accumulation=1: rows travel beside another micro-batch's computation"
        )
    if again := {"layer", "moe"} & set(config.memory.recompute):
        problems.append(
            f"memory.recompute={','.join(sorted(again))} would have rows travel again, beside nothing, which "
            "parallel.overlap is not built for: name attention and experts"
        )
    alone = dict(echo_slots=0, waves=1)
    problems += [
        f"parallel.{name}={value} runs without parallel.overlap only: set it to {off}"
        for name, off in alone.items()
        if (value := getattr(parallel, name)) != off
    ]
    if config.precision.wire != "compute":
        problems.append(f"precision.wire={config.precision.wire} runs without parallel.overlap only: set it to compute")
    return problems


def layout_problems(config: RunConfig) -> list[str]:
    """Whether the layers fill the stages."""
    parallel, model = config.parallel, config.model
    if parallel.pp <= 1:
        return []
    try:
        given = parallel.pp, parallel.virtual_pp, parallel.layout
        layout(kinds(model, config.precision), *given, mtp_depth=model.mtp_depth)
    except ValueError as error:
        return [f"parallel.pp={parallel.pp}, virtual_pp={parallel.virtual_pp}: {error}"]
    return []
