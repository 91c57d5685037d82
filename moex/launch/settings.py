"""Environment variables of a run on GPUs, each with its reason. None of them changes the program that was planned."""

import re
from typing import NamedTuple

from moex.plan.target import Target

SAVE_S = 300
"""Seconds from the warning to the end of a job: time to save."""


class Setting(NamedTuple):
    name: str
    value: str
    why: str


def settings(target: Target) -> list[Setting]:
    """For a target: memory, caches, NCCL. XLA's options are the programs' own (`moex.train.xla`)."""
    found = re.search(r"device_memory_size: (\d+)", target.description)
    assert found, "every description has its GPU's memory"
    fraction = target.usable_bytes / int(found[1])
    chosen = [
        Setting(
            "XLA_CLIENT_MEM_FRACTION",
            f"{fraction:.2f}",
            "what a plan counts as usable; the rest is for CUDA, NCCL and its buffers",
        ),
        Setting(
            "JAX_COMPILATION_CACHE_DIR",
            "${MOEX_CACHE:-$PWD/.jax_cache}",
            "a restart finds the step compiled; on a disk that all hosts see",
        ),
        Setting(
            "CUDA_DEVICE_MAX_CONNECTIONS",
            "32",
            "with 1, which other trainers set, kernels and collectives of several streams queue behind each other",
        ),
        Setting("NCCL_DEBUG", "WARN", "a failing link is named instead of a mere timeout"),
        Setting(
            "COORDINATOR_TIMEOUT_S",
            "900",
            "hosts that start late are waited for; then all end with one sentence",
        ),
    ]
    if target.accelerator.nvlink_domain > target.accelerator.gpus_per_host:
        chosen.append(
            Setting(
                "NCCL_MNNVL_ENABLE",
                "1",
                "NVLink reaches beyond a host; without its driver NCCL then fails at the start",
            )
        )
    return chosen


UNSET = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
"""Variables that can hang the start of several processes: gRPC would ask the proxy for the coordinator."""
