"""The embedded corpus: sources of this Python's own standard library, as bytes."""

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from moex.data.corpus import Corpus, Split
from moex.data.tokenizers import END_OF_DOCUMENT, Bytes
from moex.data.tokens import Tokens, fingerprint

_SKIPPED_DIRS = frozenset(
    ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test")  # not the library, or its tests
)
_SKIPPED_PREFIXES = ("_sysconfigdata", "config-")  # written when Python is built: they differ between machines
_HELD_OUT_ONE_IN = 20
# Files differ in size a thousandfold; this salt is one for which 5 % of the files is close to 5 % of the bytes as well.
_SPLIT_SALT = "held-out 11"


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
    name = f"stdlib-{platform.python_version()}"
    return Corpus(name, _split(splits[0]), _split(splits[1]), Bytes(), fingerprint(*splits))


def _split(tokens: Tokens) -> Split:
    num_bytes = len(tokens) - len(tokens.names)  # an end mark is no text
    return Split((tokens,), num_bytes, np.bincount(tokens.tokens, minlength=Bytes.vocab_size))


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
