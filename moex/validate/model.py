"""What of a model's shape contradicts itself."""

from moex.config import AttentionConfig, ModelConfig, RopeConfig, RouterConfig, RunConfig
from moex.layers.router import check_router
from moex.validate.numbers import negative, not_above_zero


def model_problems(config: RunConfig) -> list[str]:
    model, a = config.model, config.model.attention
    problems = []
    try:
        check_router(model.router)
    except ValueError as error:
        problems.append(f"model.router: {error}")
    positive = dict(
        vocab_size=model.vocab_size, vocab_multiple=model.vocab_multiple, d_model=model.d_model,
        num_layers=model.num_layers, expert_width=model.expert_width, moe_every=model.moe_every,
    )  # fmt: skip
    problems += [f"model.{name}={value} must be at least 1" for name, value in positive.items() if value < 1]
    problems += not_above_zero("model", init_std=model.init_std) + negative("model", norm_eps=model.norm_eps)
    problems += negative(
        "model", dense_width=model.dense_width, shared_width=model.shared_width, latent_width=model.latent_width,
        swiglu_limit=model.swiglu_limit, swiglu_alpha=model.swiglu_alpha,
    )  # fmt: skip
    problems += not_above_zero("model.attention", head_dim=a.head_dim) + negative(
        "model.attention", sliding_window=a.sliding_window, q_latent_dim=a.q_latent_dim, soft_cap=a.soft_cap
    )
    problems += not_above_zero("model.attention.rope", theta=a.rope.theta)
    if not a.rope.factor >= 1:
        problems.append(f"model.attention.rope.factor={a.rope.factor} must be at least 1, which leaves YaRN out")
    if not 0 <= model.num_dense_layers <= model.num_layers:
        problems.append(
            f"model.num_dense_layers={model.num_dense_layers} must lie between 0 and num_layers={model.num_layers}"
        )
    problems += _attention_problems(a) + _ffn_problems(model)
    if a.num_heads < 1 or a.num_kv_heads < 1 or a.num_heads % a.num_kv_heads:
        problems.append(
            f"model.attention.num_heads={a.num_heads} must be a multiple of num_kv_heads={a.num_kv_heads}: every key-value "
            "head serves the same number of query heads"
        )
    latent = {name: getattr(a, name) for name in ("kv_latent_dim", "rope_dim", "value_dim")}
    if a.kind == "mla" and (missing := [name for name, value in latent.items() if value < 1]):
        problems.append(f"model.attention.kind=mla needs {missing} above 0")
    if a.kind == "mla" and (a.num_kv_heads != a.num_heads or a.value_dim > a.head_dim + a.rope_dim or a.qk_norm):
        problems.append(
            f"model.attention.kind=mla: num_kv_heads={a.num_kv_heads} must equal num_heads={a.num_heads}, value_dim="
            f"{a.value_dim} be at most head_dim + rope_dim={a.head_dim + a.rope_dim}, and qk_norm be off"
        )
    only_mla = dict(kv_latent_dim=a.kv_latent_dim, value_dim=a.value_dim, q_latent_dim=a.q_latent_dim)
    if a.kind == "gqa" and (extra := [name for name, value in only_mla.items() if value]):
        problems.append(f"model.attention: {extra} have no effect with kind=gqa; set them to 0 or kind to mla")
    if a.kind == "gqa" and not 0 <= a.rope_dim <= a.head_dim:
        problems.append(
            f"model.attention.rope_dim={a.rope_dim} must lie between 0, which rotates all, and head_dim={a.head_dim}"
        )
    rotated = a.rope_dim if a.kind == "mla" else a.rope_dim or a.head_dim
    if rotated % 2:
        problems.append(f"model.attention: the rotated width {rotated} must be even")
    router = model.router
    problems += not_above_zero("model.router", scaling_factor=router.scaling_factor)
    problems += negative(
        "model.router",
        aux_coefficient=router.aux_coefficient, sequence_coefficient=router.sequence_coefficient,
        global_coefficient=router.global_coefficient, z_coefficient=router.z_coefficient, bias_rate=router.bias_rate,
        capacity_factor=router.capacity_factor, forced_skew=router.forced_skew,
    )  # fmt: skip
    problems += _router_problems(router)
    if router.renormalize and router.top_k == 1 and router.score_function == "softmax" and model.num_moe_layers:
        problems.append(
            "model.router: top_k=1 with softmax and renormalize gives every token the weight 1, so the router learns "
            "nothing from the loss; set model.router.renormalize to False"
        )
    return problems


