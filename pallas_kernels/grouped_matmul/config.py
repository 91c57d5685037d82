"""Tile sizes of the grouped matmul and how they are chosen.  R rows, E groups, K and N the matrix dims."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """rows: rows of one group multiplied at a time. A group's last tile may be partly empty."""

    rows: int = 128

    def __post_init__(self):
        if self.rows < 1:
            raise ValueError(f"Tiles.rows={self.rows} must be at least 1")


def choose(num_rows: int, num_groups: int) -> Tiles:
    """Tiles for the XLA path: 128 rows, fewer where groups are smaller on average, never more than there are rows.

    Measured in benchmarks/grouped_matmul.py: below 64 rows a tile pays more in overhead than it saves in padding.
    """
    mean = num_rows // max(num_groups, 1)
    return Tiles(rows=max(1, min(128 if mean >= 128 else 64, num_rows)))
