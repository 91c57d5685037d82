"""Tile sizes of the grouped matmul."""

import dataclasses

from pallas_kernels.warpgroups import STAGED_BYTES, check


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """rows: rows of one group multiplied at a time. A group's last tile may be partly empty.

    One default for all shapes, so that bits don't depend on a buffer's size. Measured by benchmarks/grouped_matmul.py on
    a CPU: 64 and 128 are alike where groups are large, 64 wastes less where they are small.
    """

    rows: int = 64

    def __post_init__(self):
        if self.rows < 1:
            raise ValueError(f"Tiles.rows={self.rows} must be at least 1")


STEP = 64
"""Numbers of the summed dim that the Hopper kernels multiply at a time: 128 bytes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HopperConfig:
    """How the Hopper kernels cut their work: output tiles of 128 rows, 64 for each of two warpgroups.

    columns: of an output tile, 128 or 256.
    stages: slots of the ring of operands in shared memory.
    width: output tiles across which blocks walk together; their weights stay in the L2 cache.
    num_sms: blocks, each on one multiprocessor, that share the tiles.
    """

    columns: int = 256
    stages: int = 4
    width: int = 8
    num_sms: int = 132

    def __post_init__(self):
        if self.columns not in (128, 256):
            raise ValueError(f"HopperConfig.columns={self.columns} must be 128 or 256")
        check(self, "columns", "stages")

    @property
    def shared_bytes(self) -> int:
        """Operands of every stage, both warpgroups' staging areas, barriers."""
        return self.stages * (2 * STEP * (128 + self.columns) + 2 * 8) + 2 * 64 * STAGED_BYTES

    @classmethod
    def of(cls, columns: int) -> "HopperConfig":
        """The default for a result of so many columns, a multiple of 128: the widest tile that divides it."""
        return cls() if columns % 256 == 0 else cls(columns=128, stages=6)
