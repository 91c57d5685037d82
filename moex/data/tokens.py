"""The form every corpus has: a flat token array and the offsets where its documents start.

T tokens, V vocabulary.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

TOKEN_DTYPES = (np.uint8, np.uint16, np.uint32)


@dataclass(frozen=True, eq=False)
class Tokens:
    """Documents laid end to end; the arrays may be memory maps and are not copied.

    tokens: [T] uint8, uint16 or uint32, or what reads slices of such an array from afar. starts: [num_docs + 1] int64
    offsets into tokens, first 0, last T, not decreasing; document d is tokens[starts[d]:starts[d + 1]]. names: one a
    document, shown in error messages. learned: [T] uint8 or None, 0 where a token is given and not to be learned (a
    prompt). source: the file, for messages. vocab_size: ids that are read must be below it; 0 for any.
    Raises ValueError when these do not fit together.
    """

    tokens: Any
    starts: np.ndarray
    names: Sequence[str]
    learned: Any = None
    source: str = ""
    vocab_size: int = 0

    def __post_init__(self):
        tokens, starts = self.tokens, self.starts
        if tokens.ndim != 1 or tokens.dtype not in TOKEN_DTYPES:
            raise ValueError(
                f"Tokens.tokens is {tokens.dtype}{list(tokens.shape)}; pass one dimension of uint8, uint16 or uint32"
            )
        if starts.ndim != 1 or starts.dtype != np.int64:
            raise ValueError(f"Tokens.starts is {starts.dtype}{list(starts.shape)}; pass one dimension of int64")
        if len(starts) != len(self.names) + 1:
            raise ValueError(
                f"Tokens.starts has {len(starts)} offsets for {len(self.names)} names;"
                f" pass {len(self.names) + 1}: where each document starts, and the end"
            )
        if starts[0] != 0 or starts[-1] != len(tokens):
            raise ValueError(
                f"Tokens.starts runs from {starts[0]} to {starts[-1]} over {len(tokens)} tokens;"
                f" it must run from 0 to {len(tokens)}"
            )
        backwards = np.flatnonzero(starts[1:] < starts[:-1])
        if backwards.size:
            doc = int(backwards[0])
            raise ValueError(
                f"Tokens.starts decreases from {starts[doc]} to {starts[doc + 1]} at document {doc}"
                f" ({self.names[doc]!r}); list the documents in the order in which they are stored"
            )
        if self.learned is not None and len(self.learned) != len(tokens):
            raise ValueError(f"Tokens.learned has {len(self.learned)} entries for {len(tokens)} tokens; pass one each")

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, first: int, stop: int) -> np.ndarray:
        """Ids from `first` to before `stop`.  Raises ValueError, with place and file, for one outside the vocabulary: a
        device would take it for another without a word.
        """
        found = np.asarray(self.tokens[first:stop])
        if self.vocab_size and found.size and found.max() >= self.vocab_size:
            at = first + int(np.argmax(found >= self.vocab_size))
            raise ValueError(
                f"token {int(found[at - first])} at {self.where(at)} is none of the corpus's {self.vocab_size} ids: it was "
                "changed after it was written (`python -m moex.data verify`)"
            )
        return found

    def where(self, at: int) -> str:
        """Where token `at` stands: its offset in its document, and in its file."""
        doc = int(np.searchsorted(self.starts, at, side="right")) - 1
        inside = f"offset {at - int(self.starts[doc])} of document {self.names[doc]!r}"
        return inside + (f" (token {at} of {self.source})" if self.source else "")


def fingerprint(*splits: Tokens) -> str:
    """Hex sha256 over dtype, names, starts and tokens of the splits, in order; the same on every byte order."""
    digest = hashlib.sha256()
    for split in splits:
        for part in (
            split.tokens.dtype.name.encode(),
            "\n".join(split.names).encode(),
            split.starts.astype("<i8"),
            split.tokens.astype(split.tokens.dtype.newbyteorder("<"), copy=False),
        ):
            data = part if isinstance(part, bytes) else np.ascontiguousarray(part).data
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
    return digest.hexdigest()


def entropy(counts_V: np.ndarray) -> float:
    """Nats of the distribution that counts or weights [V] stand for: the loss of knowing only how frequent tokens are.

    Raises ValueError when all are 0.
    """
    total = counts_V.sum()
    if not total > 0:
        raise ValueError("entropy: no token was counted; pass at least one")
    share = counts_V[counts_V > 0] / total
    return float(-(share * np.log(share)).sum())


def unigram_entropy(tokens: np.ndarray) -> float:
    """`entropy` of the tokens [T], unsigned integers.  A model below it has learned context.

    Raises ValueError when the array is empty.
    """
    if not len(tokens):
        raise ValueError("unigram_entropy: tokens is empty; pass at least one token")
    return entropy(np.bincount(tokens))


def check_tokens(tokens: Tokens, vocab_size: int, chunk_tokens: int = 1 << 24) -> None:
    """Raises ValueError that names the first token outside [0, vocab_size), its document and its offset there.

    Reads the array once, chunk_tokens at a time (bounded memory over a memory map), or not at all when its dtype cannot
    hold a larger id. Accelerators clamp or wrap an id out of range without a word, so call this before the first step.
    """
    if vocab_size < 1:
        raise ValueError(f"vocab_size={vocab_size}: must be 1 or more")
    if np.iinfo(tokens.tokens.dtype).max < vocab_size:
        return
    for first in range(0, len(tokens), chunk_tokens):
        chunk = tokens.tokens[first : first + chunk_tokens]
        if chunk.max() < vocab_size:
            continue
        at = first + int(np.argmax(chunk >= vocab_size))
        raise ValueError(
            f"token {int(chunk[at - first])} at {tokens.where(at)} is outside the vocabulary:"
            f" vocab_size={vocab_size} allows 0 to {vocab_size - 1};"
            " raise the model's vocab_size or tokenise the corpus with the model's tokeniser"
        )
