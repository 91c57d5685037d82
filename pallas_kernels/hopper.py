"""Where the kernels for NVIDIA's Hopper GPUs run."""

import re

from pallas_kernels import compat

_KIND = re.compile(r"NVIDIA G?H(20|100|200|800)\b")


def unavailable(kind: str | None = None) -> str:
    """Why a kernel for sm_90a cannot run on devices of a kind, or, without one, on what is compiled for; "" where it can.

    It runs on a Hopper GPU, compiles for the described one of an ambient abstract mesh, and runs on any back end inside
    `plgpu.force_gpu_interpret_mode`.
    """
    if kind is None and compat.interpreting():
        return ""
    kind = kind or compat.device_kind()
    return "" if _KIND.match(kind) else f"its Mosaic GPU kernel is for Hopper GPUs, this device is {kind!r}"
