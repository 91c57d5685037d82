"""Figures of GPUs by JAX's device kind: what a roofline or an MFU is measured against.

Dense peaks without sparsity. Sources: NVIDIA's data sheets of A100 (2021), H100 and H200 (2024), DGX B200 and
GB200 / GB300 NVL72 (2025). NVLink is one direction of one GPU; so is the network, of the adapter that the reference systems
give each GPU (ConnectX-6 200 Gb/s in DGX A100, ConnectX-7 400 Gb/s in DGX H100, H200, B200 and GB200, ConnectX-8 800 Gb/s
in GB300). So is the way to the host's memory: 16 lanes of PCIe 4.0 (A100) or 5.0, and of NVLink-C2C's 450 GB/s of a Grace the
half, since two GPUs share it.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One GPU: FLOP/s in BF16 and FP8 (0: the format isn't supported), bytes and bytes/s of memory, NVLink, network and host
    bytes/s; how many of them one NVLink domain and one host have.
    """

    bf16_flops: float
    fp8_flops: float
    memory_bytes: float
    memory_bytes_per_s: float
    nvlink_bytes_per_s: float
    network_bytes_per_s: float
    host_bytes_per_s: float
    nvlink_domain: int
    gpus_per_host: int


_DGX = dict(nvlink_domain=8, gpus_per_host=8)
_A100 = dict(
    bf16_flops=312e12, fp8_flops=0.0, nvlink_bytes_per_s=300e9, network_bytes_per_s=25e9, host_bytes_per_s=32e9, **_DGX
)  # fmt: skip
_HOPPER = dict(
    bf16_flops=989e12, fp8_flops=1979e12, nvlink_bytes_per_s=450e9, network_bytes_per_s=50e9, host_bytes_per_s=64e9, **_DGX
)  # fmt: skip
_NVL72 = dict(
    bf16_flops=2500e12,
    fp8_flops=5000e12,
    memory_bytes_per_s=8e12,
    nvlink_bytes_per_s=900e9,
    host_bytes_per_s=225e9,
    nvlink_domain=72,
    gpus_per_host=4,
)

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
        nvlink_bytes_per_s=900e9,
        network_bytes_per_s=50e9,
        host_bytes_per_s=64e9,
        **_DGX,
    ),
    "NVIDIA GB200": Accelerator(memory_bytes=186e9, network_bytes_per_s=50e9, **_NVL72),
    "NVIDIA GB300": Accelerator(memory_bytes=279e9, network_bytes_per_s=100e9, **_NVL72),
}


def peak_flops(device_kind: str) -> float | None:
    """BF16 FLOP/s of one device, the denominator of MFU; None where no peak is listed (CPUs, unknown GPUs)."""
    known = ACCELERATORS.get(device_kind)
    return known.bf16_flops if known else None
