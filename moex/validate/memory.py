"""What of recompute, offload and stash contradicts itself or has no effect."""

from moex.config import MemoryConfig, RunConfig
from moex.memory.residuals import MODULES, members
from moex.precision.recipes import resolve
from moex.validate.numbers import LARGEST

_OF_ROWS = ("expert_rows", "expert_fc1")


def memory_problems(config: RunConfig) -> list[str]:
    memory = config.memory
    problems = _contradictions(memory)
    for field in ("recompute", "offload"):
        for name in getattr(memory, field):
            problems += [f"memory.{field}: `{name}` has no effect {why}" for why in [without(name, config)] if why]
    if memory.offload and (config.parallel.pp > 1 or config.parallel.overlap):
        problems.append(
            f"memory.offload={','.join(memory.offload)}: a pipeline and parallel.overlap keep what is between two passes in "
            "a ring on the device: use memory.recompute, or pp=1 without overlap"
        )
    if memory.optimizer == "host" and config.optimizer.name == "sgd" and not config.optimizer.sgd_momentum:
        problems.append(
            "memory.optimizer=host has no effect: optimizer.name=sgd without sgd_momentum has no moments; set it to device"
        )
    return problems + _stash_problems(config)


def _contradictions(memory: MemoryConfig) -> list[str]:
    again, problems = set(memory.recompute), []
    if "layer" in again and len(again) > 1:
        problems.append(f"memory.recompute: `layer` contains {sorted(again - {'layer'})}; name one or the others")
    for module in (m for m in MODULES if m in again and m != "layer"):
        inside = {name for sparse in (False, True) for name in members(module, sparse=sparse)}
        inside |= {"experts"} if module == "moe" else set()
        if twice := sorted(again & inside - {"mlp_norm"}):
            problems.append(f"memory.recompute: `{module}` contains {twice}; name one or the others")
    if "layer_input" in again:
        problems.append("memory.recompute: `layer_input` is what a layer is computed again from; it can be in offload")
    if both := sorted(again & set(memory.offload)):
        problems.append(f"memory: {both} are in recompute and in offload; name each in one of them")
    return problems


def without(name: str, config: RunConfig) -> str:
    """What the configuration lacks for the name to have an effect, or ""."""
    model, parallel = config.model, config.parallel
    latent, experts = model.attention.kind == "mla", model.num_moe_layers > 0
    gathers = parallel.cp > 1 and parallel.context != "ring"
    waves = parallel.waves > 1 and not parallel.bounded
    needs = dict(
        qkv=(not latent, "with attention.kind=mla: name mla_down_proj or mla_up_proj"),
        mla_down_proj=(latent, "without attention.kind=mla: name qkv"),
        mla_up_proj=(latent, "without attention.kind=mla: name qkv"),
        context=(gathers, "without parallel.cp above 1 and another parallel.context than ring"),
        mlp=(model.num_mlp_layers, "without dense layers"),
        mlp_fc1=(model.num_mlp_layers, "without dense layers"),
        moe=(experts, "without MoE layers"),
        experts=(experts, "without MoE layers"),
        router=(experts, "without MoE layers"),
        expert_rows=(experts, "without MoE layers"),
        expert_fc1=(experts, "without MoE layers"),
        shared_experts=(model.shared_width, "without shared experts"),
        latent_rows=(model.latent_width, "without model.latent_width"),
    )
    there, why = needs.get(name, (True, ""))
    if there and waves and name in ("experts", *_OF_ROWS):
        return "on parallel.waves, of which no rows are kept"
    return "" if there else why


def _stash_problems(config: RunConfig) -> list[str]:
    memory, problems = config.memory, []
    if memory.stash and not config.model.num_moe_layers:
        problems.append("memory.stash has no effect without MoE layers")
    if set(memory.stash) & set(memory.recompute):
        problems.append("memory: `experts` are in stash and in recompute, but what a stash has isn't computed again")
    if memory.stash and (rows := sorted({*memory.recompute, *memory.offload} & {*_OF_ROWS})):
        problems.append(f"memory: {rows} are in the stash already; leave them out of recompute and offload")
    if memory.stash and (recipe := resolve(config.precision).experts) and recipe.name != "fp8_block":
        problems.append(
            f"memory.stash: experts in {recipe.name} keep codes along tokens, which a stash of rows can't hold: use fp8_block"
        )
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
