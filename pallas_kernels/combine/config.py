"""How the Hopper kernel of `combine` cuts its work."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """blocks: thread blocks of the grid, each of one warpgroup; they deal the pieces of the tokens' rows out.

    A multiple of the GPU's 132 multiprocessors: as many as fit on one side by side hide each other's waiting.
    columns: of a piece; the largest of columns, columns / 2 … 256 that divides a row is taken.
    """

    blocks: int = 132 * 6
    columns: int = 1024

    def __post_init__(self):
        if self.blocks < 1 or self.columns not in (256, 512, 1024, 2048):
            raise ValueError(
                f"combine.Tiles: blocks={self.blocks} must be at least 1, columns={self.columns} 256, 512, 1024 or 2048"
            )
