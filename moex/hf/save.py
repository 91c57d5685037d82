"""Writes parameters as a public checkpoint: names, formats, files and their order depend on nothing but the model.

One parameter is on the host at a time; its pieces go to their places in the files.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from moex.config import ModelConfig
from moex.hf import storage
from moex.hf.folder import CARRIED, INDEX, SINGLE
from moex.hf.load import Progress, public_shapes
from moex.hf.made import check_empty, whole_or_nothing
from moex.hf.names import LAYOUTS, ROUTER_BIAS, Piece, pieces
from moex.hf.storage import Stored

SHARD_BYTES = 5_000_000_000
"""Most bytes of a file; a tensor that is larger has one of its own."""


def formats(wanted: Iterable[Piece], dtype: str, kept: Mapping[str, str]) -> dict[str, np.dtype]:
    """Number format of each public tensor: the one it had when it was imported, or `dtype`; balancing biases are float32.

    Args: dtype as in config.json ("bfloat16"); kept: format names of `storage.DTYPES` by tensor.
    """
    known = dict(bfloat16=np.dtype(ml_dtypes.bfloat16), float32=np.dtype(np.float32), float16=np.dtype(np.float16))
    if dtype not in known:
        raise ValueError(f"dtype={dtype!r} must be one of {', '.join(known)}")
    found = {}
    for piece in wanted:
        usual = np.dtype(np.float32) if piece.param == ROUTER_BIAS else known[dtype]
        found[piece.tensor] = storage.DTYPES[kept[piece.tensor]] if piece.tensor in kept else usual
    return found


def write_folder(
    folder: Path, model: ModelConfig, family: str, config: Mapping[str, Any], parameter: Callable[[str], np.ndarray], *,
    kept: Mapping[str, str], carry_from: Path | None, progress: Progress, shard_bytes: int = SHARD_BYTES,
) -> None:  # fmt: skip
    """Writes weights, index, config.json and what is carried along.

    Args:
      config: the public configuration; its `dtype` (or `torch_dtype`) is the format of tensors that `kept` doesn't name.
      parameter: gives a whole parameter by its name, float32; called once for each.
      carry_from: folder whose tokenizer files are copied.
    Raises ValueError when the folder holds anything already, or a value is not finite in its tensor's format.
    """
    check_empty(folder)
    wanted = pieces(model, family)
    dtypes = formats(wanted, config.get("dtype") or config.get("torch_dtype") or "bfloat16", kept)
    with whole_or_nothing(folder):
        places = deal(folder, public_shapes(model, wanted), dtypes, shard_bytes)
        order = sorted(range(len(wanted)), key=lambda i: (wanted[i].param, i))
        name, whole = "", np.empty(0)
        for number, i in enumerate(order, 1):
            piece = wanted[i]
            if piece.param != name:
                name, whole = piece.param, parameter(piece.param)
            values = LAYOUTS[piece.how].public(whole[piece.at])
            storage.write(places[piece.tensor], _converted(values, dtypes[piece.tensor], piece.tensor), piece.index)
            progress(piece.tensor, number, len(order))
        _finish(folder, places, config, carry_from)


def _converted(values: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    converted = values.astype(dtype)
    if not np.isfinite(converted.astype(np.float32)).all():
        raise ValueError(f"{name} has values that are not finite in {dtype}: largest {np.abs(values).max():g}")
    return converted


def deal(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, np.dtype], shard_bytes: int
) -> dict[str, Stored]:
    """Deals tensors to files in their public order, and makes the files."""
    files: list[list[str]] = [[]]
    used = 0
    for name, shape in shapes.items():
        size = int(np.prod(shape)) * dtypes[name].itemsize
        if files[-1] and used + size > shard_bytes:
            files.append([])
            used = 0
        files[-1].append(name)
        used += size
    places: dict[str, Stored] = {}
    for number, names in enumerate(files, 1):
        file = SINGLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        places |= storage.create(folder / file, [(name, dtypes[name], shapes[name]) for name in names])
    return places


def _finish(folder: Path, places: Mapping[str, Stored], config: Mapping[str, Any], carry_from: Path | None) -> None:
    if len({place.file for place in places.values()}) > 1:
        total = sum(place.num_bytes for place in places.values())
        index = dict(metadata=dict(total_size=total), weight_map={n: p.file.name for n, p in sorted(places.items())})
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in CARRIED:
        if carry_from is not None and (carry_from / name).is_file():
            shutil.copyfile(carry_from / name, folder / name)
