"""Presets: functions that return a run's configuration; one file a model family, names say model and hardware."""

from collections.abc import Callable

from configs.deepseek import deepseek_v3, tiny_deepseek
from configs.glm import glm_4_5_air
from configs.gpt_oss import gpt_oss_20b
from configs.mixtral import mixtral_8x7b
from configs.olmoe import olmoe_1b_7b
from configs.qwen3 import qwen3_30b_a3b, qwen3_235b_a22b
from configs.systems import SYSTEMS
from configs.tiny import tiny
from moex.config import RunConfig

PRESETS: dict[str, Callable[[], RunConfig]] = {
    f.__name__: f
    for f in (
        tiny,
        tiny_deepseek,
        mixtral_8x7b,
        qwen3_30b_a3b,
        qwen3_235b_a22b,
        olmoe_1b_7b,
        gpt_oss_20b,
        glm_4_5_air,
        deepseek_v3,
        *SYSTEMS,
    )
}

GPUS: dict[str, str] = {f.__name__: gpus for f, gpus in SYSTEMS.items()}
"""Presets that are laid out for certain GPUs, which `python -m moex.plan` takes when it is given no others."""
