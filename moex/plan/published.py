"""Published training speeds, and which of them moex can express: what `--calibrate` compares estimates with.

Sources: [F] arXiv 2504.14960 (H100s of Eos, BF16, 4096 tokens, 256 rows a step, capacity 1), [MB] Megatron-Bridge's
performance pages of 2026-07 and -08, [R] arXiv 2603.07685 tables 11 and 20. Speeds are TFLOP/s of a GPU by the model's
formula.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from moex.config import MemoryConfig, ModelConfig, OptimizerConfig, ParallelConfig, RunConfig, TrainConfig
from moex.models.families import deepseek_v3, mixtral, qwen3_moe

_H100_BF16 = 989.0


class Row(NamedTuple):
    """A published run.  tflops: of a GPU.  fold: `fit` to choose constants, `judge` to judge them.  assumed: what the
    source leaves open and is filled in here.
    """

    name: str
    source: str
    gpus: str
    tflops: float
    fold: Literal["fit", "judge"]
    config: Callable[[], RunConfig]
    assumed: str


class Left(NamedTuple):
    """Published runs that moex can't express yet, and the feature that is missing."""

    name: str
    source: str
    missing: str


def _run(name: str, model: ModelConfig, *, rows: int, accumulation: int = 1, **parallel: Any) -> RunConfig:
    buffers: dict[str, Any] = dict(transport="alltoall", cell_factor=1.0, row_factor=1.0)
    return RunConfig(
        name=name,
        model=model,
        parallel=ParallelConfig(**buffers | parallel),
        train=TrainConfig(steps=1000, batch_size=rows, accumulation=accumulation, seq_len=4096),
        optimizer=OptimizerConfig(warmup_steps=10),
        memory=MemoryConfig(recompute=("layer",)),
    )


def _mixtral_8x22b() -> ModelConfig:
    return mixtral(
        vocab_size=32_768, d_model=6144, num_layers=56, expert_width=16_384, num_heads=48, num_kv_heads=8, head_dim=128,
        num_experts=8, top_k=2,
    )  # fmt: skip


def _mixtral_g8t8() -> ModelConfig:
    """Mixtral 8x22B with every expert cut into eight."""
    model = _mixtral_8x22b()
    router = dataclasses.replace(model.router, num_experts=64, top_k=8)
    return dataclasses.replace(model, expert_width=2048, router=router)


def _qwen2_57b() -> ModelConfig:
    """Qwen2-57B-A14B by its model card; its biases of queries, keys and values are left out."""
    model = mixtral(
        vocab_size=151_936, d_model=3584, num_layers=28, expert_width=2560, shared_width=20_480, num_heads=28,
        num_kv_heads=4, head_dim=128, num_experts=64, top_k=8,
    )  # fmt: skip
    return dataclasses.replace(model, router=dataclasses.replace(model.router, renormalize=False))


def _moonlight() -> ModelConfig:
    """Moonlight-16B-A3B by its model card."""
    return deepseek_v3(
        vocab_size=163_840, d_model=2048, num_layers=27, num_dense_layers=1, dense_width=11_264, expert_width=1408,
        shared_width=2816, num_heads=16, nope_dim=128, rope_dim=64, value_dim=128, q_latent_dim=0, kv_latent_dim=512,
        num_experts=64, top_k=6, num_groups=1, top_groups=1,
    )  # fmt: skip


def _qwen3_30b() -> ModelConfig:
    return qwen3_moe(
        vocab_size=151_936, d_model=2048, num_layers=48, expert_width=768, num_heads=32, num_kv_heads=4, head_dim=128,
        num_experts=128, top_k=8,
    )  # fmt: skip


_ROOM: dict[str, float] = dict(spill_factor=0.35, row_factor=1.25)
_WHOLE = "full recompute, one row a GPU at a time"

ROWS = (
    Row(
        "Mixtral 8x22B, FSDP + EP", "F", "h100:128", 0.234 * _H100_BF16, "fit",
        lambda: _run("mixtral_fsdp_ep", _mixtral_8x22b(), rows=256, accumulation=2, zero=3, ep=8, **_ROOM), f"EP 8; {_WHOLE}",
    ),
    Row(
        "Mixtral 8x22B, TP + EP + DP", "F", "h100:128", 0.366 * _H100_BF16, "judge",
        lambda: _run("mixtral_tp_ep_dp", _mixtral_8x22b(), rows=256, accumulation=4, zero=3, tp=2, ep=8),
        "TP 2, EP 8, ZeRO-3 in place of ZeRO-1, which doesn't fit",
    ),
    Row(
        "Mixtral 8x22B G8T8, FSDP + EP", "F", "h100:128", 0.090 * _H100_BF16, "judge",
        lambda: _run("g8t8_fsdp_ep", _mixtral_g8t8(), rows=256, accumulation=2, zero=3, ep=8), f"EP 8; {_WHOLE}",
    ),
    Row(
        "Qwen2-57B-A14B, FSDP + EP", "F", "h100:64", 0.254 * _H100_BF16, "fit",
        lambda: _run("qwen2_fsdp_ep", _qwen2_57b(), rows=256, accumulation=4, zero=3, ep=8), f"EP 8; {_WHOLE}",
    ),
    Row(
        "Qwen2-57B-A14B, TP + EP + DP", "F", "h100:64", 0.231 * _H100_BF16, "judge",
        lambda: _run("qwen2_tp_ep_dp", _qwen2_57b(), rows=256, accumulation=8, zero=1, tp=2, ep=8), "TP 2, EP 8",
    ),
    Row(
        "Qwen3-30B-A3B, all-to-all by NCCL", "MB", "h100:16", 132.9, "fit",
        lambda: _run("qwen3_30b", _qwen3_30b(), rows=1024, accumulation=64, zero=1, ep=16), "as its later rows",
    ),
    Row(
        "Moonlight-16B-A3B", "MB", "h100:8", 77.5, "judge",
        lambda: _run("moonlight", _moonlight(), rows=4, accumulation=1, zero=1, tp=2, ep=8), "4096 tokens: 457 ms a step",
    ),
)  # fmt: skip

LEFT = (
    Left("DeepSeek-V3 on H100, GB200, GB300", "R, MB", "pipeline stages, multi-token prediction; FP8 throughout, MXFP8"),
    Left("Qwen3-235B on H100, GB200, GB300", "R, MB", "pipeline stages; MXFP8; overlap of two micro-batches"),
    Left("Qwen3-235B at 128K", "R", "pipeline stages, MXFP8"),
    Left("Qwen3-30B-A3B with HybridEP, 244 to 299 TFLOP/s", "MB", "one-sided dispatch, overlap of two micro-batches"),
    Left("Qwen3-30B-A3B on GB200, GB300; FP8 on H100", "MB", "MXFP8; FP8 of attention's products"),
    Left("GPT-OSS-120B, Kimi-K2", "MB", "MXFP8, pipeline stages"),
    Left("Nemotron-3", "MB", "state-space layers"),
    Left("Mixtral 8x22B, Qwen2-57B, Llama3-8x70B with MCore and folding", "F", "pipeline stages"),
    Left("Mixtral 8x22B and G8T8 with FSDP alone", "F", "nothing; not compiled here, 4.3 and 2.2 % of peak"),
    Left("16K to 128K tokens", "F", "pipeline stages"),
)  # fmt: skip
