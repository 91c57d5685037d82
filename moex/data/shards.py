"""Corpora on disk: memory-mapped shards of token ids beside an `index.json` that describes them.

A folder holds, for each shard of a split, NAME.tokens (little-endian ids), NAME.starts (int64 offsets of documents, and the
end) and, where prompts are not to be learned, NAME.learned (one byte a token); SPLIT.counts (int64, how often each id
occurs); the tokenizer's file. The index is written last, so a folder with one is whole. Paths may be local or those that
orbax reads (gs://, s3://, az://, hf://). V vocabulary.
"""

import hashlib
import mmap
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from moex.data.corpus import Corpus, Split
from moex.data.index import SPLITS, files_of, path_of, read_index
from moex.data.tokenizers import Bytes, FromFile, Tokenizer
from moex.data.tokens import Tokens

_CHUNK_BYTES = 1 << 24


class RemoteArray:
    """A flat array in a file that cannot be mapped: each slice is read when it is asked for."""

    ndim = 1

    def __init__(self, path: Any, dtype: np.dtype, length: int):
        self.path, self.dtype, self.shape = path, dtype, (length,)
        self._file, self._lock = None, threading.Lock()  # batches and evaluations read from two threads

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: slice) -> np.ndarray:
        start, stop, step = key.indices(len(self))
        assert step == 1, "a file is read forwards"
        with self._lock:
            self._file = self._file or self.path.open("rb")
            self._file.seek(start * self.dtype.itemsize)
            return np.frombuffer(self._file.read(max(stop - start, 0) * self.dtype.itemsize), self.dtype)


class Numbered(Sequence):
    """Names of documents by their place: `number N`."""

    def __init__(self, length: int):
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index):
        return f"number {range(self._length)[index]}"


def open_shards(location: str) -> Corpus:
    """Opens a folder that `python -m moex.data tokenize` wrote; token ids are read when they are needed.

    Raises ValueError when there is no index, it is of another format, or a file is missing or of another size.
    """
    folder = path_of(location)
    index = read_index(location)
    dtype = np.dtype(index["dtype"]).newbyteorder("<")
    train, held_out = (_split(folder, index["splits"].get(name), dtype, index["vocab_size"]) for name in SPLITS)
    return Corpus(location, train, held_out, _tokenizer(folder, index), _fingerprint(index))


def verify(location: str) -> Iterator[str]:
    """Reads every file of a corpus and compares it with the index; yields a sentence for each that differs."""
    folder = path_of(location)
    for name, digest in files_of(read_index(location)):
        path = folder / name
        if not path.is_file():
            yield f"{path} is missing"
        elif (found := digest_of(path)) != digest:
            yield f"{path} has sha256 {found}, the index says {digest}: it was changed after it was written"


def digest_of(path: Any) -> str:
    """Hex sha256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _split(folder: Any, split: dict[str, Any] | None, dtype: np.dtype, vocab_size: int) -> Split:
    if split is None:
        return Split((), 0, np.zeros(vocab_size, np.int64))
    shards = []
    for shard in split["shards"]:
        size, num_documents = shard["num_tokens"], shard["num_documents"]
        starts = _array(folder / shard["starts"]["file"], np.dtype("<i8"), num_documents + 1)[:]
        learned = _array(folder / shard["learned"]["file"], np.dtype("u1"), size) if "learned" in shard else None
        tokens = _array(folder / shard["tokens"]["file"], dtype, size)
        starts = starts.astype(np.int64, copy=False)
        source = str(folder / shard["tokens"]["file"])
        shards.append(Tokens(tokens, starts, Numbered(num_documents), learned, source, vocab_size))
    counts = folder / split["counts"]["file"]
    counts_V = _array(counts, np.dtype("<i8"), vocab_size)[:]
    if counts_V.min() < 0 or counts_V.sum() != sum(map(len, shards)):
        raise ValueError(f"{counts} doesn't count the split's {sum(map(len, shards))} tokens: it was changed")
    digests = tuple(shard["tokens"]["sha256"] for shard in split["shards"])
    return Split(tuple(shards), split["num_bytes"], np.array(counts_V), digests)


def _array(path: Any, dtype: np.dtype, length: int) -> Any:
    if not path.is_file():
        raise ValueError(f"{path} is missing, though the index names it: copy it here or tokenise again")
    size, expected = path.stat().length, length * dtype.itemsize
    if size != expected:
        raise ValueError(
            f"{path} has {size} bytes, the index says {expected} ({length} of {dtype.name}): copy it again"
        )
    if "://" in str(path):
        return RemoteArray(path, dtype, length)
    return _mapped(path, dtype) if length else np.zeros(0, dtype)


def _mapped(path: Any, dtype: np.dtype) -> np.ndarray:
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    # Rows are read in shuffled order: without this the system reads on behind each, which takes most of the time.
    mapped.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(mapped, dtype)


def _tokenizer(folder: Any, index: dict[str, Any]) -> Tokenizer:
    about = index["tokenizer"]
    if about["name"] == Bytes.name:
        return Bytes()
    return _Lazy(folder / about["file"], about, index["vocab_size"])


class _Lazy:
    """The tokenizer of a corpus, whose file is read when text is first wanted."""

    def __init__(self, path: Any, about: dict[str, Any], vocab_size: int):
        self._path, self._about = path, about
        self._read: FromFile | None = None
        self.name: str = about["name"]
        self.digest: str = about["sha256"]
        self.vocab_size = vocab_size
        self.end: int | None = about["end"]

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return self._tokenizer().encode(texts)

    def decode(self, ids) -> str:
        return self._tokenizer().decode(ids)

    def _tokenizer(self) -> FromFile:
        if self._read is None:
            self._read = FromFile(self._path.read_text(), self._about["end_token"], self.name)
        return self._read


def _fingerprint(index: dict[str, Any]) -> str:
    return hashlib.sha256("\n".join(sorted(f"{a} {b}" for a, b in files_of(index))).encode()).hexdigest()
