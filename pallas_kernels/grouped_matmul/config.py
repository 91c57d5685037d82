"""Tile size of the grouped matmul."""

import dataclasses


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