def _attention_problems(a: AttentionConfig) -> list[str]:
    """Settings of attention that contradict each other or have no effect."""
    problems, path = [], "model.attention"
    only_gqa = dict(bias=a.bias, out_bias=a.out_bias, sinks=a.sinks)
    if a.kind == "mla" and (on := [name for name, value in only_gqa.items() if value]):
        problems.append(f"{path}: {on} are for kind=gqa; latent attention has none of them")
    if a.qk_norm_joint and not a.qk_norm:
        problems.append(f"{path}.qk_norm_joint has no effect without qk_norm")
    if a.window_pattern and not a.sliding_window:
        problems.append(f"{path}.window_pattern={a.window_pattern} has no effect with sliding_window=0")
    if a.window_pattern and (set(a.window_pattern) - {0, 1} or 1 not in a.window_pattern):
        problems.append(
            f"{path}.window_pattern={a.window_pattern} must be of 1 (a layer with the window) and 0 (without), with a 1 in it"
        )
    yarn = dict(
        original_context=a.rope.original_context, beta_fast=a.rope.beta_fast, beta_slow=a.rope.beta_slow,
        mscale=a.rope.mscale, mscale_all_dim=a.rope.mscale_all_dim, truncate=a.rope.truncate,
    )  # fmt: skip
    if a.rope.factor == 1 and (on := [name for name, value in yarn.items() if value != getattr(RopeConfig, name)]):
        problems.append(f"{path}.rope: {on} have no effect with factor=1, which leaves YaRN out")
    return problems


def _ffn_problems(model: ModelConfig) -> list[str]:
    """Settings of dense MLPs and experts that have no effect."""
    problems = []
    of_experts = dict(
        shared_width=model.shared_width, shared_gate=model.shared_gate, expert_bias=model.expert_bias,
        swiglu_limit=model.swiglu_limit, latent_width=model.latent_width,
    )  # fmt: skip
    if model.num_moe_layers == 0 and (on := [f"{name}={value}" for name, value in of_experts.items() if value]):
        problems.append(f"model: {', '.join(on)} have no effect without MoE layers; set them to 0")
    if model.mtp_depth < 0 or (model.mtp_depth and not model.num_moe_layers):
        problems.append(f"model.mtp_depth={model.mtp_depth} must be at least 0, and needs MoE layers")
    if model.mtp_coefficient != ModelConfig.mtp_coefficient and not model.mtp_depth:
        problems.append(f"model.mtp_coefficient={model.mtp_coefficient} has no effect with mtp_depth=0")
    problems += negative("model", mtp_coefficient=model.mtp_coefficient)
    if model.shared_gate and not model.shared_width:
        problems.append("model.shared_gate has no effect with shared_width=0")
    if model.swiglu_alpha != ModelConfig.swiglu_alpha and not model.swiglu_limit:
        problems.append(f"model.swiglu_alpha={model.swiglu_alpha} has no effect with swiglu_limit=0")
    return problems


def _router_problems(router: RouterConfig) -> list[str]:
    """Settings of routing that contradict each other or have no effect."""
    problems, path = [], "model.router"
    if not 0 <= router.jitter < 1:
        problems.append(f"{path}.jitter={router.jitter} must be at least 0 and below 1: inputs are scaled by 1 -+ it")
    if not 0 <= router.quantile_decay < 1:
        problems.append(f"{path}.quantile_decay={router.quantile_decay} must be at least 0 and below 1")
    losses = dict(
        aux_coefficient=router.aux_coefficient, sequence_coefficient=router.sequence_coefficient,
        global_coefficient=router.global_coefficient,
    )  # fmt: skip
    if router.selection != "top_k" and (on := [name for name, value in losses.items() if value]):
        problems.append(
            f"{path}.selection={router.selection} balances by itself, but {on} are above 0: set them to 0, or selection "
            "to top_k"
        )
    if router.selection != "top_k" and router.bias_rate:
        problems.append(
            f"{path}.bias_rate={router.bias_rate} has no effect with selection={router.selection}: set it to 0"
        )
    if router.bias_centred and not router.bias_rate:
        problems.append(f"{path}.bias_centred has no effect with bias_rate=0")
    if router.pad_to_capacity and not router.capacity_factor:
        problems.append(f"{path}.pad_to_capacity needs a capacity: set capacity_factor above 0")
    needs = dict(
        quantile_decay=(router.selection == "quantile", "selection=quantile"),
        capacity_policy=(router.capacity_factor > 0, "capacity_factor above 0"),
        forced_skew=(router.forced == "skew", "forced=skew"),
        group_score_top=(router.num_groups > 1, "num_groups above 1"),
    )
    for name, (there, what) in needs.items():
        if (value := getattr(router, name)) != getattr(RouterConfig, name) and not there:
            problems.append(f"{path}.{name}={value} has no effect without {what}")
    if router.forced and router.jitter:
        problems.append(f"{path}.jitter={router.jitter} has no effect on forced={router.forced} logits: set it to 0")
    return problems
