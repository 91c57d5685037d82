"""Which kinds of layers follow each other, cut into scans: each runs the layers of one period some times."""

from typing import NamedTuple

from moex.config import ModelConfig


class Kind(NamedTuple):
    """What is static of a layer.  sparse: it has experts.  window: its attention's sliding window, 0 for none."""

    sparse: bool
    window: int

    @property
    def stack(self) -> str:
        """The stack of parameters that the layer is in."""
        return "moe_layers" if self.sparse else "dense_layers"


class Segment(NamedTuple):
    """Layers that one scan runs: those of `period`, one after the other, `repeats` times."""

    period: tuple[Kind, ...]
    repeats: int


def kinds(config: ModelConfig) -> tuple[Kind, ...]:
    """Of all layers in order."""
    sparse = set(config.sparse_layers)
    return tuple(Kind(i in sparse, config.window(i)) for i in range(config.num_layers))


def segments(layers: tuple[Kind, ...]) -> list[Segment]:
    """The cut with the fewest layers to compile: those of all periods together; of several such, the fewest scans."""
    best: list[tuple[int, int, list[Segment]]] = [(0, 0, [])]  # of the last 0, 1, 2 ... layers
    for start in reversed(range(len(layers))):
        found = []
        for size in range(1, len(layers) - start + 1):
            period, end = layers[start : start + size], start + size
            while layers[end : end + size] == period:
                end += size
            compiled, scans, rest = best[len(layers) - end]
            found.append((compiled + size, scans + 1, [Segment(period, (end - start) // size), *rest]))
        best.append(min(found, key=lambda cut: cut[:2]))
    return best[-1][2]
