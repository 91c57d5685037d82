"""Writes a corpus: documents to shards of token ids and an index (see `moex.data.shards`)."""

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from moex.data.documents import Document
from moex.data.index import FORMAT, INDEX, SPLITS, path_of
from moex.data.tokenizers import FromFile, Tokenizer
from moex.data.tokens import TOKEN_DTYPES

_DOCUMENTS_AT_ONCE = 512
_HASHED = 1 << 32


def write_corpus(
    documents: Iterable[Document], location: str, tokenizer: Tokenizer, *, held_out: float = 0.0,
    shard_tokens: int = 1 << 28, prompts: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Tokenises documents into `location`, a local or remote folder, and returns the index.

    A document's ids are those of its prompt, its text and the tokenizer's end. held_out is the share of documents kept for
    evaluation, chosen by a hash of the text, so that copies of a document stay on one side. A shard ends with the document
    that brings it to shard_tokens. prompts: some documents have one, so that a shard says of each token whether it is to be
    learned. Memory holds some hundred documents and a shard's offsets.
    Raises ValueError for arguments out of range, a folder with a corpus in it, and documents that give no token to train.
    """
    if not 0 <= held_out < 1 or shard_tokens < 1:
        raise ValueError(f"held_out={held_out} must be at least 0 and below 1, shard_tokens={shard_tokens} at least 1")
    folder = path_of(location)
    if (folder / INDEX).exists():
        raise ValueError(f"{location} holds a corpus already: give another folder")
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    writers: list[_SplitWriter] = []
    try:
        return _write(documents, folder, tokenizer, writers, held_out, shard_tokens, prompts)
    except BaseException:  # what is half written is of no use, and would be taken for a corpus that is still written
        for path in (path for writer in writers for path in writer.discard()):
            path.unlink()
        if new:
            folder.rmdir()
        raise


def _write(documents, folder, tokenizer, writers, held_out, shard_tokens, prompts) -> dict[str, Any]:
    """The files, and the index last.  writers: gets those that write."""
    dtype = next(d for d in map(np.dtype, TOKEN_DTYPES) if np.iinfo(d).max >= tokenizer.vocab_size - 1)
    size = tokenizer.vocab_size
    writers += [_SplitWriter(folder, name, dtype, size, shard_tokens, prompts) for name in SPLITS]
    for some in itertools.batched((d for d in documents if d.text.strip()), _DOCUMENTS_AT_ONCE):
        texts = tokenizer.encode([document.text for document in some])
        before = tokenizer.encode([document.prompt for document in some])
        for document, text, prompt in zip(some, texts, before, strict=True):
            writers[_hash(document) < held_out * _HASHED].add(document, prompt, text, tokenizer.end)
    splits = {name: one.close() for name, one in zip(SPLITS, writers, strict=True) if one.num_documents}
    if "train" not in splits:
        raise ValueError("no document with text is left to train on: check the inputs, the field and held_out")
    index = dict(
        format=FORMAT,
        dtype=dtype.name,
        vocab_size=tokenizer.vocab_size,
        tokenizer=_about(folder, tokenizer),
        splits=splits,
    )
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    return index


def _hash(document: Document) -> int:
    return int.from_bytes(hashlib.sha256((document.prompt + document.text).encode()).digest()[:4], "big")


def _about(folder: Any, tokenizer: Tokenizer) -> Mapping[str, Any]:
    about = dict(name=tokenizer.name, sha256=tokenizer.digest, end=tokenizer.end)
    if not isinstance(tokenizer, FromFile):
        return about
    (folder / "tokenizer.json").write_text(tokenizer.content)
    return about | dict(file="tokenizer.json", end_token=tokenizer.end_token)


class _File:
    """A file that is hashed as it is written."""

    def __init__(self, path: Any):
        self.path, self._digest, self._file = path, hashlib.sha256(), path.open("wb")

    def write(self, array: np.ndarray) -> None:
        data = np.ascontiguousarray(array).data
        self._digest.update(data)
        self._file.write(data)

    def close(self) -> dict[str, str]:
        self._file.close()
        return dict(file=self.path.name, sha256=self._digest.hexdigest())


class _SplitWriter:
    """Appends documents to one split's shards."""

    def __init__(self, folder: Any, split: str, dtype: np.dtype, vocab_size: int, shard_tokens: int, prompts: bool):
        self.folder, self.split, self.dtype, self.shard_tokens = folder, split, dtype.newbyteorder("<"), shard_tokens
        self.counts_V, self.prompts = np.zeros(vocab_size, np.int64), prompts
        self.num_documents, self.num_bytes = 0, 0
        self._shards: list[dict[str, Any]] = []
        self._starts: list[int] = []
        self._files: dict[str, _File] = {}
        self._written: list[Any] = []

    def add(self, document: Document, prompt: np.ndarray, text: np.ndarray, end: int | None) -> None:
        if not self._files:
            self._starts = [0]
            self._files = {kind: self._of_shard(kind) for kind in ("tokens", *["learned"] * self.prompts)}
        ids = np.concatenate([prompt, text, [] if end is None else [end]]).astype(self.dtype)
        self._files["tokens"].write(ids)
        if self.prompts:
            self._files["learned"].write((np.arange(len(ids)) >= len(prompt)).astype(np.uint8))
        self._starts.append(self._starts[-1] + len(ids))
        self.counts_V += np.bincount(ids, minlength=len(self.counts_V))
        self.num_documents += 1
        self.num_bytes += len((document.prompt + document.text).encode())
        if self._starts[-1] >= self.shard_tokens:
            self._finish()

    def close(self) -> dict[str, Any]:
        """Ends the last shard.  Returns what the index says of the split."""
        self._finish()
        counts = self._file(f"{self.split}.counts")
        counts.write(self.counts_V.astype("<i8"))
        return dict(
            num_tokens=int(self.counts_V.sum()), num_documents=self.num_documents, num_bytes=self.num_bytes,
            counts=counts.close(), shards=self._shards,
        )  # fmt: skip

    def discard(self) -> list[Any]:
        """Closes everything, and returns the files that are there."""
        for file in self._files.values():
            file.close()
        return self._written

    def _of_shard(self, kind: str) -> _File:
        return self._file(f"{self.split}-{len(self._shards):05}.{kind}")

    def _file(self, name: str) -> _File:
        file = _File(self.folder / name)
        self._written.append(file.path)
        return file

    def _finish(self) -> None:
        if not self._files:
            return
        starts = self._of_shard("starts")
        starts.write(np.array(self._starts, "<i8"))
        parts = {kind: file.close() for kind, file in (self._files | {"starts": starts}).items()}
        self._shards.append(dict(num_tokens=self._starts[-1], num_documents=len(self._starts) - 1) | parts)
        self._files = {}
