"""What a run's settings come to, as lines for a person: routing, balance, transport, precision, memory."""

from moex.config import MemoryConfig, ParallelConfig, PrecisionConfig, RouterConfig, RunConfig
from moex.pipeline.layout import Layout
from moex.pipeline.schedules import Schedule
from moex.precision.recipes import KINDS, resolve
from moex.train.xla import compiler_options, options


def routing_rules(router: RouterConfig) -> str:
    """How experts are chosen and weighed, with every number in effect."""
    rules = [f"{router.score_function}, top {router.top_k} of {router.num_experts}"]
    if router.num_groups > 1:
        best = f"sum of best {router.group_score_top}" if router.group_score_top > 1 else "maximum"
        rules += [f"within the best {router.top_groups} of {router.num_groups} groups by {best}"]
    if router.selection != "top_k":
        decay = f", decay {router.quantile_decay:g}" if router.selection == "quantile" else ""
        rules += [f"selection {router.selection}{decay}"]
    scaled = router.renormalize and (router.top_k > 1 or router.score_function == "softmax")
    rules += [f"weights {'scaled to sum 1' if scaled else 'as scored'}, x {router.scaling_factor:g}"]
    rules += [f"jitter {router.jitter:g}"] if router.jitter else []
    if router.forced:
        skew = f" {router.forced_skew:g}" if router.forced == "skew" else ""
        rules += [f"FORCED {router.forced}{skew}: random logits, for benchmarks only"]
    return "; ".join(rules)


def balance_rules(router: RouterConfig) -> str:
    """What keeps experts evenly used, with every coefficient in effect; what is off is said to be off."""
    losses = dict(
        balance=router.aux_coefficient, sequence=router.sequence_coefficient, z=router.z_coefficient,
        **{"global-batch": router.global_coefficient},
    )  # fmt: skip
    on = [f"{name} loss x {value:g}" for name, value in losses.items() if value]
    off = [name for name, value in losses.items() if not value]
    rules = on + ([f"{', '.join(off)} loss off"] if off else [])
    centred = ", centred" if router.bias_centred else ""
    rules += [f"bias rate {router.bias_rate:g}{centred}" if router.bias_rate else "bias not moved"]
    if router.selection == "quantile":
        rules[-1] = "bias by quantiles"
    if router.capacity_factor:
        padded = ", padded" if router.pad_to_capacity else ""
        rules += [f"DROPS beyond {router.capacity_factor:g} x balanced rows by {router.capacity_policy}{padded}"]
    else:
        rules += ["drops nothing"]
    return "; ".join(rules)


def transport_rules(parallel: ParallelConfig) -> str:
    """How rows travel, with the sizes of buffers and clones in effect."""
    factors = dict(cells=parallel.cell_factor, spill=parallel.spill_factor, rows=parallel.row_factor)
    sized = [f"{name} x {value:g}" for name, value in factors.items() if value]
    worst = (
        "the worst case" if parallel.waves == 1 else f"the worst case of a {parallel.waves}th of the tokens at a time"
    )
    sizes = f"{', '.join(sized)} of balanced, {parallel.rungs} sizes up to {worst}" if sized else f"buffers for {worst}"
    when = dict(always="", retry=" in retries", report=" REPORTED only")[parallel.echo]
    clones = f"; clones of hot experts{when}: {parallel.echo_slots} a device, above x {parallel.echo_cap:g}"
    return f"{parallel.transport}; {sizes}{clones if parallel.echo_slots else ''}"


def pipeline_rules(placed: Layout, schedule: Schedule) -> str:
    """Stages, and the time and memory that they cost."""
    ranks, chunks, _ = placed.layer_PVN.shape
    sizes = sorted({len(stage) for stage in placed.stages})
    layers = " to ".join(map(str, sizes[:1] + sizes[1:][-1:]))
    idle = f", {placed.idle:.1%} of slots without a layer" if placed.idle else ""
    return (
        f"{ranks} ranks x {chunks} stages of {layers} layers{idle}; bubble {schedule.bubble:.1%} of a rank's work; what "
        f"{schedule.num_slots} stages keep for the backward pass"
    )


def precision_rules(precision: PrecisionConfig) -> str:
    """What products are computed in."""
    rules, resolved = [precision.compute_dtype], resolve(precision)
    rules += [f"{kind} {recipe.name}" for kind in KINDS if (recipe := resolved.recipe(kind))]
    if precision.wire != "compute":
        rules.append("rows travel in FP8" + (", their results' gradients too" if precision.wire == "both" else ""))
    if high := precision.high_first + precision.high_last:
        rules.append(f"{high} layers without recipe (first {precision.high_first}, last {precision.high_last})")
    if precision.gather == "codes":
        rules.append("weights gathered in codes")
    return ", ".join(rules)


def memory_rules(memory: MemoryConfig) -> str:
    """What the backward pass computes again or finds in a stash."""
    rules = [f"recompute {', '.join(memory.recompute) or 'nothing'}"]
    rules += [f"to the host: {', '.join(memory.offload)}"] * bool(memory.offload)
    if memory.stash:
        size = f"x {memory.stash_factor:g} of balanced" if memory.stash_factor else "the worst case"
        rules += [f"stash {', '.join(memory.stash)}: {size}"]
    return "; ".join(rules)


def xla_rules(config: RunConfig, platform: str) -> list[str]:
    """Each of XLA's options with its reason; none where the platform has none."""
    if not compiler_options(config, platform):
        return []
    return [f"{option.name}={str(option.value).lower()}: {option.why}" for option in options(config)]
