"""How the Hopper kernels of `permute` cut their work."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """blocks: thread blocks of the grid, each of one warpgroup; they deal the tokens out among themselves.

    A multiple of the GPU's 132 multiprocessors: as many as fit on one side by side hide each other's waiting.
    tokens: tokens that a block has in hand at a time; 0 takes as many as fill its registers best.
    """

    blocks: int = 132 * 4
    tokens: int = 0

    def __post_init__(self):
        if self.blocks < 1 or self.tokens < 0:
            raise ValueError(
                f"permute.Tiles: blocks={self.blocks} must be at least 1, tokens={self.tokens} not negative"
            )
