"""Figures of GPUs by JAX's device kind: what a roofline or an MFU is measured against.

Dense peaks without sparsity. Sources: NVIDIA's data sheets of A100 (2021), H100 and H200 (2024), DGX B200 and
GB200 / GB300 NVL72 (2025). NVLink is one direction of one GPU.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One GPU: FLOP/s in BF16 and FP8 (0: the format isn't supported), bytes and bytes/s of memory, NVLink bytes/s."""

    bf16_flops: float
    fp8_flops: float
    memory_bytes: float
    memory_bytes_per_s: float
    nvlink_bytes_per_s: float
    nvlink_domain: int


_A100 = dict(bf16_flops=312e12, fp8_flops=0.0, nvlink_bytes_per_s=300e9, nvlink_domain=8)
_HOPPER = dict(bf16_flops=989e12, fp8_flops=1979e12, nvlink_bytes_per_s=450e9, nvlink_domain=8)
_BLACKWELL = dict(nvlink_bytes_per_s=900e9)

ACCELERATORS = {
    "NVIDIA A100-SXM4-40GB": Accelerator(memory_bytes=40e9, memory_bytes_per_s=1.555e12, **_A100),
    "NVIDIA A100-SXM4-80GB": Accelerator(memory_bytes=80e9, memory_bytes_per_s=2.039e12, **_A100),
    "NVIDIA H100 80GB HBM3": Accelerator(memory_bytes=80e9, memory_bytes_per_s=3.35e12, **_HOPPER),
    "NVIDIA H200": Accelerator(memory_bytes=141e9, memory_bytes_per_s=4.8e12, **_HOPPER),
    "NVIDIA B200": Accelerator(
        bf16_flops=2250e12,
        fp8_flops=4500e12,
        memory_bytes=180e9,
        memory_bytes_per_s=8e12,
        nvlink_domain=8,
        **_BLACKWELL,
    ),
    "NVIDIA GB200": Accelerator(
        bf16_flops=2500e12,
        fp8_flops=5000e12,
        memory_bytes=186e9,
        memory_bytes_per_s=8e12,
        nvlink_domain=72,
        **_BLACKWELL,
    ),
    "NVIDIA GB300": Accelerator(
        bf16_flops=2500e12,
        fp8_flops=5000e12,
        memory_bytes=279e9,
        memory_bytes_per_s=8e12,
        nvlink_domain=72,
        **_BLACKWELL,
    ),
}


def peak_flops(device_kind: str) -> float | None:
    """BF16 FLOP/s of one device, the denominator of MFU; None where no peak is listed (CPUs, unknown GPUs)."""
    known = ACCELERATORS.get(device_kind)
    return known.bf16_flops if known else None
