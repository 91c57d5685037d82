"""Documents out of files: plain text, JSON lines, Parquet."""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

_LINES = (".jsonl", ".ndjson", ".jsonl.gz")
_COLUMNS = (".parquet",)
_ROWS_AT_ONCE = 4096


class Document(NamedTuple):
    """text: what is learned.  prompt: what it answers; part of the document, but not learned.  place: file and line."""

    text: str
    prompt: str
    place: str


def read_documents(inputs: Iterable[Path], field: str = "text", prompt_field: str = "") -> Iterator[Document]:
    """The documents of files, and of all files in folders, in order of their names.

    Lines of .jsonl, .ndjson and .jsonl.gz are objects, rows of .parquet likewise, whose `field` is a document's text, and
    whose `prompt_field`, if named, its prompt. Any other file is one document.
    Raises ValueError naming file and line for what cannot be read or lacks a field.
    """
    for path in _files(inputs):
        try:
            if path.name.endswith(_LINES):
                yield from _from_lines(path, field, prompt_field)
            elif path.name.endswith(_COLUMNS):
                yield from _from_columns(path, field, prompt_field)
            elif prompt_field:
                raise ValueError(
                    f"{path} is plain text, which has no field {prompt_field!r}; prompts need .jsonl or .parquet"
                )
            else:
                yield Document(path.read_text("utf-8"), "", str(path))
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 (byte {error.start}); convert it or leave it out") from error


def _files(inputs: Iterable[Path]) -> Iterator[Path]:
    for path in inputs:
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))
            if not found:
                raise ValueError(f"{path} is an empty folder")
            yield from found
        elif path.is_file():
            yield path
        else:
            raise ValueError(f"{path} does not exist")


def _from_lines(path: Path, field: str, prompt_field: str) -> Iterator[Document]:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:
                record = json.loads(line)
            except RecursionError:
                raise ValueError(f"{place}: JSON that is nested too deeply") from None
            except ValueError as error:
                raise ValueError(f"{place}: not JSON ({error})") from error
            yield _document(record, field, prompt_field, place)


def _from_columns(path: Path, field: str, prompt_field: str) -> Iterator[Document]:
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ValueError(f"{path} needs the package pyarrow: install moex-jax[data]") from error
    try:
        opened = ParquetFile(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no Parquet file: {error}") from error
    with opened as file:
        wanted = [name for name in (field, prompt_field) if name]
        if missing := [name for name in wanted if name not in file.schema_arrow.names]:
            raise ValueError(f"{path} has no column {missing[0]!r}; it has {', '.join(file.schema_arrow.names)}")
        number = 0
        for batch in file.iter_batches(_ROWS_AT_ONCE, columns=wanted):
            for record in batch.to_pylist():
                number += 1
                yield _document(record, field, prompt_field, f"{path}, row {number}")


def _document(record: object, field: str, prompt_field: str, place: str) -> Document:
    if not isinstance(record, dict):
        raise ValueError(f"{place}: must be an object, not {type(record).__name__}")
    return Document(_text(record, field, place), _text(record, prompt_field, place) if prompt_field else "", place)


def _text(record: dict, name: str, place: str) -> str:
    value = record.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{place}: no text under {name!r}; it has {', '.join(map(str, record))}")
    if value.encode("utf-8", "ignore").decode() != value:
        raise ValueError(f"{place}: {name!r} holds half a surrogate pair, which is no text")
    return value
