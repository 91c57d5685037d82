"""Qwen3-MoE."""

from moex.config import MemoryConfig, OptimizerConfig, ParallelConfig, RunConfig, TrainConfig
from moex.models.families import qwen3_moe


def qwen3_30b_a3b() -> RunConfig:
    """30.5B parameters, 3.3B a token. Traced at scale, not run."""
    return RunConfig(
        name="qwen3_30b_a3b",
        model=qwen3_moe(
            vocab_size=151_936,
            d_model=2048,
            num_layers=48,
            expert_width=768,
            num_heads=32,
            num_kv_heads=4,
            head_dim=128,
            num_experts=128,
            top_k=8,
        ),
        parallel=ParallelConfig(zero=3),
        train=TrainConfig(steps=100_000, batch_size=1024, accumulation=1, seq_len=4096),
        optimizer=OptimizerConfig(peak_lr=3e-4, final_lr=3e-5, warmup_steps=2000),
        memory=MemoryConfig(recompute=("layer",)),
    )


def qwen3_235b_a22b() -> RunConfig:
    """235B parameters, 22B a token. Traced at scale, not run."""
    return RunConfig(
        name="qwen3_235b_a22b",
        model=qwen3_moe(
            vocab_size=151_936,
            d_model=4096,
            num_layers=94,
            expert_width=1536,
            num_heads=64,
            num_kv_heads=4,
            head_dim=128,
            num_experts=128,
            top_k=8,
        ),
        parallel=ParallelConfig(zero=3),
        train=TrainConfig(steps=100_000, batch_size=1024, accumulation=4, seq_len=4096),
        optimizer=OptimizerConfig(peak_lr=2e-4, final_lr=2e-5, warmup_steps=2000),
        memory=MemoryConfig(recompute=("layer",)),
    )
