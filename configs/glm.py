"""GLM-4.5."""

from moex.config import MemoryConfig, OptimizerConfig, ParallelConfig, RunConfig, TrainConfig
from moex.models.families import from_public


def glm_4_5_air() -> RunConfig:
    """106B parameters, 12B a token; sizes as in zai-org/GLM-4.5-Air's config.json, without its MTP layer. Traced, not run."""
    public = dict(
        model_type="glm4_moe", vocab_size=151_552, hidden_size=4096, num_hidden_layers=46, num_attention_heads=96,
        num_key_value_heads=8, head_dim=128, attention_bias=True, use_qk_norm=False, partial_rotary_factor=0.5,
        intermediate_size=10_944, moe_intermediate_size=1408, n_routed_experts=128, n_shared_experts=1,
        num_experts_per_tok=8, first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=1.0, n_group=1,
        topk_group=1, rms_norm_eps=1e-5, rope_theta=1_000_000, tie_word_embeddings=False,
    )  # fmt: skip
    return RunConfig(
        name="glm_4_5_air",
        model=from_public(public),
        parallel=ParallelConfig(zero=3),
        train=TrainConfig(steps=100_000, batch_size=1024, accumulation=1, seq_len=4096),
        optimizer=OptimizerConfig(peak_lr=2e-4, final_lr=2e-5, warmup_steps=2000),
        memory=MemoryConfig(recompute=("layer",)),
    )
