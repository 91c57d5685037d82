"""The embedded corpus (this Python's own standard library, as bytes) and the form every corpus has in memory.

T tokens in a corpus, V vocabulary. A corpus is one flat token array plus the offsets where its documents start.
"""

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

END_OF_DOCUMENT = 0
BYTE_VOCAB_SIZE = 256

_TOKEN_DTYPES = (np.uint8, np.uint16, np.uint32)
_SKIPPED_DIRS = frozenset(
    ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test")  # not the library, or its tests
)
_SKIPPED_PREFIXES = ("_sysconfigdata", "config-")  # written when Python is built: they differ between machines
_HELD_OUT_ONE_IN = 20
# Files differ in size a thousandfold; this salt is one for which 5 % of the files is close to 5 % of the bytes as well.
_SPLIT_SALT = "held-out 11"


@dataclass(frozen=True, eq=False)
class Tokens:
    """Documents laid end to end; the arrays may be memory maps and are not copied.

    tokens: [T] uint8, uint16 or uint32. starts: [num_docs + 1] int64 offsets into tokens, first 0, last T, not
    decreasing; document d is tokens[starts[d]:starts[d + 1]]. names: one a document, shown in error messages.
    Raises ValueError when the three do not fit together.
    """

    tokens: np.ndarray
    starts: np.ndarray
    names: tuple[str, ...]

    def __post_init__(self):
        tokens, starts = self.tokens, self.starts
        if tokens.ndim != 1 or tokens.dtype not in _TOKEN_DTYPES:
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
        backwards = np.flatnonzero(np.diff(starts) < 0)
        if backwards.size:
            doc = int(backwards[0])
            raise ValueError(
                f"Tokens.starts decreases from {starts[doc]} to {starts[doc + 1]} at document {doc}"
                f" ({self.names[doc]!r}); list the documents in the order in which they are stored"
            )

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, eq=False)
class Corpus:
    """A corpus split into documents to train on and documents to evaluate on; no document is in both.

    fingerprint: hex sha256 over both splits' tokens, offsets and names. Two corpora with equal fingerprints give equal
    batches, so a resumed run compares it with the saved one (another Python version has another standard library).
    """

    train: Tokens
    held_out: Tokens
    name: str
    vocab_size: int
    fingerprint: str

    def decode(self, ids) -> str:
        """See `decode_bytes`."""
        return decode_bytes(ids)


def decode_bytes(ids) -> str:
    """Text of a sequence of byte ids, int [n]; what is no byte or no UTF-8 reads as U+FFFD."""
    ids = np.asarray(ids, dtype=np.int64).reshape(-1)
    # 0xFF occurs in no UTF-8 text, so it marks ids that a model with a padded vocabulary may produce.
    known = np.where((ids >= 0) & (ids < BYTE_VOCAB_SIZE), ids, 0xFF)
    return known.astype(np.uint8).tobytes().decode("utf-8", errors="replace")


def stdlib_corpus(limit_bytes: int | None = None) -> Corpus:
    """The .py files of the running Python's standard library, one byte a token, byte 0 after every document.

    Left out are installed packages, test suites, build records, blank files and files that contain byte 0. Documents
    are sorted by relative POSIX path; a hash of that path holds one file in twenty out, so on every machine with the
    same library the splits are the same. Tokens are read-only uint8.

    Args: limit_bytes caps the tokens of both splits together: files are tried in an order given by a hash of their path
    and kept while they fit, 1/20 of the limit going to the held-out split. None takes all.
    Raises ValueError when the library has no sources here, or when limit_bytes leaves a split empty.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(_source_paths(root))
    if not paths:
        raise ValueError(
            f"corpus: no Python sources under {root} (sysconfig's stdlib path), as in an installation that ships the"
            " library as a zip or as bytecode only; use a Python with its library as .py files, or a tokenised corpus"
        )
    held_out = [path for path in paths if _is_held_out(path)]
    train = [path for path in paths if not _is_held_out(path)]
    if limit_bytes is not None:
        share = limit_bytes // _HELD_OUT_ONE_IN
        held_out, train = _within(root, held_out, share), _within(root, train, limit_bytes - share)
    splits = _read(root, train), _read(root, held_out)
    for split, tokens in zip(("train", "held_out"), splits, strict=True):
        if not len(tokens):
            raise ValueError(
                f"corpus: the {split} split is empty: of {len(paths)} files under {root} none was left to it"
                + (f" by limit_bytes={limit_bytes}; raise it (100000 is enough)" if limit_bytes is not None else "")
            )
    return Corpus(*splits, f"stdlib-{platform.python_version()}", BYTE_VOCAB_SIZE, fingerprint(*splits))


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


def unigram_entropy(tokens: np.ndarray) -> float:
    """Nats a token of the empirical distribution of single tokens in the array given: the loss of knowing only counts.

    Args: tokens, unsigned integers [T], for instance `corpus.train.tokens`. A model whose loss on an array is below
    that array's entropy has learned context. Raises ValueError when the array is empty.
    """
    if not len(tokens):
        raise ValueError("unigram_entropy: tokens is empty; pass at least one token")
    counts_V = np.bincount(tokens)
    frequencies = counts_V[counts_V > 0] / len(tokens)
    return float(-(frequencies * np.log(frequencies)).sum())


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
        doc = int(np.searchsorted(tokens.starts, at, side="right")) - 1
        raise ValueError(
            f"token {int(tokens.tokens[at])} at offset {at - int(tokens.starts[doc])} of document"
            f" {tokens.names[doc]!r} is outside the vocabulary: vocab_size={vocab_size} allows 0 to {vocab_size - 1};"
            " raise the model's vocab_size or tokenise the corpus with the model's tokeniser"
        )


def _source_paths(root: Path) -> Iterator[str]:
    for folder, dirs, files in os.walk(root):
        inside = Path(folder).relative_to(root)
        dirs[:] = [name for name in dirs if name not in _SKIPPED_DIRS and not name.startswith(_SKIPPED_PREFIXES)]
        for name in files:
            if name.endswith(".py") and not name.startswith(_SKIPPED_PREFIXES):
                yield (inside / name).as_posix()


def _hash(label: str, path: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{label} {path}".encode()).digest()[:8], "big")


def _is_held_out(path: str) -> bool:
    return _hash(_SPLIT_SALT, path) % _HELD_OUT_ONE_IN == 0


def _within(root: Path, paths: list[str], limit_bytes: int) -> list[str]:
    kept, total = [], 0
    for path in sorted(paths, key=lambda path: _hash("order", path)):
        size = (root / path).stat().st_size + 1
        if total + size <= limit_bytes:
            kept.append(path)
            total += size
    return sorted(kept)


def _read(root: Path, paths: list[str]) -> Tokens:
    end = bytes((END_OF_DOCUMENT,))
    documents = {path: (root / path).read_bytes() for path in paths}
    documents = {path: text + end for path, text in documents.items() if text.strip() and end not in text}
    tokens = np.frombuffer(b"".join(documents.values()), dtype=np.uint8)
    starts = np.cumsum([0, *map(len, documents.values())], dtype=np.int64)
    return Tokens(tokens, starts, tuple(documents))
