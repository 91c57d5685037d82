"""Batches addressed by step: which rows of which corpus a step sees, and their arrays.

A micro-batches a step (accumulation), B rows a micro-batch over all hosts, S sequence.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from moex.data.ramp import Ramp
from moex.data.rows import PADDING_ID, Rows

_MAX_ROWS = 2**32  # grain shuffles 32-bit indices
_PROPORTIONS = 100  # grain's mixture counts in hundredths of the smallest weight


class Batches:
    """Corpora cut into rows and dealt to steps: `batch(step)` is a pure function of (corpora, arguments, step).

    Rows stand in an endless order in which each epoch of a corpus is a permutation of its rows drawn from (seed, corpus,
    epoch), and corpora alternate by their weights; each takes up its own epochs. Step n takes the places after those of
    all steps before it; a step may straddle epochs. There is no iterator state and no dependence on hosts.

    Args: sources, the rows of each corpus. rows is B, over all hosts; accumulation is A, after a ramp. seed selects the
    order, 0 to 2**32 - 1. weights, share of rows from each source, to a hundredth of the smallest; their numbers of rows
    otherwise, so that all are seen about equally often. sizes, A B by step; constant otherwise. shuffle=False keeps corpus
    order, and allows less than one step, for `eval_batches`.
    Raises ValueError for sizes out of range, for sources with fewer rows than a step takes, and for bad weights.
    """

    def __init__(
        self, sources: Sequence[Rows], *, rows: int, accumulation: int, seed: int, weights: Sequence[float] = (),
        sizes: Ramp | None = None, shuffle: bool = True,
    ):  # fmt: skip
        self.seq_len = _at_least("seq_len", sources[0].seq_len, 2)
        self.rows, self.accumulation = _at_least("rows", rows, 1), _at_least("accumulation", accumulation, 1)
        if not 0 <= operator.index(seed) < 2**32:
            raise ValueError(f"seed={seed}: must be between 0 and {2**32 - 1}")
        self.sources = tuple(sources)
        for source in self.sources:
            if not 1 <= source.num_rows <= _MAX_ROWS:
                raise ValueError(
                    f"the corpus has {source.describe()}; between 1 and {_MAX_ROWS} rows are possible: change the corpus"
                    " or seq_len"
                )
        self._firsts = np.cumsum([0, *(source.num_rows for source in self.sources)])
        self.num_rows = int(self._firsts[-1])
        self.sizes = sizes or Ramp(accumulation * rows)
        self.rows_per_step = self.sizes.sizes[-1]
        self.weights = _shares(weights, [source.num_rows for source in self.sources])
        self._order: Callable[[int], int] = lambda place: place % self.num_rows
        self.shuffled = shuffle
        if shuffle:
            self._check_fills_a_step()
            self._order = _shuffled(self.sources, self._firsts.tolist(), self.weights, operator.index(seed))

    def batch(self, step: int, rows: slice = slice(None)) -> dict[str, np.ndarray]:
        """The arrays of one step, or of some of its rows; only those rows are read.

        Args: step, from 0. rows, a slice of the B rows of each micro-batch: a host passes its own, and the hosts' parts
        side by side are the whole batch. Returns [A, B, S] arrays (see `arrays_of`) and `sample_ids` [A, B] int64.
        Raises ValueError for a negative step, a slice outside the rows, or sources smaller than a step.
        """
        self._check_fills_a_step()
        return self._read(self.sample_ids(step, rows))

    def sample_ids(self, step: int, rows: slice = slice(None)) -> np.ndarray:
        """Which rows `batch(step, rows)` holds: [A, B] int64, numbered through all sources, the same in all epochs."""
        step = _at_least("step", step, 0)
        size = self.sizes.size(step)
        places = self._places(self.sizes.samples_before(step), size // self.rows, rows)
        ids = [self._order(place) for place in places]
        return np.array(ids, dtype=np.int64).reshape(size // self.rows, -1)

    def epochs(self, num_steps: int) -> list[float]:
        """How often `num_steps` steps go through each source."""
        seen = self.sizes.samples_before(num_steps)
        return [seen * w / source.num_rows for w, source in zip(self.weights, self.sources, strict=True)]

    @property
    def num_eval_batches(self) -> int:
        """Batches of A·B rows that hold every row once."""
        return -(-self.num_rows // self.rows_per_step)

    def eval_batch(self, index: int, rows: slice = slice(None)) -> dict[str, np.ndarray]:
        """Batch `index` of one pass in corpus order, shaped and sliced as `batch` does.

        Past the last row come padding rows: mask false, segments 0, sample id -1. So sums over all
        `num_eval_batches` batches weighted by the mask are exact. Raises ValueError for an index outside the pass.
        """
        if not 0 <= operator.index(index) < self.num_eval_batches:
            raise ValueError(f"eval batch {index}: there are {self.num_eval_batches}, numbered from 0")
        accumulation = self.rows_per_step // self.rows
        places = self._places(index * self.rows_per_step, accumulation, rows)
        ids = [place if place < self.num_rows else PADDING_ID for place in places]
        return self._read(np.array(ids, dtype=np.int64).reshape(accumulation, -1))

    def eval_batches(self, rows: slice = slice(None)) -> Iterator[dict[str, np.ndarray]]:
        """Every row once, in corpus order: `eval_batch(0)` to `eval_batch(num_eval_batches - 1)`."""
        for index in range(self.num_eval_batches):
            yield self.eval_batch(index, rows)

    def source_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """The number of the source that each row is from; -1 for padding."""
        return np.searchsorted(self._firsts, sample_ids, side="right") - 1

    def _places(self, first: int, accumulation: int, rows: slice) -> list[int]:
        chosen = range(self.rows)[rows]
        stop = self.rows if rows.stop is None else rows.stop
        if not chosen or stop > self.rows:
            raise ValueError(f"rows={rows}: selects nothing or more than the {self.rows} rows of a micro-batch")
        return [first + micro * self.rows + row for micro in range(accumulation) for row in chosen]

    def _read(self, sample_ids: np.ndarray) -> dict[str, np.ndarray]:
        flat = sample_ids.reshape(-1)
        source_of = np.maximum(self.source_of(flat), 0)
        arrays: dict[str, np.ndarray] = {}
        for number, source in enumerate(self.sources):
            here = source_of == number
            if not here.any():
                continue
            own = np.where(flat[here] < 0, PADDING_ID, flat[here] - self._firsts[number])
            for name, array in source.read(own).items():
                arrays.setdefault(name, np.zeros((len(flat), self.seq_len), array.dtype))[here] = array
        shape = (*sample_ids.shape, self.seq_len)
        return {name: array.reshape(shape) for name, array in arrays.items()} | {"sample_ids": sample_ids}

    def _check_fills_a_step(self) -> None:
        if self.num_rows < self.rows_per_step:
            has = "; ".join(source.describe() for source in self.sources)
            raise ValueError(
                f"the corpus has {has}, but a step takes rows * accumulation = {self.rows} *"
                f" {self.rows_per_step // self.rows} = {self.rows_per_step} different ones; lower rows, accumulation or"
                " seq_len, or use a larger corpus"
            )


def _shares(weights: Sequence[float], counts: Sequence[int]) -> list[float]:
    if weights and len(weights) != len(counts):
        raise ValueError(f"{len(weights)} weights for {len(counts)} corpora: give one each, or none")
    if any(not 0 < w < float("inf") for w in weights):
        raise ValueError(
            f"weights {list(weights)} must be above 0 and finite; leave out a corpus that is not to be seen"
        )
    chosen = weights or counts
    whole = [int(w * _PROPORTIONS / min(chosen)) for w in chosen]  # as grain's mixture rounds them
    return [w / sum(whole) for w in whole]


def _shuffled(sources: Sequence[Rows], firsts: list[int], weights: list[float], seed: int) -> Callable[[int], int]:
    """Place in the endless order -> row, numbered through all sources."""
    import grain  # imports jax: seconds, and not needed for evaluation

    def endless(number: int) -> Any:
        # `.seed` hashes the seed before grain adds the epoch to it; `shuffle(seed=...)` alone would make epoch 1 of seed 0
        # the order of epoch 0 of seed 1. Sources of one length get orders of their own.
        own = seed if number == 0 else int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
        rows = grain.MapDataset.range(firsts[number], firsts[number + 1])
        return rows.seed(own).shuffle().repeat()

    ordered: list[Any] = [endless(number) for number in range(len(sources))]
    mixed: Any = ordered[0] if len(ordered) == 1 else grain.MapDataset.mix(ordered, weights)
    return lambda place: mixed[place]


def _at_least(field: str, value: int, least: int) -> int:
    if operator.index(value) < least:
        raise ValueError(f"{field}={value}: must be {least} or more")
    return operator.index(value)
