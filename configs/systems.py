"""Published training systems as presets: the model, batch and GPUs of a public report, laid out as moex can.

Compiled for their GPUs, never run. Sources of models, batches and GPUs: arXiv 2603.07685 table 11, Megatron-Bridge's
performance pages, arXiv 2504.14960; layouts are moex's own, without pipeline stages and multi-token prediction.
"""

import dataclasses
from typing import Literal

from configs import deepseek, qwen3
from configs.gpt_oss import gpt_oss_20b
from moex.config import MemoryConfig, ModelConfig, OptimizerConfig, ParallelConfig, RunConfig, TrainConfig
from moex.models.families import deepseek_v3, mixtral


def deepseek_v3_256xh100() -> RunConfig:
    """DeepSeek-V3 without multi-token prediction, 671B, on 256 H100s. Compiled, never run.

    With the moments on the device as well it needs 81 of 80 GB.
    """
    parallel = _routed(tp=2, ep=64, zero=3)
    config = _system("deepseek_v3_256xh100", deepseek.deepseek_v3().model, parallel, batch_size=8192, accumulation=64)
    return dataclasses.replace(config, memory=dataclasses.replace(config.memory, optimizer="host"))


def deepseek_v3_1024xh100() -> RunConfig:
    """DeepSeek-V3 without multi-token prediction, 671B, on 1024 H100s. Compiled, never run."""
    parallel = _routed(ep=64, zero=3)
    return _system("deepseek_v3_1024xh100", deepseek.deepseek_v3().model, parallel, batch_size=8192, accumulation=8)


def deepseek_v3_256xgb200() -> RunConfig:
    """DeepSeek-V3 without multi-token prediction, 671B, on 256 GB200s, in BF16. Compiled, never run."""
    parallel = _routed(ep=64, zero=3)
    return _system("deepseek_v3_256xgb200", deepseek.deepseek_v3().model, parallel, batch_size=4096, accumulation=16)


def deepseek_v3_256xgb300() -> RunConfig:
    """DeepSeek-V3 without multi-token prediction, 671B, on 256 GB300s, in BF16. Compiled, never run."""
    parallel = _routed(ep=64, zero=3)
    return _system("deepseek_v3_256xgb300", deepseek.deepseek_v3().model, parallel, batch_size=8192, accumulation=16)


def kimi_k2_256xgb300() -> RunConfig:
    """Kimi-K2, 1.04T parameters, on 256 GB300s, in BF16. Compiled, never run."""
    parallel = _routed(ep=64, zero=3)
    return _system("kimi_k2_256xgb300", _kimi_k2_model(), parallel, batch_size=4096, accumulation=16)


def qwen3_235b_256xh100() -> RunConfig:
    """Qwen3-235B-A22B on 256 H100s. Compiled, never run."""
    parallel = _routed(ep=32, zero=3)
    return _system("qwen3_235b_256xh100", qwen3.qwen3_235b_a22b().model, parallel, batch_size=2048, accumulation=8)


def qwen3_235b_256xgb200() -> RunConfig:
    """Qwen3-235B-A22B on 256 GB200s, in BF16. Compiled, never run."""
    parallel = _routed(ep=64, zero=1)
    return _system("qwen3_235b_256xgb200", qwen3.qwen3_235b_a22b().model, parallel, batch_size=3072, accumulation=12)


def qwen3_235b_128k_128xh100() -> RunConfig:
    """Qwen3-235B-A22B on 128 H100s in rows of 131,072 tokens. Compiled, never run."""
    return _long_qwen3_235b("qwen3_235b_128k_128xh100", seq_len=131_072, cp=32, batch_size=1024)


def qwen3_235b_256k_256xh100() -> RunConfig:
    """Qwen3-235B-A22B on 256 H100s in rows of 262,144 tokens. Compiled, never run."""
    return _long_qwen3_235b("qwen3_235b_256k_256xh100", seq_len=262_144, cp=64, batch_size=512)


def qwen3_30b_16xh100() -> RunConfig:
    """Qwen3-30B-A3B on 16 H100s. Compiled, never run."""
    parallel = _routed(ep=16, zero=1)
    return _system("qwen3_30b_16xh100", qwen3.qwen3_30b_a3b().model, parallel, batch_size=1024, accumulation=64)


def mixtral_8x22b_128xh100() -> RunConfig:
    """Mixtral 8x22B on 128 H100s. Compiled, never run."""
    parallel = _routed(ep=8, zero=3)
    return _system("mixtral_8x22b_128xh100", mixtral_8x22b_model(), parallel, batch_size=256, accumulation=2)


