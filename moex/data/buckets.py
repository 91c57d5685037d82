"""Batches whose micro-batches differ in the length of their documents: each takes its rows from its own bucket.

A micro-batches, B rows, S tokens of a row, c context-parallel ranks that a bucket's documents lie over.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from moex.data.batches import Batches
from moex.data.packing import pack_buckets
from moex.data.ramp import Ramp
from moex.data.rows import PADDING_ID, Packed
from moex.data.tokens import Tokens


class Buckets:
    """Training batches of packed documents, as `Batches` gives them, for dynamic context parallelism.

    A row of a bucket is lanes of S c / cp tokens, and a document goes to the first bucket, in the order of `groups`, whose
    lanes hold it, or fills a longer lane up (`moex.data.packing.pack_buckets`). Each bucket is shuffled by itself and goes
    through its own epochs, so which rows a step holds depends on seed and step alone, and a bucket with a larger share of
    micro-batches than of the corpus is seen more often.

    Args: groups, c of each of the A micro-batches, rising; the last is cp. rows is B, over all hosts.
    Raises ValueError for a bucket with fewer rows than a step takes of it.
    """

    def __init__(self, shards: Sequence[Tokens], seq_len: int, groups: Sequence[int], *, rows: int, seed: int):
        self.seq_len, self.rows, self.accumulation = seq_len, rows, len(groups)
        sizes = {group: groups.count(group) for group in groups}
        lanes = [seq_len * group // groups[-1] for group in sizes]
        self.buckets: list[Batches] = []
        found = zip(*(pack_buckets(shard.starts, lanes) for shard in shards), strict=True)
        for (group, accumulation), lane, packings in zip(sizes.items(), lanes, found, strict=True):
            packed = Packed(shards, seq_len, packings=packings, lane_len=lane)
            try:
                self.buckets.append(Batches([packed], rows=rows, accumulation=accumulation, seed=seed))
            except ValueError as error:
                raise ValueError(
                    f"parallel.cp_groups={list(sizes)}: of documents of up to {lane} tokens, which are for {group} ranks, "
                    f"{error}"
                ) from error
        self._firsts = [0, *itertools.accumulate(bucket.num_rows for bucket in self.buckets)]
        self.num_rows = self._firsts[-1]
        self.sizes, self.sources, self.weights = Ramp(rows * self.accumulation), (self,), [1.0]
        self.rows_per_step = rows * self.accumulation

    def describe(self) -> str:
        return "; ".join(bucket.sources[0].describe() for bucket in self.buckets)

    def batch(self, step: int, rows: slice = slice(None)) -> dict[str, np.ndarray]:
        """The arrays of one step, see `Batches.batch`: the micro-batches of each bucket one after the other."""
        parts = [bucket.batch(step, rows) for bucket in self.buckets]
        arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return arrays | {"sample_ids": self.sample_ids(step, rows)}

    def sample_ids(self, step: int, rows: slice = slice(None)) -> np.ndarray:
        """[A, B] int64, numbered through all buckets."""
        own = [bucket.sample_ids(step, rows) for bucket in self.buckets]
        return np.concatenate([ids + first for ids, first in zip(own, self._firsts, strict=False)])

    def epochs(self, num_steps: int) -> list[float]:
        """How often `num_steps` steps go through the bucket that is seen most often."""
        return [max(bucket.epochs(num_steps)[0] for bucket in self.buckets)]

    def source_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """0, the corpus, for each row; -1 for padding."""
        return np.where(sample_ids == PADDING_ID, -1, 0)
