"""Packing: which documents share a row, decided once for the whole corpus, so that a row can be read by its number.

P pieces of documents, R rows of S tokens.
"""

import bisect
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Packing(NamedTuple):
    """Pieces in the order of rows.  first_P: offset of a piece's first token.  length_P.  row_R: [R + 1], row r holds pieces
    row_R[r] to row_R[r + 1].
    """

    first_P: np.ndarray
    length_P: np.ndarray
    row_R: np.ndarray

    @property
    def num_rows(self) -> int:
        return len(self.row_R) - 1


def pack(starts: np.ndarray, seq_len: int) -> Packing:
    """Packs documents into rows of `seq_len` tokens, none cut that fits into a row.

    A longer one is cut into rows of its own and a rest. Pieces go, longest first, to the row with the least room that is
    enough: best-fit decreasing (arXiv 2404.10830), so few tokens are padding and which rows there are depends on nothing
    but the lengths. Empty documents take no place.

    Args: starts int64 [num_docs + 1], offsets of documents and the end.
    """
    first_P, length_P = _pieces(starts, seq_len)
    return _packing(first_P, length_P, best_fit(length_P, seq_len))


def pack_buckets(starts: np.ndarray, lanes: Sequence[int]) -> list[Packing]:
    """Packs documents into lanes of rising lengths, one packing for each: each where the shortest lane that holds it is, or
    in room that longer ones leave in a longer lane.

    From the longest lane down, pieces are packed as `pack` does, and lanes kept that have a piece too long for the next
    shorter lane. Args: starts as in `pack`; lanes, the last as long as a row.
    """
    first_P, length_P = _pieces(starts, lanes[-1])
    found = []
    for lane, shorter in zip(reversed(lanes), [*reversed(lanes[:-1]), 0], strict=True):
        lane_P = best_fit(length_P, lane)
        kept_P = np.isin(lane_P, lane_P[length_P > shorter])
        _, own_P = np.unique(lane_P[kept_P], return_inverse=True)
        found.append(_packing(first_P[kept_P], length_P[kept_P], own_P))
        first_P, length_P = first_P[~kept_P], length_P[~kept_P]
    return found[::-1]


def _packing(first_P: np.ndarray, length_P: np.ndarray, row_P: np.ndarray) -> Packing:
    # Within a row by place in the corpus: neighbours in a file often belong together, and reads go forwards.
    order = np.argsort(row_P, kind="stable")
    num_rows = int(row_P.max(initial=-1)) + 1
    row_R = np.concatenate([[0], np.cumsum(np.bincount(row_P, minlength=num_rows))])
    return Packing(first_P[order], length_P[order], row_R)


def _pieces(starts: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.diff(starts)
    num = -(-lengths // seq_len)
    document = np.repeat(np.arange(len(lengths)), num)
    place = np.arange(len(document)) - np.repeat(np.cumsum(num) - num, num)
    first_P = starts[document] + place * seq_len
    return first_P, np.minimum(starts[document + 1] - first_P, seq_len)


def best_fit(length_P: np.ndarray, capacity: int) -> np.ndarray:
    """The row of each piece, int64 [P], by best-fit decreasing; pieces of one length are placed together.

    Lengths are 1 to `capacity`.
    """
    row_P = np.empty(len(length_P), np.int64)
    room_P = (capacity - length_P).astype(np.min_scalar_type(capacity))  # NumPy sorts 16 bits in a fifth of the time
    order = np.argsort(room_P, kind="stable")
    rooms_left, begins = np.unique(room_P[order], return_index=True)
    ends = np.append(begins, len(order))[1:]
    room: dict[int, list[np.ndarray]] = {}  # rows that have this many tokens left
    rooms: list[int] = []  # its keys, sorted
    num_rows = 0
    for length, begin, end in zip(
        (capacity - rooms_left.astype(np.int64)).tolist(), begins.tolist(), ends.tolist(), strict=True
    ):
        pieces = order[begin:end]
        while len(pieces):
            at = bisect.bisect_left(rooms, length)
            if at == len(rooms):
                need = -(-len(pieces) // (capacity // length))
                left, rows = capacity, np.arange(num_rows, num_rows + need)
                num_rows += need
            else:
                left = rooms.pop(at)
                rows = np.concatenate(room.pop(left))
            # The fullest row that fits takes pieces of this length until none fits any more: its room is the least.
            each = left // length
            used = min(len(rows), -(-len(pieces) // each))
            taken = np.repeat(rows[:used], each)[: len(pieces)]
            row_P[pieces[: len(taken)]] = taken
            pieces = pieces[len(taken) :]
            last = len(taken) - each * (used - 1)
            for rest, some in (
                (left - each * length, rows[: used - 1]),
                (left - last * length, rows[used - 1 : used]),
                (left, rows[used:]),
            ):
                if rest and len(some):
                    if rest not in room:
                        bisect.insort(rooms, rest)
                    room.setdefault(rest, []).append(some)
    return row_P
