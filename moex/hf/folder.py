"""A public checkpoint's folder: its configuration, and its tensors as numbers whatever format they are stored in.

Nothing in the folder is executed, and nothing outside it is read: an index names plain files.
FP8: a tensor X in E4M3 with `X_scale_inv`, one factor for each block of rows and columns (DeepSeek-V3).  MXFP4: `X_blocks`
with two 4-bit floats a byte and `X_scales` with one power of two for 32 of them (gpt-oss; OCP microscaling formats 1.0).
"""

from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import NamedTuple

import ml_dtypes
import numpy as np

from moex.hf import storage
from moex.hf.storage import Stored
from moex.observe.jsonl import read_object

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
CARRIED = (
    "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "special_tokens_map.json", "vocab.json", "merges.txt", "added_tokens.json", "chat_template.json",
    "chat_template.jinja", "preprocessor_config.json",
)  # fmt: skip
"""Files beside the weights that an exported folder gets as they are."""
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


class Described(NamedTuple):
    """A tensor as numbers. stored: what it is made of, by role ("" plain; "scale_inv"; "blocks", "scales")."""

    shape: tuple[int, ...]
    stored: dict[str, Stored]

    @property
    def dtype(self) -> np.dtype:
        """What an exported file keeps the numbers in: their own format, BF16 for what was quantised."""
        return self.stored[""].dtype if len(self.stored) == 1 else np.dtype(ml_dtypes.bfloat16)

    @property
    def num_bytes(self) -> int:
        return sum(stored.num_bytes for stored in self.stored.values())


class Folder:
    """A checkpoint folder.  config: its config.json.  tensors: `Described` by name.

    Raises ValueError, naming file or tensor, for what is missing, unsafe or contradictory.
    """

    def __init__(self, path: Path):
        self.path = path
        if not path.is_dir():
            raise ValueError(f"{path} is no folder")
        self.config = read_object(path / "config.json")
        quantised = self.config.get("quantization_config") or {}
        block = quantised.get("weight_block_size") or (128, 128)
        whole = lambda x: isinstance(x, int) and not isinstance(x, bool) and x > 0
        if not isinstance(block, list | tuple) or len(block) != 2 or not all(map(whole, block)):
            raise ValueError(
                f"{path / 'config.json'}: quantization_config.weight_block_size={block!r} must be two numbers above 0"
            )
        self.block = tuple(block)
        if (method := quantised.get("quant_method", "fp8")) not in ("fp8", "mxfp4"):
            raise ValueError(
                f"{path / 'config.json'}: quantization_config.quant_method={method!r} must be fp8 or mxfp4"
            )
        self.tensors = self._described(_tensors(path))

    def _described(self, stored: dict[str, Stored]) -> dict[str, Described]:
        found = {}
        for name, tensor in stored.items():
            base, _, role = name.rpartition("_")
            if name.endswith("_scale_inv") or (role == "scales" and f"{base}_blocks" in stored):
                continue  # part of another tensor; whether that is there is checked below
            if role == "blocks":
                if f"{base}_scales" not in stored:
                    raise ValueError(f"{tensor.file}: {name} is there, but {base}_scales is not")
                scales = stored[f"{base}_scales"]
                *lead, rows, groups, half = tensor.shape
                if (
                    half != 16
                    or scales.shape != tensor.shape[:-1]
                    or {tensor.dtype, scales.dtype} != {np.dtype(np.uint8)}
                ):
                    raise ValueError(f"{name} {tensor.shape} and {base}_scales {scales.shape} are no MXFP4 pair")
                found[base] = Described((*lead, groups * 32, rows), dict(blocks=tensor, scales=scales))
            elif tensor.dtype.itemsize == 1:
                if (scale := stored.get(f"{name}_scale_inv")) is None:
                    raise ValueError(f"{tensor.file}: {name} is {tensor.dtype} without {name}_scale_inv")
                expected = tuple(-(-n // block) for n, block in zip(tensor.shape, self.block, strict=True))
                if scale.shape != expected:
                    raise ValueError(
                        f"{name}_scale_inv has shape {scale.shape}; {tensor.shape} in blocks of {self.block} needs {expected}"
                    )
                found[name] = Described(tensor.shape, {"": tensor, "scale_inv": scale})
            else:
                found[name] = Described(tensor.shape, {"": tensor})
        if orphans := [n for n in stored if n.endswith("_scale_inv") and "scale_inv" not in
                       getattr(found.get(n.removesuffix("_scale_inv")), "stored", {})]:  # fmt: skip
            raise ValueError(f"{self.path} has scales without a tensor that they belong to: {orphans}")
        return found

    def read(self, name: str, index: tuple[int, ...] = ()) -> np.ndarray:
        """The tensor's numbers, or those at numbers of its leading dims; float32 where it was quantised."""
        tensor = self.tensors[name]
        if "blocks" in tensor.stored:
            return mxfp4(*(storage.read(tensor.stored[role], index) for role in ("blocks", "scales")))
        values = storage.read(tensor.stored[""], index)
        if "scale_inv" not in tensor.stored:
            return values
        return block_scaled(values, storage.read(tensor.stored["scale_inv"]), self.block)


def mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """uint8 blocks [..., rows, groups, 16] and exponents [..., rows, groups] -> float32 [..., 32 groups, rows].

    A byte has the earlier number in its low half; the exponent is biased by 127, 255 is not a number. Rows become columns.
    """
    pairs = np.stack([_FP4[blocks & 15], _FP4[blocks >> 4]], axis=-1).reshape(*blocks.shape[:-1], 32)
    exponents = np.where(scales == 255, 0, scales.astype(np.int32) - 127)
    factors = np.where(scales == 255, np.float32(np.nan), np.ldexp(np.float32(1), exponents))
    with np.errstate(over="ignore"):  # 6 x 2^127 is infinite in float32
        values = pairs * factors[..., None]
    return values.reshape(*values.shape[:-2], -1).swapaxes(-1, -2)


def block_scaled(codes: np.ndarray, scales: np.ndarray, block: tuple[int, ...]) -> np.ndarray:
    """Codes [M, N] times one float32 factor for each block, the last ones possibly cut short: float32 [M, N]."""
    factors = scales.astype(np.float32)
    for dim, size in enumerate(block):
        factors = np.repeat(factors, size, axis=dim)
    return codes.astype(np.float32) * factors[tuple(slice(n) for n in codes.shape)]


def _tensors(path: Path) -> dict[str, Stored]:
    if not (path / INDEX).is_file():
        if not (path / SINGLE).is_file():
            raise ValueError(f"{path} has neither {INDEX} nor {SINGLE}; other formats of weights are not read")
        return storage.contents(path / SINGLE)
    places = read_object(path / INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(x, str) for x in places.values()):
        raise ValueError(f"{path / INDEX} has no weight_map of tensors' files")
    stored: dict[str, Stored] = {}
    for name in sorted(set(places.values())):
        if name in ("", ".", "..") or PurePosixPath(name).name != name or PureWindowsPath(name).name != name:
            raise ValueError(f"{path / INDEX} names the file {name!r}, which is not a plain name in its folder")
        if not (path / name).is_file():
            raise ValueError(f"{path} has no file {name}, which its index names")
        inside = storage.contents(path / name)
        expected = {tensor for tensor, file in places.items() if file == name}
        if inside.keys() != expected:
            odd = sorted(inside.keys() ^ expected)
            raise ValueError(f"{path / name} and the index don't name the same tensors: {_some(odd)}")
        stored |= inside
    return stored


def _some(names) -> str:
    """A few of many names."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