def gpt_oss_120b_64xh100() -> RunConfig:
    """GPT-OSS-120B on 64 H100s. Compiled, never run."""
    parallel = _routed(ep=8, zero=3)
    return _system("gpt_oss_120b_64xh100", _gpt_oss_120b_model(), parallel, batch_size=512, accumulation=8)


SYSTEMS = {
    deepseek_v3_256xh100: "h100:256",
    deepseek_v3_1024xh100: "h100:1024",
    deepseek_v3_256xgb200: "gb200:256",
    deepseek_v3_256xgb300: "gb300:256",
    kimi_k2_256xgb300: "gb300:256",
    qwen3_235b_256xh100: "h100:256",
    qwen3_235b_256xgb200: "gb200:256",
    qwen3_235b_128k_128xh100: "h100:128",
    qwen3_235b_256k_256xh100: "h100:256",
    qwen3_30b_16xh100: "h100:16",
    mixtral_8x22b_128xh100: "h100:128",
    gpt_oss_120b_64xh100: "h100:64",
}
"""Preset -> the GPUs it is laid out for, as `python -m moex.plan --gpus` takes them."""


def _routed(*, ep: int, zero: Literal[1, 3], tp: int = 1, **more) -> ParallelConfig:
    """Static cells of the balanced size with a spill: what doesn't fit is run again with larger ones."""
    return ParallelConfig(
        ep=ep, zero=zero, tp=tp, transport="alltoall", cell_factor=1.0, spill_factor=0.35, row_factor=1.25, **more
    )


def _long_qwen3_235b(name: str, *, seq_len: int, cp: int, batch_size: int) -> RunConfig:
    """One row at a time for each `cp` GPUs: its four key-value heads are traded among four neighbours, by NVLink, and keys
    pass round a ring of those. Positions are stretched from 32,768 by YaRN, as the model's card says for 131,072.
    """
    model = qwen3.qwen3_235b_a22b().model
    rope = dataclasses.replace(model.attention.rope, factor=seq_len / 32_768, original_context=32_768)
    model = dataclasses.replace(model, attention=dataclasses.replace(model.attention, rope=rope))
    parallel = _routed(ep=32, zero=3, cp=cp, context="hierarchical", ulysses=4)
    return _system(name, model, parallel, batch_size=batch_size, accumulation=batch_size // 4, seq_len=seq_len)


def _system(
    name: str, model: ModelConfig, parallel: ParallelConfig, *, batch_size: int, accumulation: int, seq_len: int = 4096
) -> RunConfig:
    return RunConfig(
        name=name,
        model=model,
        parallel=parallel,
        train=TrainConfig(steps=100_000, batch_size=batch_size, accumulation=accumulation, seq_len=seq_len),
        optimizer=OptimizerConfig(peak_lr=2e-4, final_lr=2e-5, warmup_steps=2000),
        memory=MemoryConfig(recompute=("layer",)),
    )


def _kimi_k2_model() -> ModelConfig:
    """DeepSeek-V3's architecture with more and sparser experts, half the heads, no groups (arXiv 2507.20534)."""
    model = deepseek_v3(
        vocab_size=163_840, d_model=7168, num_layers=61, num_dense_layers=1, dense_width=18_432, expert_width=2048,
        shared_width=2048, num_heads=64, nope_dim=128, rope_dim=64, value_dim=128, q_latent_dim=1536, kv_latent_dim=512,
        num_experts=384, top_k=8, num_groups=1, top_groups=1, aux_coefficient=1e-4,
    )  # fmt: skip
    return dataclasses.replace(model, router=dataclasses.replace(model.router, scaling_factor=2.827))


def _gpt_oss_120b_model() -> ModelConfig:
    """The smaller GPT-OSS with more layers and experts, 117B (openai/gpt-oss-120b's config.json)."""
    model = gpt_oss_20b().model
    return dataclasses.replace(model, num_layers=36, router=dataclasses.replace(model.router, num_experts=128))


def mixtral_8x22b_model() -> ModelConfig:
    """The published shape, 141B (arXiv 2401.04088; sizes of its model card)."""
    return mixtral(
        vocab_size=32_768, d_model=6144, num_layers=56, expert_width=16_384, num_heads=48, num_kv_heads=8, head_dim=128,
        num_experts=8, top_k=2,
    )  # fmt: skip
