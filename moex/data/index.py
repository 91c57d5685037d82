"""The index of a corpus: what files it is made of, read with every field checked."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from moex.data.tokenizers import Bytes
from moex.data.tokens import TOKEN_DTYPES
from moex.observe.jsonl import read_object

INDEX, FORMAT = "index.json", 1
SPLITS = ("train", "held_out")
_MOST = 2**53


def path_of(location: str) -> Any:
    """A local or remote path, by the library that orbax and grain use.  Raises ValueError where that lacks a package."""
    from etils import epath  # tenths of a second

    try:
        path = epath.Path(location)
        path.exists()
    except (ImportError, ValueError) as error:
        raise ValueError(f"{location!r} is no path that can be opened here: {error}") from error
    return path


def read_index(location: str) -> dict[str, Any]:
    """The index of a corpus.  Raises ValueError when there is none, one of another format, or one with a wrong field."""
    path = path_of(location) / INDEX
    if not path.exists():
        raise ValueError(
            f"{location} has no {INDEX}: give a folder that `python -m moex.data tokenize` has finished writing"
        )
    index = read_object(path)
    if index.get("format") != FORMAT:
        raise ValueError(f"{path} is of format {index.get('format')!r}, this version reads {FORMAT}: tokenise again")
    _check(index, _INDEX, str(path))
    for split in index["splits"].values():
        if not split["num_bytes"] and any(shard["num_tokens"] for shard in split["shards"]):
            raise ValueError(f"{path}: a split with tokens has num_bytes 0")
    if index["tokenizer"]["name"] != Bytes.name and not {"file", "end_token"} <= index["tokenizer"].keys():
        raise ValueError(f"{path}: tokenizer: it is not {Bytes.name}, so file and end_token are needed")
    return index


def files_of(index: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(file, sha256) of all that an index names."""
    for split in index["splits"].values():
        yield split["counts"]["file"], split["counts"]["sha256"]
        for shard in split["shards"]:
            yield from ((shard[name]["file"], shard[name]["sha256"]) for name in _FILES if name in shard)
    if "file" in index["tokenizer"]:
        yield index["tokenizer"]["file"], index["tokenizer"]["sha256"]


class _Is(NamedTuple):
    """A field's rule, in words and as a test."""

    words: str
    holds: Callable[[Any], bool]


class _Maybe(NamedTuple):
    """A field that may be missing."""

    rule: Any


def _whole(least: int, most: int = _MOST) -> Callable[[Any], bool]:
    return lambda x: isinstance(x, int) and not isinstance(x, bool) and least <= x <= most


def _plain(x: Any) -> bool:
    return isinstance(x, str) and x not in ("", ".", "..") and not set(x) & set("/\\\0")


_TEXT = _Is("text", lambda x: isinstance(x, str))
_NAME = _Is("a plain file name", _plain)
_COUNT = _Is("a whole number, at least 0", _whole(0))
_FILE = dict(file=_NAME, sha256=_TEXT)
_FILES = ("tokens", "starts", "learned")
_SHARD = dict(num_tokens=_COUNT, num_documents=_COUNT, tokens=_FILE, starts=_FILE, learned=_Maybe(_FILE))
_SPLIT = dict(num_bytes=_COUNT, counts=_FILE, shards=[_SHARD])
_TOKENIZER = dict(
    name=_TEXT, sha256=_TEXT, end=_Is("an id or null", lambda x: x is None or _whole(0)(x)), file=_Maybe(_NAME),
    end_token=_Maybe(_TEXT),
)  # fmt: skip
_INDEX = dict(
    dtype=_Is("a type of token ids", lambda x: x in [np.dtype(d).name for d in TOKEN_DTYPES]),
    vocab_size=_Is("a number of ids", _whole(1, 2**32)), tokenizer=_TOKENIZER,
    splits=dict(train=_SPLIT, held_out=_Maybe(_SPLIT)),
)  # fmt: skip


def _check(value: Any, rule: Any, where: str) -> None:
    """Raises ValueError that names the first field which isn't as the rule says."""
    if isinstance(rule, _Is):
        if not rule.holds(value):
            raise ValueError(f"{where} is {str(value)[:60]!r}, it must be {rule.words}")
    elif isinstance(rule, list):
        if not isinstance(value, list):
            raise ValueError(f"{where} must be a list")
        for number, one in enumerate(value):
            _check(one, rule[0], f"{where}[{number}]")
    elif not isinstance(value, dict):
        raise ValueError(f"{where} must be an object")
    else:
        for name, inside in rule.items():
            if name in value:
                _check(value[name], inside.rule if isinstance(inside, _Maybe) else inside, f"{where}: {name}")
            elif not isinstance(inside, _Maybe):
                raise ValueError(f"{where} has no {name}")
