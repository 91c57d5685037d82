"""What of context parallelism contradicts itself, has no effect, or does not divide."""

from mesh import Fold
from moex.config import RunConfig


def context_problems(config: RunConfig) -> list[str]:
    parallel, problems = config.parallel, []
    if parallel.context == "hierarchical" and parallel.ulysses < 2:
        problems.append(
            f"parallel.ulysses={parallel.ulysses} with parallel.context=hierarchical is ring: set ulysses to at least 2"
        )
    if parallel.context != "hierarchical" and parallel.ulysses != 1:
        problems.append(f"parallel.ulysses={parallel.ulysses} has no effect with parallel.context={parallel.context}")
    return problems + (_group_problems(config) if parallel.cp_groups else [])


def _group_problems(config: RunConfig) -> list[str]:
    parallel, train, groups = config.parallel, config.train, config.parallel.cp_groups
    here, problems = f"parallel.cp_groups={' '.join(map(str, groups))}", []
    powers = all(group > 0 and parallel.cp % group == 0 and group.bit_count() == 1 for group in groups[:-1])
    if list(groups) != sorted(groups) or groups[-1] != parallel.cp or len(set(groups)) == 1 or not powers:
        problems.append(f"{here} must rise from powers of two that divide parallel.cp={parallel.cp} to cp itself")
    if train.accumulation % len(groups):
        problems.append(
            f"{here}: train.accumulation={train.accumulation} micro-batches don't divide into {len(groups)} shares"
        )
    wanted = (
        ("parallel.context", parallel.context, "ring", "keys pass round fewer ranks"),
        ("parallel.pp", parallel.pp, 1, "a pipeline has one program for all micro-batches"),
        ("parallel.overlap", parallel.overlap, False, "two micro-batches run in one program"),
        ("data.packing", config.data.packing, "documents", "documents are sorted by length"),
        ("the number of data.corpus", len(config.data.corpus), 1, "buckets have no weights"),
        ("train.ramp_sizes", train.ramp_sizes, (), "every step has the same micro-batches"),
    )
    problems += [f"{here}: {name} must be {want}, not {is_}: {why}" for name, is_, want, why in wanted if is_ != want]
    return problems


def context_problems_on(config: RunConfig, folded: Fold) -> list[str]:
    parallel, attention, problems = config.parallel, config.model.attention, []
    cp, tp = folded.size("cp"), folded.size("tp")
    for name, default in (("context", "gather"), ("deal", "row")):
        if (value := getattr(parallel, name)) != default and cp == 1:
            problems.append(f"parallel.{name}={value} has no effect with parallel.cp=1: set it to {default}")
    heads = max(attention.num_kv_heads // tp, 1) if attention.kind == "gqa" else attention.num_heads // tp
    hierarchical = parallel.context == "hierarchical"
    trading, number = ("ulysses", parallel.ulysses) if hierarchical else ("cp", cp)
    if (hierarchical or parallel.context == "ulysses") and heads % number:
        problems.append(
            f"parallel.context={parallel.context} trades the {heads} key-value heads of a device for the sequence, and they "
            f"don't divide by parallel.{trading}={number}: use ring or gather"
        )
    if hierarchical and cp > 1 and (cp % parallel.ulysses or parallel.ulysses >= cp):
        problems.append(
            f"parallel.ulysses={parallel.ulysses}: hierarchical makes groups of them of parallel.cp={cp} ranks: choose a "
            "divisor between the two"
        )
    return problems
