"""Mixtral."""

from moex.config import MemoryConfig, OptimizerConfig, ParallelConfig, RunConfig, TrainConfig
from moex.models.families import mixtral


def mixtral_8x7b() -> RunConfig:
    """46.7B parameters, 12.9B a token. Traced at scale, not run."""
    return RunConfig(
        name="mixtral_8x7b",
        model=mixtral(
            vocab_size=32_000,
            d_model=4096,
            num_layers=32,
            expert_width=14_336,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            num_experts=8,
            top_k=2,
        ),
        parallel=ParallelConfig(zero=3),
        train=TrainConfig(steps=100_000, batch_size=256, accumulation=1, seq_len=4096),
        optimizer=OptimizerConfig(peak_lr=3e-4, final_lr=3e-5, warmup_steps=2000),
        memory=MemoryConfig(recompute=("layer",)),
    )
