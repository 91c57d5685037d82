"""Tiles and pipeline depth of the grouped matmul of block-scaled float8 numbers."""

import dataclasses

import jax.numpy as jnp

from pallas_kernels.warpgroups import STAGED_BYTES, check

BLOCK = 128
"""Numbers that share a scale, along the summed dim; also the sum that tensor cores make before it is added in float32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the Hopper kernels cut their work.

    columns: output columns of a tile, 128 or 256; its rows are 128, 64 for each of two warpgroups. 256 read a quarter less
    from the L2 cache, which a tile of 128 x 128 would ask for more than it gives.
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
            raise ValueError(f"Config.columns={self.columns} must be 128 or 256")
        check(self, "columns", "stages")

    @property
    def shared_bytes(self) -> int:
        """Operands of every stage, both warpgroups' staging areas, barriers."""
        return self.stages * (BLOCK * (BLOCK + self.columns) + 2 * 8) + 2 * 64 * STAGED_BYTES

    @classmethod
    def of(cls, columns: int, out_dtype) -> "Config":
        """The default for so many columns: 256 at a time, where they fit and a bfloat16 result leaves the registers."""
        wide = columns % 256 == 0 and jnp.dtype(out_dtype) == jnp.bfloat16
        return cls() if wide else cls(columns=128, stages=6)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradConfig:
    """How the Hopper kernel of the weight gradient cuts its work: output tiles of 128 x 128; the rest as in `Config`."""

    stages: int = 7
    width: int = 8
    num_sms: int = 132

    def __post_init__(self):
        check(self, "stages")

    @property
    def shared_bytes(self) -> int:
        """Two operands of every stage, and barriers."""
        return self.stages * (2 * BLOCK * BLOCK + 2 * 8)
