"""Rows of a split: windows of its text, or whole documents packed together; both read by row number.

R rows, S tokens of a row, n rows that are read, T tokens of a shard.
"""

import itertools
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from moex.data.packing import Packing, pack
from moex.data.tokens import Tokens

PADDING_ID = -1  # number of a row that only fills a batch


class Rows(Protocol):
    """num_rows: R.  describe: in words, for messages."""

    num_rows: int
    seq_len: int

    def read(self, ids: np.ndarray) -> dict[str, np.ndarray]: ...

    def describe(self) -> str: ...


def arrays_of(num_rows: int, seq_len: int) -> dict[str, np.ndarray]:
    """What a row is, filled with padding: [n, S] arrays.

    tokens int32: the inputs; 0 where there is none (padding).
    labels int32: the token after each input, of whatever document; 0 past the end.
    mask bool: whether the label counts in the loss: it exists, belongs to the input's document, and is to be learned.
    segments int32: number of the document within its row, from 1; 0 is padding.
    positions int32: offset from the document's first token in this row (a row may cut documents); 0 at padding.
    """
    shape = num_rows, seq_len
    ints = {name: np.zeros(shape, np.int32) for name in ("tokens", "labels", "segments", "positions")}
    return ints | {"mask": np.zeros(shape, bool)}


class _InShards:
    """Rows numbered through all shards, those of the first shard first."""

    def __init__(self, shards: Sequence[Tokens], seq_len: int, counts: Sequence[int]):
        self.shards, self.seq_len = tuple(shards), seq_len
        self._firsts = np.cumsum([0, *counts])
        self.num_rows = int(self._firsts[-1])

    def read(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        """The arrays of `arrays_of` for rows `ids` [n]; a negative id is a row of padding.  Raises ValueError past R."""
        ids = np.asarray(ids, np.int64)
        if np.max(ids, initial=PADDING_ID) >= self.num_rows:
            raise ValueError(f"row {np.max(ids)}: there are {self.num_rows}, numbered from 0 ({self.describe()})")
        out = arrays_of(len(ids), self.seq_len)
        shard_of = np.searchsorted(self._firsts, ids, side="right") - 1
        for at, (row, shard) in enumerate(zip(ids.tolist(), shard_of.tolist(), strict=True)):
            if row >= 0:
                one = {name: array[at] for name, array in out.items()}
                self._fill(one, shard, row - int(self._firsts[shard]))
        return out

    def _fill(self, row: dict[str, np.ndarray], shard: int, number: int) -> None:
        raise NotImplementedError

    def describe(self) -> str:
        raise NotImplementedError


class Windows(_InShards):
    """The text cut every S tokens: row w of a shard holds tokens w S to w S + S, and as labels those one further.

    Windows overlap by that one token, so over an epoch every token is an input exactly once and a label at most once; a
    shard's last window is padded, not dropped.
    """

    def __init__(self, shards: Sequence[Tokens], seq_len: int):
        super().__init__(shards, seq_len, [-(-len(shard) // seq_len) for shard in shards])

    def describe(self) -> str:
        total = sum(len(shard) for shard in self.shards)
        return f"{total} tokens, {self.num_rows} windows of seq_len={self.seq_len}"

    def _fill(self, row: dict[str, np.ndarray], shard: int, number: int) -> None:
        tokens, first = self.shards[shard], number * self.seq_len
        size = min(self.seq_len, len(tokens) - first)
        inside = np.searchsorted(tokens.starts, [first + 1, first + size], side="left")
        # A document that starts at the row's first token needs no mark; empty ones share their start with the next.
        cuts = np.unique(tokens.starts[inside[0] : inside[1]]) - first
        bounds = [0, *cuts.tolist(), size]
        _copy(row, tokens, first, size, bounds, last_label=_goes_on(tokens, first + size))


class Packed(_InShards):
    """Whole documents, as `pack` puts them together.  num_padding: tokens of an epoch that are none.

    packings: of each shard into lanes of `lane_len` tokens, in place of rows: a row is seq_len / lane_len of them side by
    side. Without, all documents in rows.
    """

    def __init__(self, shards: Sequence[Tokens], seq_len: int, *, packings: Sequence[Packing] = (), lane_len: int = 0):
        self.lane_len = lane_len or seq_len
        self._packings = packings or [pack(shard.starts, seq_len) for shard in shards]
        self._lanes = seq_len // self.lane_len
        super().__init__(shards, seq_len, [-(-packing.num_rows // self._lanes) for packing in self._packings])
        self.num_tokens = sum(int(packing.length_P.sum()) for packing in self._packings)
        self.num_padding = self.num_rows * seq_len - self.num_tokens

    def describe(self) -> str:
        return f"{self.num_tokens} tokens packed into {self.num_rows} rows of seq_len={self.seq_len}"

    def _fill(self, row: dict[str, np.ndarray], shard: int, number: int) -> None:
        tokens, packing = self.shards[shard], self._packings[shard]
        lanes = range(number * self._lanes, min((number + 1) * self._lanes, packing.num_rows))
        pieces = [(lane, piece) for lane in lanes for piece in range(*packing.row_R[lane : lane + 2])]
        at, before = 0, lanes.start
        for segment, (lane, piece) in enumerate(pieces, 1):
            if lane != before:
                at, before = (lane - lanes.start) * self.lane_len, lane
            first, size = int(packing.first_P[piece]), int(packing.length_P[piece])
            part = {name: array[at : at + size] for name, array in row.items()}
            _copy(part, tokens, first, size, [0, size], last_label=_goes_on(tokens, first + size), segment=segment)
            at += size


def _goes_on(tokens: Tokens, at: int) -> bool:
    """Whether the token at `at` exists and belongs to the document of the one before."""
    return at < len(tokens) and tokens.starts[np.searchsorted(tokens.starts, at)] != at


def _copy(
    row: dict[str, np.ndarray], tokens: Tokens, first: int, size: int, bounds: list[int], *, last_label: bool,
    segment: int = 1,
) -> None:  # fmt: skip
    """Writes tokens first to first + size and what goes with them; documents begin at bounds[:-1], numbered from
    `segment`.
    """
    stored = tokens.read(first, first + size + 1)
    row["tokens"][:size], row["labels"][: len(stored) - 1] = stored[:size], stored[1:]
    mask = row["mask"]
    mask[:size] = True
    for number, (begin, end) in enumerate(itertools.pairwise(bounds), segment):
        row["segments"][begin:end] = number
        row["positions"][begin:end] = np.arange(end - begin)
        mask[end - 1] = False
    mask[size - 1] = last_label
    if tokens.learned is not None:
        learned = tokens.learned[first + 1 : first + size + 1]
        mask[: len(learned)] &= learned != 0
