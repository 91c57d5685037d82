"""Safetensors files: headers, parts of tensors by their offset, and writing tensors into their places.

The format (huggingface/safetensors): 8 bytes with the header's length, little-endian; the header, JSON; the tensors' bytes.
The library's NumPy side knows no 8-bit floats and neither reads nor writes a part of a file, so both are here.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

DTYPES = {
    "F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16), "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2), "I64": np.dtype(np.int64), "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16), "I8": np.dtype(np.int8), "U8": np.dtype(np.uint8), "BOOL": np.dtype(np.bool_),
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LONGEST_HEADER = 100_000_000


class Stored(NamedTuple):
    """Where a tensor lies: `offset` bytes into the file."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def contents(file: Path) -> dict[str, Stored]:
    """The tensors of a file by name.  Raises ValueError when the header is not one, or says what the file cannot hold."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > min(size - 8, _LONGEST_HEADER):
            raise ValueError(f"{file} is no safetensors file: its header would have {length} bytes of {size}")
        try:
            header = json.loads(opened.read(length))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file} has a header that cannot be read: {error}") from error
    if not isinstance(header, dict):
        raise ValueError(f"{file} has a header that cannot be read: no JSON object")
    entries = {name: _stored(file, name, entry, 8 + length) for name, entry in header.items() if name != "__metadata__"}
    at = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if entry.offset != at:
            raise ValueError(f"{file}: {name} begins at byte {entry.offset}, where {at} is expected")
        at += entry.num_bytes
    if at != size:
        raise ValueError(f"{file} has {size} bytes, its header speaks of {at}: it was cut off or changed")
    return entries


def _stored(file: Path, name: str, entry: Any, base: int) -> Stored:
    numbers = lambda x: isinstance(x, list) and all(isinstance(n, int) and not isinstance(n, bool) for n in x)
    given: dict[str, Any] = entry if isinstance(entry, dict) else {}
    shape, offsets = (given.get(field, 0) for field in ("shape", "data_offsets"))
    if not numbers(shape) or not numbers(offsets) or len(offsets) != 2:
        raise ValueError(f"{file}: {name} has no shape and data_offsets of whole numbers: {str(entry)[:200]}")
    if given.get("dtype") not in list(DTYPES):
        raise ValueError(f"{file}: {name}: number format {given.get('dtype')} is none of {', '.join(DTYPES)}")
    start, end = offsets
    stored = Stored(file, DTYPES[given["dtype"]], tuple(shape), base + start)
    if min(shape, default=1) < 0 or start < 0 or end - start != stored.num_bytes:
        raise ValueError(f"{file}: {name}: {str(entry)[:200]} has not the bytes of its shape")
    return stored


def read(stored: Stored, index: tuple[int, ...] = ()) -> np.ndarray:
    """The tensor, or its part at these numbers of its leading dims; only that part is read."""
    shape = stored.shape[len(index) :]
    number = int(np.ravel_multi_index(index, stored.shape[: len(index)])) if index else 0
    count = math.prod(shape)
    offset = stored.offset + number * count * stored.dtype.itemsize
    return np.fromfile(stored.file, stored.dtype, count, offset=offset).reshape(shape)


def create(file: Path, tensors: Sequence[tuple[str, np.dtype, tuple[int, ...]]]) -> dict[str, Stored]:
    """Writes a file with room for the tensors, in this order, and says where each goes."""
    header: dict = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, shape in tensors:
        end = at + math.prod(shape) * dtype.itemsize
        header[name] = dict(dtype=NAMES[dtype], shape=list(shape), data_offsets=[at, end])
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        opened.truncate(8 + len(text) + at)
    return contents(file)


def write(stored: Stored, values: np.ndarray, index: tuple[int, ...] = ()) -> None:
    """Puts values, of the stored dtype, where `read` finds them."""
    assert values.dtype == stored.dtype and values.shape == stored.shape[len(index) :], (values.dtype, values.shape)
    number = int(np.ravel_multi_index(index, stored.shape[: len(index)])) if index else 0
    with stored.file.open("r+b") as opened:
        opened.seek(stored.offset + number * values.nbytes)
        opened.write(np.ascontiguousarray(values).tobytes())
