"""DeepSeek-V3's architecture."""

from moex.config import OptimizerConfig, PrecisionConfig, RunConfig, TrainConfig
from moex.models.families import deepseek_v3


def tiny_deepseek() -> RunConfig:
    """Latent attention, one dense layer, 16 experts in 4 groups, a shared expert, bias balancing; on one CPU. Run: yes."""
    return RunConfig(
        name="tiny_deepseek",
        model=deepseek_v3(
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
