"""Which layers a stage runs, and where they stand among what all stages compile.

P ranks, V chunks of a rank (virtual stages), N slots of a chunk. Stage = chunk P + rank. Every rank runs the same program,
so a chunk is a list of slots, each of one kind of layer; a stage has a layer in some of them, and passes the others by.
"""

import functools
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moex.models.pattern import Kind, Segment, segments


class Layout(NamedTuple):
    """stages: numbers of the layers of each, in order.  slots: kinds.  layer_PVN: the layer in a slot, -1 for none.
    place_N: number of a slot among those of its stack.  segments: the slots cut into scans.
    """

    stages: tuple[tuple[int, ...], ...]
    slots: tuple[Kind, ...]
    layer_PVN: np.ndarray
    place_N: np.ndarray
    segments: tuple[Segment, ...]

    @property
    def live_PVN(self) -> np.ndarray:
        """bool, the slot holds a layer."""
        return self.layer_PVN >= 0

    @property
    def idle(self) -> float:
        """Share of slots without a layer: time in which a stage waits for others."""
        return 1 - float(self.live_PVN.mean())

    def parts(self) -> np.ndarray:
        """bool [P, V, segments], a stage has layers in the segment."""
        ends = np.cumsum([len(s.period) * s.repeats for s in self.segments])
        return np.stack([x.any(axis=-1) for x in np.split(self.live_PVN, ends[:-1], axis=-1)], axis=-1)

    def size(self, stack: str) -> int:
        """Slots of a chunk that are of a stack."""
        return sum(kind.stack == stack for kind in self.slots)

    def order(self, stack: str, kinds: Sequence[Kind]) -> np.ndarray:
        """int [P, V n]: number within its stack of the layer in each of the stack's slots, chunk by chunk, -1 for none."""
        number, seen = np.full(len(kinds) + 1, -1), 0
        for layer, kind in enumerate(kinds):
            if kind.stack == stack:
                number[layer], seen = seen, seen + 1
        mine = np.array([kind.stack == stack for kind in self.slots])
        return number[self.layer_PVN[..., mine]].reshape(self.layer_PVN.shape[0], -1)


def layout(kinds: Sequence[Kind], num_ranks: int, chunks: int, text: str = "", *, mtp_depth: int = 0) -> Layout:
    """Places the layers.

    text: of `read_stages`; without one stages get equally many layers, the first ones one more where they don't divide.
    Raises ValueError as `read_stages` does, and for more stages than layers.
    """
    num_stages, num_layers = num_ranks * chunks, len(kinds)
    if text:
        sizes = read_stages(text, num_stages, num_layers, mtp_depth)
    elif num_stages > num_layers:
        raise ValueError(f"{num_layers} layers don't fill {num_ranks} x {chunks} = {num_stages} stages")
    else:
        sizes = [num_layers // num_stages + (stage < num_layers % num_stages) for stage in range(num_stages)]
    ends = np.cumsum(sizes)
    stages = tuple(tuple(range(end - size, end)) for size, end in zip(sizes, ends.tolist(), strict=True))
    slots: tuple[Kind, ...] = ()
    for stage in stages:
        slots = _shortest_with_both(slots, tuple(kinds[layer] for layer in stage))
    layer_PVN = np.full((num_ranks, chunks, len(slots)), -1)
    for number, stage in enumerate(stages):
        at = 0
        for layer in stage:  # the first slot of its kind that is left: all later ones stay within reach
            at = slots.index(kinds[layer], at)
            layer_PVN[number % num_ranks, number // num_ranks, at] = layer
            at += 1
    places = [[kind.stack for kind in slots[:i]].count(slot.stack) for i, slot in enumerate(slots)]
    return Layout(stages, slots, layer_PVN, np.array(places), tuple(segments(slots)))


def read_stages(text: str, num_stages: int, num_layers: int, mtp_depth: int = 0) -> list[int]:
    """Numbers of layers of stages written as Megatron-Core writes them (--pipeline-model-parallel-layout).

    E embedding, t a layer, m a depth of multi-token prediction, L the loss, | ends a stage; x*n repeats a letter or a group
    in brackets: `Et*3|(tt|)*29m|L`. E comes first, the m and L last; what they stand for is split over all stages wherever
    they stand, so that a stage of these alone runs no layer.

    Raises ValueError, with the numbers, for another form, and for letters that aren't the model's.
    """
    if bad := sorted(set(text) - set("EtmL|()*0123456789")):
        raise ValueError(f"layout {text!r} has {''.join(bad)!r}: it is written with E, t, m, L, |, brackets and *n")
    plain, group = text, re.compile(r"(?:\(([^()*]*)\)|([EtmL|]))\*(\d+)|\(([^()*]*)\)")
    while (longer := group.sub(_repeated, plain)) != plain:
        plain = longer
        if len(plain) > 10_000:
            raise ValueError(f"layout {text!r} is longer than any model")
    expected = "E" + "t" * num_layers + "m" * mtp_depth + "L"
    if re.search(r"[^EtmL|]", plain) or plain.replace("|", "") != expected:
        raise ValueError(
            f"layout {text!r} reads {plain!r}; without | it must be E, {num_layers} t, {mtp_depth} m and L, which are the "
            "model's embedding, layers, depths of multi-token prediction and loss"
        )
    stages = plain.split("|")
    if len(stages) != num_stages:
        raise ValueError(f"layout {text!r} has {len(stages)} stages, but pp x virtual_pp is {num_stages}")
    return [stage.count("t") for stage in stages]


def _repeated(match: re.Match) -> str:
    in_group, letter, times, alone = match.groups()
    return alone if alone is not None else (in_group if letter is None else letter) * int(times)


def _shortest_with_both(a: tuple[Kind, ...], b: tuple[Kind, ...]) -> tuple[Kind, ...]:
    """A shortest list of slots that holds both, each in its order."""

    @functools.cache
    def rest(i: int, j: int) -> tuple[Kind, ...]:
        if i == len(a) or j == len(b):
            return a[i:] + b[j:]
        if a[i] == b[j]:
            return (a[i], *rest(i + 1, j + 1))
        return min((a[i], *rest(i + 1, j)), (b[j], *rest(i, j + 1)), key=len)

    return rest(0, 0)
