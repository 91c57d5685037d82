"""Batches addressed by step: which windows of the corpus a step sees, and their arrays.

A micro-batches a step (accumulation), B rows a micro-batch over all hosts, S sequence, W windows in the corpus.
"""

import operator
from collections.abc import Iterator

import numpy as np

from moex.data.corpus import Tokens

PADDING_ID = -1  # sample id of a row that only fills a batch
_MAX_WINDOWS = 2**32  # grain shuffles 32-bit indices


class Batches:
    """A corpus cut into windows and dealt to steps: `batch(step)` is a pure function of (corpus, arguments, step).

    Window w holds tokens w·S to w·S + S: S inputs and, one further, S labels. Windows overlap by that one token, so
    over an epoch every token is an input exactly once and a label at most once; the last window is padded, not dropped.
    Step n takes places n·A·B to (n + 1)·A·B of an endless order in which each epoch is a permutation of the windows
    drawn from (seed, epoch); a step may straddle two epochs. There is no iterator state and no dependence on hosts.

    Args: rows is B, over all hosts. seed selects the order, 0 to 2**32 - 1. shuffle=False keeps corpus order, and
    allows a corpus smaller than one step, for `eval_batches`.
    Raises ValueError for sizes out of range, and for a corpus with fewer windows than a step takes.
    """

    def __init__(self, tokens: Tokens, *, seq_len: int, rows: int, accumulation: int, seed: int, shuffle: bool = True):
        _at_least("seq_len", seq_len, 2)
        _at_least("rows", rows, 1)
        _at_least("accumulation", accumulation, 1)
        if not 0 <= operator.index(seed) < 2**32:
            raise ValueError(f"seed={seed}: must be between 0 and {2**32 - 1}")
        self.tokens, self.seq_len, self.rows, self.accumulation = tokens, seq_len, rows, accumulation
        self.num_windows = -(-len(tokens) // seq_len)
        if not 1 <= self.num_windows <= _MAX_WINDOWS:
            raise ValueError(
                f"the corpus has {len(tokens)} tokens, {self.num_windows} windows of seq_len={seq_len};"
                f" between 1 and {_MAX_WINDOWS} windows are possible: change the corpus or seq_len"
            )
        self.windows_per_step = accumulation * rows
        self._order = range(self.num_windows)
        if shuffle:
            self._check_fills_a_step()
            self._order = _shuffled(self.num_windows, operator.index(seed))

    def batch(self, step: int, rows: slice = slice(None)) -> dict[str, np.ndarray]:
        """The arrays of one step, or of some of its rows; only those rows are read.

        Args: step, from 0. rows, a slice of the B rows of each micro-batch: a host passes its own, and the hosts' parts
        side by side are the whole batch. Returns [A, B, S] arrays (see `read_windows`) and `sample_ids` [A, B] int64.
        Raises ValueError for a negative step, a slice outside the rows, or a corpus smaller than a step.
        """
        self._check_fills_a_step()
        return self._read(self.sample_ids(step, rows))

    def sample_ids(self, step: int, rows: slice = slice(None)) -> np.ndarray:
        """Which windows `batch(step, rows)` holds: [A, B] int64, indices in the corpus, the same in all epochs."""
        places = self._places(_at_least("step", step, 0), rows)
        order, num_windows = self._order, self.num_windows
        if isinstance(order, range):
            ids = [place % num_windows for place in places]
        else:
            ids = [order[place] for place in places]
        return np.array(ids, dtype=np.int64).reshape(self.accumulation, -1)

    @property
    def num_eval_batches(self) -> int:
        """Batches of A·B windows that hold every window once."""
        return -(-self.num_windows // self.windows_per_step)

    def eval_batch(self, index: int, rows: slice = slice(None)) -> dict[str, np.ndarray]:
        """Batch `index` of one pass in corpus order, shaped and sliced as `batch` does.

        Past the last window come padding rows: mask false, segments 0, sample id -1. So sums over all
        `num_eval_batches` batches weighted by the mask are exact. Raises ValueError for an index outside the pass.
        """
        if not 0 <= operator.index(index) < self.num_eval_batches:
            raise ValueError(f"eval batch {index}: there are {self.num_eval_batches}, numbered from 0")
        places = self._places(index, rows)
        ids = [place if place < self.num_windows else PADDING_ID for place in places]
        return self._read(np.array(ids, dtype=np.int64).reshape(self.accumulation, -1))

    def eval_batches(self, rows: slice = slice(None)) -> Iterator[dict[str, np.ndarray]]:
        """Every window once, in corpus order: `eval_batch(0)` to `eval_batch(num_eval_batches - 1)`."""
        for index in range(self.num_eval_batches):
            yield self.eval_batch(index, rows)

    def _places(self, step: int, rows: slice) -> list[int]:
        chosen = range(self.rows)[rows]
        stop = self.rows if rows.stop is None else rows.stop
        if not chosen or stop > self.rows:
            raise ValueError(f"rows={rows}: selects nothing or more than the {self.rows} rows of a micro-batch")
        first = operator.index(step) * self.windows_per_step
        return [first + micro * self.rows + row for micro in range(self.accumulation) for row in chosen]

    def _read(self, sample_ids: np.ndarray) -> dict[str, np.ndarray]:
        arrays = read_windows(self.tokens, sample_ids.reshape(-1), self.seq_len)
        shape = (*sample_ids.shape, self.seq_len)
        return {name: array.reshape(shape) for name, array in arrays.items()} | {"sample_ids": sample_ids}

    def _check_fills_a_step(self) -> None:
        if self.num_windows < self.windows_per_step:
            raise ValueError(
                f"the corpus has {len(self.tokens)} tokens, {self.num_windows} windows of seq_len={self.seq_len}, but"
                f" a step takes rows * accumulation = {self.rows} * {self.accumulation} = {self.windows_per_step}"
                " different ones; lower rows, accumulation or seq_len, or use a larger corpus"
            )


def read_windows(tokens: Tokens, ids: np.ndarray, seq_len: int) -> dict[str, np.ndarray]:
    """The arrays of some windows of a corpus, n rows of S = seq_len.

    Args: ids [n] integers, each in [0, W) or negative for a row of padding.
    Returns, all [n, S]:
      tokens int32: the inputs; 0 where there is none (padding).
      labels int32: the token after each input, of whatever document; 0 past the end of the corpus.
      mask bool: whether the label counts in the loss: it exists and belongs to the input's document.
      segments int32: number of the document within its row, from 1; 0 is padding.
      positions int32: offset from the document's first token in this row (the row cuts documents); 0 at padding.
    Raises ValueError for an id past the corpus.
    """
    num_windows = -(-len(tokens) // seq_len)
    if np.max(ids, initial=PADDING_ID) >= num_windows:
        raise ValueError(f"window {np.max(ids)}: the corpus has {num_windows} of seq_len={seq_len}, numbered from 0")
    firsts = np.asarray(ids, dtype=np.int64) * seq_len
    stored = np.zeros((len(firsts), seq_len + 1), dtype=np.int32)
    is_start = np.zeros(stored.shape, dtype=bool)
    lengths = np.zeros(len(firsts), dtype=np.int64)
    # Starts strictly inside a row; a document that starts at the row's first token needs no mark.
    from_doc = np.searchsorted(tokens.starts, firsts, side="right")
    to_doc = np.searchsorted(tokens.starts, firsts + seq_len + 1, side="left")
    for row, first in enumerate(firsts):
        if first < 0:
            continue
        piece = tokens.tokens[first : first + seq_len + 1]
        stored[row, : len(piece)] = piece
        lengths[row] = len(piece)
        is_start[row, tokens.starts[from_doc[row] : to_doc[row]] - first] = True
    offsets = np.arange(seq_len + 1, dtype=np.int32)
    is_real = offsets < lengths[:, None]
    own_start = np.maximum.accumulate(np.where(is_start, offsets, 0), axis=1)
    inputs = is_real[:, :-1]
    return {
        # Copies, so that writing to one never shows in the other.
        "tokens": stored[:, :-1].copy(),
        "labels": stored[:, 1:].copy(),
        "mask": is_real[:, 1:] & ~is_start[:, 1:],
        "segments": np.where(inputs, 1 + np.cumsum(is_start[:, :-1], axis=1, dtype=np.int32), 0).astype(np.int32),
        "positions": np.where(inputs, (offsets - own_start)[:, :-1], 0).astype(np.int32),
    }


def _shuffled(num_windows: int, seed: int):
    import grain  # imports jax: seconds, and not needed for evaluation

    # `.seed` hashes the seed before grain adds the epoch to it; `shuffle(seed=...)` alone would make epoch 1 of seed 0
    # the order of epoch 0 of seed 1.
    return grain.MapDataset.range(num_windows).seed(seed).shuffle().repeat()


def _at_least(field: str, value: int, least: int) -> int:
    if operator.index(value) < least:
        raise ValueError(f"{field}={value}: must be {least} or more")
    return operator.index(value)
