"""A corpus as runs see it: what to train on, what to evaluate on, and how to read its tokens.

V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moex.data.tokenizers import Tokenizer
from moex.data.tokens import Tokens, check_tokens, entropy


@dataclass(frozen=True, eq=False)
class Split:
    """Documents in shards.  num_bytes: of their text as UTF-8.  counts_V: int64, how often each token id occurs.
    digests: sha256 of each shard's tokens, as far as known.
    """

    shards: tuple[Tokens, ...]
    num_bytes: int
    counts_V: np.ndarray
    digests: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(shard) for shard in self.shards)

    @property
    def num_documents(self) -> int:
        return sum(len(shard.names) for shard in self.shards)


@dataclass(frozen=True, eq=False)
class Corpus:
    """A corpus split into documents to train on and documents to evaluate on; no document is in both.

    fingerprint: hex digest over all that batches depend on. Two corpora with equal fingerprints give equal batches, so
    a resumed run compares it with the saved one (another Python version has another standard library).
    """

    name: str
    train: Split
    held_out: Split
    tokenizer: Tokenizer
    fingerprint: str


def mixed_entropy(splits: Sequence[Split], weights: Sequence[float]) -> float:
    """Nats a token of knowing only how frequent tokens are in the mixture of these splits by these shares of tokens."""
    size = max(len(split.counts_V) for split in splits)
    total = np.zeros(size)
    for split, weight in zip(splits, weights, strict=True):
        total[: len(split.counts_V)] += weight * split.counts_V / split.counts_V.sum()
    return entropy(total)


def check_mixture(corpora: Sequence[Corpus], vocab_size: int) -> None:
    """Raises ValueError when a corpus cannot be trained on together with the others by a model of this vocabulary:
    another tokenizer, the same shard twice, or ids outside the vocabulary, named with file and offset.
    """
    first, seen = corpora[0], {}
    for corpus in corpora:
        if corpus.tokenizer.digest != first.tokenizer.digest:
            raise ValueError(
                f"{corpus.name} was made with another tokenizer ({corpus.tokenizer.name}, {corpus.tokenizer.digest[:12]})"
                f" than {first.name} ({first.tokenizer.name}, {first.tokenizer.digest[:12]}): tokenise both with one"
            )
        for split in (corpus.train, corpus.held_out):
            for shard, digest in zip(split.shards, split.digests, strict=False):
                if other := seen.get(digest):
                    raise ValueError(
                        f"{shard.source} holds the same tokens as {other}: it would be seen twice an epoch, or trained and"
                        " evaluated on; remove one"
                    )
                seen[digest] = shard.source
            _check_ids(split, vocab_size)


def _check_ids(split: Split, vocab_size: int) -> None:
    used = np.flatnonzero(split.counts_V)
    if used.size and used[-1] >= vocab_size:  # the counts say that there is one: find it
        for shard in split.shards:
            check_tokens(shard, vocab_size)
        raise ValueError(
            f"the index of {split.shards[0].source} counts token {used[-1]}, which no shard has: run `python -m moex.data"
            " verify` on the folder"
        )
