"""What of precision and memory contradicts itself or has no effect."""

from moex.config import MemoryConfig, RunConfig
from moex.validate.numbers import LARGEST


def compute_problems(config: RunConfig) -> list[str]:
    modules, model, memory, problems = set(config.memory.recompute), config.model, config.memory, []
    if "layer" in modules and len(modules) > 1:
        problems.append(f"memory.recompute: `layer` contains {sorted(modules - {'layer'})}; name one or the others")
    if "mlp" in modules and not model.num_dense_layers:
        problems.append("memory.recompute: `mlp` has no effect without dense layers")
    if modules & {"moe", "experts"} and not model.num_moe_layers:
        problems.append("memory.recompute: `moe` and `experts` have no effect without MoE layers")
    if config.precision.experts != "compute" and not model.num_moe_layers:
        problems.append(f"precision.experts={config.precision.experts} has no effect without MoE layers")
    if memory.stash and not model.num_moe_layers:
        problems.append("memory.stash has no effect without MoE layers")
    if set(memory.stash) & modules:
        problems.append("memory: `experts` are in stash and in recompute, but what a stash has isn't computed again")
    if memory.stash and config.parallel.waves > 1 and not config.parallel.bounded:
        problems.append("memory.stash has no effect on parallel.waves, of which no rows are kept: use one of the two")
    if memory.stash_factor and not 1 <= memory.stash_factor <= LARGEST:
        problems.append(
            f"memory.stash_factor={memory.stash_factor} must be finite and at least 1, which is room for balanced routing, "
            "or 0 for the worst case"
        )
    if memory.stash_factor != MemoryConfig.stash_factor and not memory.stash:
        problems.append(f"memory.stash_factor={memory.stash_factor} has no effect without memory.stash")
    return problems
