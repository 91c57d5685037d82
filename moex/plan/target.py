"""The GPUs that a plan is for: `h100:1024`, or `gb200:256:64` to say how many of them share an NVLink domain."""

import dataclasses
from pathlib import Path

from mesh.topology import ACCELERATORS, Accelerator
from moex.validate import ConfigError

KINDS = {
    "a100": "NVIDIA A100-SXM4-80GB",
    "h100": "NVIDIA H100 80GB HBM3",
    "h200": "NVIDIA H200",
    "b200": "NVIDIA B200",
    "gb200": "NVIDIA GB200",
    "gb300": "NVIDIA GB300",
}
"""Name on the command line -> JAX's device kind, by which `mesh.topology` lists figures."""

_FOLDER = Path(__file__).parent / "targets"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """name: a key of `KINDS`.  domain: GPUs that reach each other over NVLink; device i lies in domain i // domain."""

    name: str
    num_gpus: int
    domain: int

    @property
    def accelerator(self) -> Accelerator:
        return ACCELERATORS[KINDS[self.name]]

    @property
    def gpus_per_host(self) -> int:
        return min(self.accelerator.gpus_per_host, self.num_gpus)

    @property
    def usable_bytes(self) -> float:
        """The decimal gigabytes of the data sheet: 5 to 6 % less than the driver reports, which CUDA, NCCL and the
        allocator's gaps have.
        """
        return self.accelerator.memory_bytes

    @property
    def description(self) -> str:
        """XLA's description of the GPU, a `xla.GpuTargetConfigProto` as text."""
        return (_FOLDER / f"{self.name}.txtpb").read_text()

    def __str__(self) -> str:
        return f"{self.num_gpus} x {self.name.upper()}, {self.domain} in an NVLink domain"


def parse_target(text: str) -> Target:
    """Reads KIND:COUNT[:GPUS_PER_NVLINK_DOMAIN].

    Without the third number it is that of the reference system; where the run has more GPUs than that, the largest power
    of two in it, since a job's groups are powers of two and a scheduler hands out such blocks of a rack (64 of an NVL72).

    Raises ConfigError naming what is wrong.
    """
    name, *numbers = text.lower().split(":")
    if name not in KINDS:
        raise ConfigError(f"--gpus {text}: no GPU {name!r}; known are {', '.join(KINDS)}, as in h100:1024")
    if not 1 <= len(numbers) <= 2 or not all(n.isdecimal() and int(n) for n in numbers):
        raise ConfigError(
            f"--gpus {text}: must read KIND:COUNT or KIND:COUNT:GPUS_PER_NVLINK_DOMAIN, as in gb200:256:64"
        )
    num_gpus = int(numbers[0])
    listed = ACCELERATORS[KINDS[name]].nvlink_domain
    domain = int(numbers[1]) if len(numbers) == 2 else listed
    if len(numbers) == 1 and num_gpus > domain:
        domain = 1 << (domain.bit_length() - 1)
    if domain > listed:
        raise ConfigError(f"--gpus {text}: {domain} GPUs in an NVLink domain, but {name.upper()} systems have {listed}")
    return Target(name=name, num_gpus=num_gpus, domain=min(domain, num_gpus))
