"""Strict JSON, one object a line: what is written here any JSON parser can read, NaN included.

Writers end every line with a newline, so a last line without one that does not parse is torn: the process died in it.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Line(NamedTuple):
    """A line of a file that parsed."""

    number: int  # 1 is the first
    raw: bytes  # as it is in the file, newline included
    record: dict


def encode(record: Mapping[str, object]) -> bytes:
    """One record as one line of strict JSON, newline included.

    NumPy scalars and arrays (and whatever converts to an array) become numbers and lists, paths become text. NaN and
    infinities become null, and the names of the fields that held them are added as the list `non_finite`: dotted for a
    field of a nested object, the list's own name for an element of a list.
    Raises: TypeError naming the field when a value has no JSON form; ValueError when the record has a `non_finite`.
    """
    if "non_finite" in record:
        raise ValueError("field 'non_finite' is written by the log itself; choose another name")
    non_finite: list[str] = []
    plain = {_key(name, ""): _plain(value, name, non_finite) for name, value in record.items()}
    if non_finite:
        plain["non_finite"] = list(dict.fromkeys(non_finite))
    return json.dumps(plain, allow_nan=False, separators=(", ", ": ")).encode("ascii") + b"\n"


def _key(name: object, field: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"field '{field}': the key {name!r} is not text")
    return name


def _plain(value: object, field: str, non_finite: list[str]) -> object:
    """The JSON form of one value; adds `field` to `non_finite` for each NaN or infinity replaced by None."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        non_finite.append(field)
        return None
    if isinstance(value, Mapping):
        return {_key(key, field): _plain(item, f"{field}.{key}", non_finite) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, field, non_finite) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "__array__"):
        return _plain_array(np.asarray(value), field, non_finite)
    raise TypeError(f"field '{field}': {type(value).__name__} has no JSON form; pass numbers, text, lists or arrays")


def _plain_array(array: np.ndarray, field: str, non_finite: list[str]) -> object:
    if array.dtype.kind in "biuU":
        return array.tolist()
    try:
        floats = array.astype(
            np.float64, casting="safe"
        )  # reaches bfloat16 and the FP8 types, refuses complex and objects
    except TypeError:
        raise TypeError(f"field '{field}': an array of {array.dtype} has no JSON form") from None
    if np.isfinite(floats).all():
        return floats.tolist()
    return _plain(floats.tolist(), field, non_finite)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def decode(raw: bytes) -> dict:
    """The object on one line. Raises ValueError, with the reason, for anything but one strict JSON object."""
    return _object(raw, parse_constant=_no_constant)


def read_object(path: Any) -> dict[str, Any]:
    """The JSON object that a file holds, local or remote.  Raises ValueError naming the file for anything else."""
    try:
        return _object(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{path} holds no JSON object: {error}") from error


def _object(raw: bytes, **options: Any) -> dict:
    try:
        value = json.loads(raw.decode("utf-8"), **options)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__}, not an object")
    return value


def iter_lines(path: str | Path) -> Iterator[Line]:
    """The lines of a file in order; a torn last one is left out.

    Raises: ValueError naming file and line number for every other broken line, or a file that can't be read;
    FileNotFoundError.
    """
    if Path(path).is_dir():
        raise ValueError(f"{path} is a folder, where a file of lines is expected")
    with Path(path).open("rb") as file:
        for number, raw in enumerate(file, 1):
            try:
                record = decode(raw)
            except ValueError as error:
                if not raw.endswith(b"\n"):
                    return
                raise ValueError(
                    f"{path}, line {number}: broken ({error}). Only a torn last line can be passed over; "
                    "restore the file or delete this line."
                ) from error
            yield Line(number, raw, record)


def read_jsonl(path: str | Path) -> list[dict]:
    """All records of a file; a torn last line is left out. Raises as `iter_lines`."""
    return [line.record for line in iter_lines(path)]


def replace_file(path: Path, content: bytes) -> None:
    """Gives `path` this content or leaves it as it was, never in between, should the process die."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
