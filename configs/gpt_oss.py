"""GPT-OSS."""

from moex.config import MemoryConfig, OptimizerConfig, ParallelConfig, RunConfig, TrainConfig
from moex.models.families import from_public


def gpt_oss_20b() -> RunConfig:
    """20.9B parameters, 4.2B a token with the embedding; sizes as in openai/gpt-oss-20b's config.json. Traced, not run."""
    public = dict(
        model_type="gpt_oss", vocab_size=201_088, hidden_size=2880, num_hidden_layers=24, num_attention_heads=64,
        num_key_value_heads=8, head_dim=64, intermediate_size=2880, num_local_experts=32, num_experts_per_tok=4,
        sliding_window=128, swiglu_limit=7.0, rms_norm_eps=1e-5, rope_theta=150_000, attention_bias=True,
        router_aux_loss_coef=0.001, tie_word_embeddings=False,
        rope_scaling=dict(
            rope_type="yarn", factor=32.0, original_max_position_embeddings=4096, beta_fast=32.0, beta_slow=1.0,
            truncate=False,
        ),
    )  # fmt: skip
    return RunConfig(
        name="gpt_oss_20b",
        model=from_public(public),
        parallel=ParallelConfig(zero=3),
        train=TrainConfig(steps=100_000, batch_size=512, accumulation=1, seq_len=4096),
        optimizer=OptimizerConfig(peak_lr=3e-4, final_lr=3e-5, warmup_steps=2000),
        memory=MemoryConfig(recompute=("layer",)),
    )
