"""Model families as configurations: what a family fixes, with the sizes left to the caller.

Mixtral (arXiv 2401.04088), Qwen3-MoE (arXiv 2505.09388), DeepSeek-V3 (arXiv 2412.19437).
"""

from moex.config import AttentionConfig, ModelConfig, RopeConfig, RouterConfig


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
