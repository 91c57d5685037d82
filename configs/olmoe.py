"""OLMoE."""

from moex.config import MemoryConfig, OptimizerConfig, ParallelConfig, RunConfig, TrainConfig
from moex.models.families import from_public


def olmoe_1b_7b() -> RunConfig:
    """6.9B parameters, 1.3B a token; sizes as in allenai/OLMoE-1B-7B-0924's config.json. Traced, not run."""
    public = dict(
        model_type="olmoe", vocab_size=50_304, hidden_size=2048, num_hidden_layers=16, num_attention_heads=16,
        num_key_value_heads=16, intermediate_size=1024, num_experts=64, num_experts_per_tok=8, norm_topk_prob=False,
        rms_norm_eps=1e-5, rope_theta=10_000.0, router_aux_loss_coef=0.01, tie_word_embeddings=False,
    )  # fmt: skip
    return RunConfig(
        name="olmoe_1b_7b",
        model=from_public(public),
        parallel=ParallelConfig(zero=3),
        train=TrainConfig(steps=100_000, batch_size=1024, accumulation=1, seq_len=4096),
        optimizer=OptimizerConfig(peak_lr=4e-4, final_lr=4e-5, warmup_steps=2000),
        memory=MemoryConfig(recompute=("layer",)),
    )
