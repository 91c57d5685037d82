"""Model families as configurations: what a family fixes, with the sizes left to the caller or to a public `config.json`.

Mixtral (arXiv 2401.04088), Qwen2-MoE (arXiv 2407.10671), Qwen3-MoE (arXiv 2505.09388), DeepSeek-V2 (arXiv 2405.04434),
DeepSeek-V3 (arXiv 2412.19437) and Kimi-K2 (arXiv 2507.20534), GPT-OSS (arXiv 2508.10925), OLMoE (arXiv 2409.02060), GLM-4.5
(arXiv 2508.06471).
"""

from collections.abc import Mapping
from typing import Any

from moex.config import AttentionConfig, ModelConfig, RopeConfig, RouterConfig
from moex.models import parts, public
from moex.models.public import Family


def mixtral(*, num_heads: int, num_kv_heads: int, head_dim: int, num_experts: int, top_k: int, **sizes) -> ModelConfig:
    """Softmax over the chosen experts, every layer sparse, no shared expert."""
    return ModelConfig(
        norm_eps=1e-5,
        attention=AttentionConfig(
            num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, rope=RopeConfig(theta=1e6)
        ),
        router=RouterConfig(num_experts=num_experts, top_k=top_k, aux_coefficient=0.02),
        **sizes,
    )


def qwen3_moe(
    *, num_heads: int, num_kv_heads: int, head_dim: int, num_experts: int, top_k: int, **sizes
) -> ModelConfig:
    """Like Mixtral, with RMSNorm of query and key heads and many narrow experts."""
    return ModelConfig(
        attention=AttentionConfig(
            num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, qk_norm=True, rope=RopeConfig(theta=1e6)
        ),
        router=RouterConfig(num_experts=num_experts, top_k=top_k, aux_coefficient=0.001),
        **sizes,
    )


def deepseek_v3(
    *,
    num_heads: int,
    nope_dim: int,
    rope_dim: int,
    value_dim: int,
    q_latent_dim: int,
    kv_latent_dim: int,
    num_experts: int,
    top_k: int,
    num_groups: int,
    top_groups: int,
    rope: RopeConfig = RopeConfig(interleaved=True),  # noqa: B008 (frozen)
    aux_coefficient: float = 0.0,
    **sizes,
) -> ModelConfig:
    """Latent attention; sigmoid scores whose balance a bias keeps; groups ranked by their best two; a shared expert."""
    return ModelConfig(
        attention=AttentionConfig(
            kind="mla",
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=nope_dim,
            rope_dim=rope_dim,
            value_dim=value_dim,
            q_latent_dim=q_latent_dim,
            kv_latent_dim=kv_latent_dim,
            rope=rope,
        ),
        router=RouterConfig(
            num_experts=num_experts,
            top_k=top_k,
            score_function="sigmoid",
            scaling_factor=2.5,
            num_groups=num_groups,
            top_groups=top_groups,
            group_score_top=2,
            aux_coefficient=aux_coefficient,
            bias_rate=1e-3,
        ),
        **sizes,
    )


_Table = dict[str, Any]
_COMMON: _Table = dict(
    vocab_size="vocab_size", hidden_size="d_model", num_hidden_layers="num_layers", rms_norm_eps="norm_eps",
    tie_word_embeddings="tie_embeddings", initializer_range="init_std", num_attention_heads="attention.num_heads",
    num_experts_per_tok="router.top_k",
)  # fmt: skip
_USUAL: _Table = dict(tie_word_embeddings=False, initializer_range=0.02, router_aux_loss_coef=0.0)
_PLAIN: _Table = dict(hidden_act=("silu",), attention_dropout=(0.0,), pretraining_tp=(None, 1), mlp_bias=(None, False))
_AUX: _Table = dict(router_aux_loss_coef="router.aux_coefficient")


def _family(
    architecture: str, *members: public.Part, fields: _Table, usual: _Table | None = None, fixed: _Table | None = None,
    only: _Table | None = None,
) -> Family:  # fmt: skip
    return Family(
        architecture=architecture, fields=_COMMON | fields, usual=_USUAL | (usual or {}), fixed=fixed or {},
        only=_PLAIN | (only or {}), parts=members,
    )  # fmt: skip


def _qwen(architecture: str, *members: public.Part, fields: _Table, **rest) -> Family:
    own = dict(
        num_experts="router.num_experts", moe_intermediate_size="expert_width", intermediate_size="dense_width",
        norm_topk_prob="router.renormalize",
    )  # fmt: skip
    every = parts.ROPE, parts.QWEN_LAYERS, *members
    return _family(architecture, *every, fields=_AUX | own | fields, **rest)


_LATENT_FIELDS: _Table = dict(
    num_key_value_heads="attention.num_kv_heads", qk_nope_head_dim="attention.head_dim",
    qk_rope_head_dim="attention.rope_dim", v_head_dim="attention.value_dim",
    kv_lora_rank="attention.kv_latent_dim", first_k_dense_replace="num_dense_layers", intermediate_size="dense_width",
    moe_intermediate_size="expert_width", n_routed_experts="router.num_experts", norm_topk_prob="router.renormalize",
    routed_scaling_factor="router.scaling_factor",
)  # fmt: skip
_SIGMOID: _Table = {"router.score_function": "sigmoid", "router.bias_rate": 1e-3, "router.aux_coefficient": 0.0}

