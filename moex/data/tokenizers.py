"""Text to token ids and back: bytes, or any Hugging Face `tokenizer.json`."""

import functools
import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

END_OF_DOCUMENT = 0
BYTE_VOCAB_SIZE = 256


class Tokenizer(Protocol):
    """name: `bytes` or the file's.  digest: sha256 of what it does, so that corpora and runs can be compared.
    end: id that ends a document, or None.
    """

    name: str
    vocab_size: int
    digest: str
    end: int | None

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]: ...

    def decode(self, ids) -> str: ...


class Bytes:
    """One byte of UTF-8 a token; byte 0 ends a document."""

    name: str = "bytes"
    vocab_size: int = BYTE_VOCAB_SIZE
    digest: str = "bytes"
    end: int | None = END_OF_DOCUMENT

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, ids) -> str:
        """See `decode_bytes`."""
        return decode_bytes(ids)


class FromFile:
    """A `tokenizer.json`, by the package `tokenizers`.

    Args: content of the file. end_token ends documents; empty for none.
    Raises ValueError when the package is missing, the file isn't such a file, or end_token isn't one token of it.
    """

    def __init__(self, content: str, end_token: str = "", name: str = "tokenizer.json"):
        self.name, self.content, self.end_token = name, content, end_token
        self.digest = hashlib.sha256(content.encode()).hexdigest()
        self._tokenizer = _parse(content, name)
        self.vocab_size = self._tokenizer.get_vocab_size()
        self.end = self._tokenizer.token_to_id(end_token) if end_token else None
        if end_token and self.end is None:
            known = [t.content for t in self._tokenizer.get_added_tokens_decoder().values() if t.special]
            raise ValueError(f"{name} has no token {end_token!r}; its special tokens are {', '.join(known) or 'none'}")

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [
            np.asarray(one.ids, np.uint32)
            for one in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        ]

    def decode(self, ids) -> str:
        """Special tokens are shown; ids past the vocabulary read as U+FFFD."""
        known = [int(i) for i in np.asarray(ids).reshape(-1)]
        parts: list[str] = []
        run: list[int] = []
        for i in [*known, None]:
            if i is not None and 0 <= i < self.vocab_size:
                run.append(i)
                continue
            parts.append(self._tokenizer.decode(run, skip_special_tokens=False) if run else "")
            parts.append("\ufffd" if i is not None else "")
            run = []
        return "".join(parts)


@functools.lru_cache(maxsize=4)
def _parse(content: str, name: str) -> Any:
    try:
        from tokenizers import Tokenizer as Parsed
    except ImportError as error:
        raise ValueError(f"{name} needs the package tokenizers: install moex-jax[data]") from error
    try:
        return Parsed.from_str(content)
    except Exception as error:  # the package raises plain Exception
        raise ValueError(f"{name} is no tokenizer file of Hugging Face ({error})") from error


def decode_bytes(ids) -> str:
    """Text of a sequence of byte ids, int [n]; what is no byte or no UTF-8 reads as U+FFFD."""
    ids = np.asarray(ids, dtype=np.int64).reshape(-1)
    # 0xFF occurs in no UTF-8 text, so it marks ids that a model with a padded vocabulary may produce.
    known = np.where((ids >= 0) & (ids < BYTE_VOCAB_SIZE), ids, 0xFF)
    return known.astype(np.uint8).tobytes().decode("utf-8", errors="replace")
