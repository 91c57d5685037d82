"""What of precision contradicts itself or has no effect."""

from mesh import Fold
from moex.config import ModelConfig, RunConfig
from moex.precision.products import missing_hardware
from moex.precision.recipes import KINDS, resolve


def _there(model: ModelConfig) -> dict[str, int]:
    """Kinds of products: above 0 for those that the model has."""
    counts = dict(mlp=model.num_mlp_layers, shared=model.shared_width, experts=model.num_moe_layers)
    return dict(attention=model.num_layers) | counts


def precision_problems(config: RunConfig) -> list[str]:
    precision, model, problems = config.precision, config.model, []
    there = _there(model)
    for kind, number in there.items():
        if (name := getattr(precision, kind)) != "recipe" and not number:
            problems.append(f"precision.{kind}={name} has no effect: the model has no such products")
    for kind in KINDS:
        if getattr(precision, kind) == precision.recipe:
            problems.append(f"precision.{kind}={precision.recipe} is precision.recipe already: leave it at recipe")
    if precision.wire != "compute" and (config.parallel.transport == "local" or not model.num_moe_layers):
        problems.append(f"precision.wire={precision.wire} has no effect with transport local: no row travels")
    if precision.wire != "compute" and model.expert_in_width % 128:
        problems.append(
            f"precision.wire={precision.wire} has a scale for 128 numbers of a row: model.d_model={model.d_model} (or "
            "latent_width) must be a multiple of 128; set it to compute"
        )
    if (recipe := resolve(precision).experts) and (model.expert_bias or model.swiglu_limit):
        problems.append(
            f"precision.experts: {recipe.name} knows no biases and no clamped SwiGLU, which model.expert_bias and "
            "model.swiglu_limit ask for: set it to compute"
        )
    used = [recipe for kind in KINDS if (recipe := resolve(precision).recipe(kind)) and there[kind]]
    taken = [kind for kind in KINDS if there[kind] and getattr(precision, kind) == "recipe"]
    if precision.recipe != "compute" and not taken:
        problems.append(f"precision.recipe={precision.recipe} has no effect: each kind of product has one of its own")
    if precision.gather == "codes" and not used:
        problems.append("precision.gather=codes has no effect without a recipe: set it to compute")
    if precision.gather == "codes" and (two := {recipe.name for recipe in used if not recipe.one_copy}):
        problems.append(
            f"precision.gather=codes: {', '.join(sorted(two))} needs a weight's codes along both dims, 2.06 bytes a number "
            "where BF16 has 2: set it to compute"
        )
    high, layers = precision.high_first + precision.high_last, model.num_layers
    if min(precision.high_first, precision.high_last) < 0 or high > layers:
        problems.append(
            f"precision.high_first={precision.high_first} and high_last={precision.high_last} must not be negative, and "
            f"together at most model.num_layers={layers}"
        )
    if high and not used:
        problems.append("precision.high_first and high_last have no effect without a recipe")
    if used and high == layers:
        problems.append(
            f"precision.high_first={precision.high_first} and high_last={precision.high_last} are all {layers} layers: no "
            "recipe has an effect; leave the recipes at compute"
        )
    if high and config.parallel.zero != 3 and config.parallel.pp > 1:
        problems.append(
            "precision.high_first and high_last need parallel.zero=3 with pp above 1: a stage's weights enter in one way"
        )
    if high and config.memory.stash:
        problems.append("memory.stash keeps rows of one kind: set precision.high_first and high_last to 0")
    if precision.emulate and not used:
        problems.append("precision.emulate has no effect without a recipe")
    return problems


def precision_problems_on(config: RunConfig, folded: Fold, device_kind: str) -> list[str]:
    """Recipes whose tiles don't fill an expert's part of this mesh, or that this kind of device has no hardware for."""
    precision, model, problems = resolve(config.precision), config.model, []
    there = _there(model)
    on_gpu = device_kind.startswith("NVIDIA") and not config.precision.emulate
    if (recipe := precision.experts) and model.num_moe_layers and on_gpu:
        width = model.expert_width // folded.size("etp")
        if model.expert_in_width % recipe.tile or width % recipe.tile:
            problems.append(
                f"precision.experts: kernels of {recipe.name} have tiles of {recipe.tile}: model.d_model={model.d_model} (or "
                f"latent_width) and expert_width / etp={width} must be multiples of it; set it to compute"
            )
    for kind in KINDS:
        recipe = precision.recipe(kind)
        if recipe and there[kind] and not config.precision.emulate:
            reason = missing_hardware(recipe, device_kind, grouped=kind == "experts")
            problems += [f"precision.{kind}: {reason}; choose another, or set precision.emulate"] * bool(reason)
    return problems