FAMILIES: dict[str, Family] = dict(
    mixtral=_family(
        "MixtralForCausalLM", parts.ROPE, parts.HEAD_DIM, parts.WINDOW,
        fields=_AUX | dict(
            num_key_value_heads="attention.num_kv_heads", num_local_experts="router.num_experts",
            intermediate_size="expert_width",
        ),
        only=dict(router_jitter_noise=(0.0,)),
    ),
    qwen2_moe=_qwen(
        "Qwen2MoeForCausalLM", parts.WIDE_HEADS,
        fields=dict(
            num_key_value_heads="attention.num_kv_heads", shared_expert_intermediate_size="shared_width",
            qkv_bias="attention.bias",
        ),
        usual=dict(qkv_bias=True, norm_topk_prob=False), fixed=dict(shared_gate=True),
    ),
    qwen3_moe=_qwen(
        "Qwen3MoeForCausalLM",
        fields={"num_key_value_heads": "attention.num_kv_heads", "head_dim": "attention.head_dim"},
        usual=dict(norm_topk_prob=False), fixed={"attention.qk_norm": True}, only=dict(attention_bias=(False,)),
    ),
    olmoe=_family(
        "OlmoeForCausalLM", parts.ROPE, parts.WIDE_HEADS,
        fields=_AUX | dict(
            num_key_value_heads="attention.num_kv_heads", num_experts="router.num_experts",
            intermediate_size="expert_width", norm_topk_prob="router.renormalize",
        ),
        usual=dict(norm_topk_prob=False), fixed={"attention.qk_norm": True, "attention.qk_norm_joint": True},
        only=dict(clip_qkv=(None,), attention_bias=(False,)),
    ),
    gpt_oss=_family(
        "GptOssForCausalLM", parts.ROPE, parts.LAYER_TYPES,
        fields=_AUX | dict(
            num_key_value_heads="attention.num_kv_heads", head_dim="attention.head_dim", swiglu_limit="swiglu_limit",
            swiglu_alpha="swiglu_alpha", num_local_experts="router.num_experts", intermediate_size="expert_width",
        ),
        usual=dict(swiglu_limit=7.0, swiglu_alpha=ModelConfig.swiglu_alpha),
        fixed={
            "attention.bias": True, "attention.out_bias": True, "attention.sinks": True, "expert_bias": True,
            "router.logit_bias": True,
        },
        only=dict(attention_bias=(True,)),
    ),
    deepseek_v2=_family(
        "DeepseekV2ForCausalLM", parts.DEEPSEEK_ROPE, parts.LATENT_HEADS, parts.SHARED_EXPERTS, parts.V2_GROUPS,
        parts.SEQUENCE_AUX,
        fields=_LATENT_FIELDS,
        usual=dict(first_k_dense_replace=0, norm_topk_prob=False, routed_scaling_factor=1.0),
        fixed={"attention.kind": "mla", "attention.rope.interleaved": True},
        only=dict(
            attention_bias=(False,), moe_layer_freq=(1,), scoring_func=("softmax",), norm_topk_prob=(False,),
        ),
    ),
    deepseek_v3=_family(
        "DeepseekV3ForCausalLM", parts.DEEPSEEK_ROPE, parts.LATENT_HEADS, parts.SHARED_EXPERTS, parts.V3_GROUPS,
        parts.SEQUENCE_AUX,
        fields=_LATENT_FIELDS | dict(rope_interleave="attention.rope.interleaved"),
        usual=dict(rope_interleave=True), fixed=_SIGMOID | {"attention.kind": "mla"},
        only=dict(
            attention_bias=(False,), moe_layer_freq=(1,), scoring_func=("sigmoid",), topk_method=("noaux_tc",),
        ),
    ),
    glm4_moe=_family(
        "Glm4MoeForCausalLM", parts.PARTIAL_ROPE, parts.SHARED_EXPERTS, parts.V3_GROUPS,
        fields=dict(
            num_key_value_heads="attention.num_kv_heads", head_dim="attention.head_dim", attention_bias="attention.bias",
            use_qk_norm="attention.qk_norm", first_k_dense_replace="num_dense_layers", intermediate_size="dense_width",
            moe_intermediate_size="expert_width", n_routed_experts="router.num_experts",
            norm_topk_prob="router.renormalize", routed_scaling_factor="router.scaling_factor",
        ),
        usual=dict(use_qk_norm=False, attention_bias=False), fixed=_SIGMOID,
    ),
)  # fmt: skip
"""By the public `model_type`."""

_SAME_AS: dict[str, str] = dict(kimi_k2="deepseek_v3")
"""Other names of a family."""


def from_public(values: Mapping[str, Any]) -> ModelConfig:
    """The configuration that a public `config.json` describes.

    Raises ValueError for a family that isn't here, and for a field that is missing, has an unsupported value, or is not
    known and so might change the mathematics.
    """
    name = family_name(values)
    try:
        return public.read(FAMILIES[name], values)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    except (TypeError, ZeroDivisionError, OverflowError) as error:
        raise ValueError(f"{name}: config.json has a number of the wrong type or size: {error}") from error


def family_name(values: Mapping[str, Any]) -> str:
    """Key into `FAMILIES`."""
    name = values.get("model_type")
    name = _SAME_AS.get(name, name) if isinstance(name, str) else None
    if name not in FAMILIES:
        raise ValueError(
            f"config.json: model_type={values.get('model_type')!r} is none of {', '.join([*FAMILIES, *_SAME_AS])}"
        )
    return name


def to_public(model: ModelConfig, name: str = "") -> dict[str, Any]:
    """A public configuration of the model: of the named family, or of the first that can express all of it.

    Raises ValueError that says, for each family tried, what it has no way to say.
    """
    reasons = []
    for family in [name] if name else FAMILIES:
        try:
            return public.write(FAMILIES[family], family, model)
        except ValueError as error:
            reasons.append(f"{family}: {error}")
    raise ValueError("no public family has this model:\n" + "\n".join(reasons))
