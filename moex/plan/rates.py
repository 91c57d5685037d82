"""How fast a GPU does what a compiled step asks of it: data-sheet peaks times achievable shares, each stated."""

import dataclasses

from mesh.topology import Accelerator
from moex.plan.collectives import Collective
from moex.plan.costs import Cost


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shares:
    """What part of a peak is taken to be reached. A plan prints them; `--calibrate` judges them.

    matmul, kernel: of tensor-core FLOP/s, in XLA's products and in grouped kernels.  memory: of HBM bytes/s.  nvlink,
    network: of a direction's bytes/s.  launch_s: least time of a kernel.  message_s: least time of a collective, for each
    doubling of its group.
    """

    matmul: float = 0.65
    kernel: float = 0.45
    memory: float = 0.80
    nvlink: float = 0.75
    network: float = 0.80
    launch_s: float = 3e-6
    message_s: float = 8e-6

    def reasons(self) -> dict[str, str]:
        """Field -> where its value is from."""
        return dict(
            matmul="large BF16 products by cuBLAS on H100 reach 600 to 700 of 989 TFLOP/s",
            kernel="published grouped matmuls of Mosaic reach 390 to 460 of 989 TFLOP/s on H100",
            memory="elementwise kernels reach 75 to 85 % of HBM",
            nvlink="DeepEP's 153 to 158 GB/s of 160, NCCL's rings about 75 % of the data sheet's direction",
            network="DeepEP's 43 to 58 GB/s with 50 GB/s adapters and data sent once a node; NCCL about 80 %",
            launch_s="start and end of a CUDA kernel",
            message_s="NCCL's latency of small collectives, by hops of a tree",
        )


DEFAULT = Shares()


def compute_s(cost: Cost, gpu: Accelerator, shares: Shares) -> float:
    """Seconds of one kernel by the roofline: the longer of its products and its memory traffic, never under a launch."""
    peak = {"f8": gpu.fp8_flops or gpu.bf16_flops, "f32": gpu.bf16_flops / 2}.get(cost.format, gpu.bf16_flops)
    products = cost.flops / (peak * (shares.kernel if cost.kernel else shares.matmul))
    traffic = cost.num_bytes / (gpu.memory_bytes_per_s * shares.memory)
    return max(products, traffic, shares.launch_s)


def collective_s(collective: Collective, gpu: Accelerator, shares: Shares) -> float:
    """Seconds of one collective by itself: the slower of its links, which work at the same time, and its latency."""
    if collective.groups.size <= 1:
        return shares.launch_s
    nvlink = collective.nvlink_bytes / (gpu.nvlink_bytes_per_s * shares.nvlink)
    network = collective.network_bytes / (gpu.network_bytes_per_s * shares.network)
    return max(nvlink, network) + shares.message_s * max(1, (collective.groups.size - 1).bit_length())
