"""How the Hopper kernels of `quantize` cut their work."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """blocks: thread blocks of the grid, each of one warpgroup; they share the tiles out among themselves.

    A multiple of the GPU's 132 multiprocessors: as many as fit on one side by side hide each other's waiting.
    stages: tiles of the input in shared memory, one in use, the others on their way.
    width: tiles below each other that are taken one after the other, so that the pieces of a transposed row that they
      write lie side by side.
    0 for blocks or stages chooses by the input's dtype and by how much a block has to stage.
    """

    blocks: int = 0
    stages: int = 0
    width: int = 8

    def __post_init__(self):
        if self.blocks < 0 or self.stages < 0 or self.width < 1:
            raise ValueError(
                f"quantize.Tiles: blocks={self.blocks} and stages={self.stages} must not be negative, "
                f"width={self.width} at least 1"
            )

    def resolved(self, dtype, *, both: bool) -> "Tiles":
        """With numbers in place of zeros, so that all blocks fit on the GPU at once.

        A block stages 16 KiB of bfloat16 a tile and 8 KiB of codes along rows, twice that in both directions; float32
        takes double. A multiprocessor has 227 KiB and registers for five blocks.
        """
        wide = dtype.itemsize == 4
        blocks = self.blocks or 132 * (2 if both or wide else 4)
        return dataclasses.replace(self, blocks=blocks, stages=self.stages or (1 if both and wide else 2))
