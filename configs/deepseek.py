"""DeepSeek-V3, and its architecture small enough for a CPU."""

from moex.config import MemoryConfig, OptimizerConfig, ParallelConfig, PrecisionConfig, RunConfig, TrainConfig
from moex.models import families
from moex.models.families import deepseek_v3 as architecture


def deepseek_v3() -> RunConfig:
    """671B parameters, 37B a token; sizes as in deepseek-ai/DeepSeek-V3's config.json, without MTP. Traced, not run."""
    public = dict(
        model_type="deepseek_v3", vocab_size=129_280, hidden_size=7168, num_hidden_layers=61, num_attention_heads=128,
        num_key_value_heads=128, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, intermediate_size=18_432, moe_intermediate_size=2048, n_routed_experts=256, n_shared_experts=1,
        num_experts_per_tok=8, first_k_dense_replace=3, norm_topk_prob=True, routed_scaling_factor=2.5, n_group=8,
        topk_group=4, rms_norm_eps=1e-6, rope_theta=10_000, tie_word_embeddings=False,
        rope_scaling=dict(
            type="yarn", factor=40, original_max_position_embeddings=4096, beta_fast=32, beta_slow=1, mscale=1.0,
            mscale_all_dim=1.0,
        ),
    )  # fmt: skip
    return RunConfig(
        name="deepseek_v3",
        model=families.from_public(public | dict(aux_loss_alpha=1e-4, seq_aux=True)),
        parallel=ParallelConfig(zero=3),
        train=TrainConfig(steps=100_000, batch_size=4096, accumulation=4, seq_len=4096),
        optimizer=OptimizerConfig(peak_lr=2.2e-4, final_lr=2.2e-5, warmup_steps=2000),
        memory=MemoryConfig(recompute=("layer",)),
    )


def tiny_deepseek() -> RunConfig:
    """Latent attention, one dense layer, 16 experts in 4 groups, a shared expert, bias balancing; on one CPU. Run: yes."""
    return RunConfig(
        name="tiny_deepseek",
        model=architecture(
            d_model=128,
            num_layers=4,
            num_dense_layers=1,
            dense_width=512,
            expert_width=96,
            shared_width=96,
            init_std=0.06,
            num_heads=4,
            nope_dim=32,
            rope_dim=16,
            value_dim=32,
            q_latent_dim=64,
            kv_latent_dim=48,
            num_experts=16,
            top_k=4,
            num_groups=4,
            top_groups=2,
            aux_coefficient=1e-4,
        ),
        train=TrainConfig(steps=300, batch_size=8, seq_len=256),
        optimizer=OptimizerConfig(peak_lr=4e-3, final_lr=2e-4, warmup_steps=30),
        precision=PrecisionConfig(compute_dtype="float32"),
    )
