"""A small Mixture-of-Experts model of bytes that trains on a laptop in minutes."""

from moex.config import (
    AttentionConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    RouterConfig,
    RunConfig,
    TrainConfig,
)


def tiny() -> RunConfig:
    """4 layers of 8 experts, top 2, on one CPU. Run: yes, on two cores in under 4 minutes."""
    return RunConfig(
        name="tiny",
        model=ModelConfig(
            d_model=128,
            num_layers=4,
            expert_width=192,
            init_std=0.06,
            attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=64, qk_norm=True),
            router=RouterConfig(num_experts=8, top_k=2, aux_coefficient=0.01),
        ),
        train=TrainConfig(steps=400, batch_size=8, seq_len=256),
        optimizer=OptimizerConfig(peak_lr=4e-3, final_lr=2e-4, warmup_steps=30),
        precision=PrecisionConfig(compute_dtype="float32"),
    )
