"""What of a pipeline's sizes contradicts itself, has no effect, or meets something that runs without one only."""

from moex.config import ParallelConfig, RunConfig
from moex.models.pattern import kinds
from moex.pipeline.layout import layout


def pipeline_problems(config: RunConfig) -> list[str]:
    parallel, train, problems = config.parallel, config.train, []
    pp, chunks = parallel.pp, parallel.virtual_pp
    if pp <= 1:
        return [
            f"parallel.{name}={value!r} has no effect with parallel.pp=1"
            for name in ("virtual_pp", "layout")
            if (value := getattr(parallel, name)) != getattr(ParallelConfig, name)
        ]
    if chunks < 1:
        problems.append(f"parallel.virtual_pp={chunks} must be at least 1")
    micros = max(train.batch_size // max(train.accumulation, 1), 1)
    for size in (train.batch_size, *train.ramp_sizes):
        if number := size // micros % pp:
            problems.append(
                f"train.accumulation: {size} rows are {size // micros} micro-batches, of which parallel.pp={pp} ranks leave "
                f"{number} over; make it a multiple of {pp}"
            )
    if config.memory.stash:
        problems.append(
            f"memory.stash={','.join(config.memory.stash)} keeps rows in the order of one backward pass, which a pipeline "
            "with parallel.pp above 1 doesn't have: use memory.recompute"
        )
    if config.observe.measure_precision_every:
        problems.append(
            f"observe.measure_precision_every={config.observe.measure_precision_every} measures on the layers of one device: "
            "set it to 0, or measure with parallel.pp=1"
        )
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
