"""Which kinds of layers follow each other, cut into scans: each runs the layers of one period some times."""

from typing import NamedTuple

from moex.config import ModelConfig, PrecisionConfig


class Kind(NamedTuple):
    """What is static of a layer.  sparse: it has experts.  window: its attention's sliding window, 0 for none.  high: it
    computes in the compute dtype, whatever the recipes.
    """

    sparse: bool
    window: int
    high: bool = False

    @property
    def stack(self) -> str:
        """The stack of parameters that the layer is in."""
        return "moe_layers" if self.sparse else "dense_layers"

    @property
    def own_stack(self) -> str:
        """Its name after `parted`."""
        return f"{self.stack}_high" if self.high else self.stack


class Segment(NamedTuple):
    """Layers that one scan runs: those of `period`, one after the other, `repeats` times."""

    period: tuple[Kind, ...]
    repeats: int


def kinds(config: ModelConfig, precision: PrecisionConfig | None = None) -> tuple[Kind, ...]:
    """Of all layers in order."""
    sparse, num = set(config.sparse_layers), config.num_layers
    first, last = (precision.high_first, precision.high_last) if precision else (0, 0)
    high = lambda i: i < first or i >= num - last
    return tuple(Kind(i in sparse, config.window(i), high(i)) for i in range(num))


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
