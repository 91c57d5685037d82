"""Streams a public checkpoint into sharded arrays, one tensor's part at a time.

The host holds one piece: a matrix of one layer, or of one expert. Each device's shard is made on the device and the pieces
are written into it there, so that no shard but a small one is ever a host array.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from moex.config import ModelConfig
from moex.hf.folder import Folder
from moex.hf.names import LAYOUTS, ROUTER_BIAS, Piece, pieces
from moex.layers import param
from moex.models.decoder import Decoder

Progress = Callable[[str, int, int], None]
"""Called after each piece with its tensor's name, its number from 1, and the number of pieces."""


SMALL_BYTES = 2**20
"""Shards up to this size are put together on the host, where writing a piece needs no compiled program."""


def check_tensors(folder: Folder, model: ModelConfig, family: str, *, left_out: Iterable[str] = ()) -> list[Piece]:
    """The pieces that the model is made of.

    left_out: names that may be there without being read. Raises ValueError that names every tensor that is missing,
    unexpected or of another shape than the configuration asks for.
    """
    wanted = pieces(model, family)
    shapes = public_shapes(model, wanted)
    found = folder.tensors
    missing = [name for name in shapes if name not in found]
    unexpected = [name for name in found if name not in shapes and name not in set(left_out)]
    wrong = [
        f"{name} {found[name].shape} (config.json: {shape})"
        for name, shape in shapes.items()
        if name in found and found[name].shape != shape
    ]
    odd = [
        f"{name} {found[name].dtype}"
        for name in shapes
        if name in found and found[name].dtype not in (np.float32, np.float16, ml_dtypes.bfloat16)
    ]
    problems = [f"{what}: {', '.join(names)}" for what, names in
                dict(missing=missing, unexpected=unexpected, shape=wrong, format=odd).items() if names]  # fmt: skip
    if problems:
        raise ValueError(f"{folder.path} doesn't hold the tensors of its config.json. " + "; ".join(problems))
    return wanted


def public_shapes(model: ModelConfig, wanted: Iterable[Piece]) -> dict[str, tuple[int, ...]]:
    """Shapes of the public tensors, in their order."""
    whole, leading, shapes = full_shapes(model), {}, {}
    for piece in wanted:
        top = leading.get(piece.tensor, ())
        leading[piece.tensor] = tuple(max(n, i + 1) for n, i in zip(top or piece.index, piece.index, strict=True))
        shapes[piece.tensor] = LAYOUTS[piece.how].public(_like(piece_shape(whole[piece.param], piece))).shape
    return {name: leading[name] + shape for name, shape in shapes.items()}


def full_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of all parameters by name, and of the router bias."""
    shapes: dict[str, tuple[int, ...]] = {ROUTER_BIAS: (model.num_routers, model.router.num_experts)}
    param.named_map(lambda name, d: shapes.update({name: d.full_shape}), Decoder(model).declarations)
    return shapes


def piece_shape(whole: tuple[int, ...], piece: Piece) -> tuple[int, ...]:
    """Shape of a piece of a parameter of this shape."""
    at = (*piece.at, *[slice(None)] * (len(whole) - len(piece.at)))
    return tuple(len(range(*s.indices(n))) for s, n in zip(at, whole, strict=True) if isinstance(s, slice))


def _like(shape: tuple[int, ...]) -> np.ndarray:
    """An array of a shape that takes no memory."""
    return np.broadcast_to(np.uint8(0), shape)


def load(
    folder: Folder, wanted: list[Piece], targets: Mapping[str, Any], progress: Progress, *, small_bytes: int = SMALL_BYTES
) -> dict[str, jax.Array]:  # fmt: skip
    """The parameters by name, float32, laid out as `targets` (anything with shape and sharding) says.

    What no piece fills is zero: rows past the vocabulary, and a router bias that a family doesn't have.
    """
    shards = {name: _Shards(tuple(x.shape), x.sharding, small_bytes) for name, x in targets.items()}
    for number, piece in enumerate(wanted, 1):
        target = shards[piece.param]
        read = functools.cache(lambda piece=piece, target=target: _own(folder, piece, target.shape))
        target.put(piece.at, read)
        progress(piece.tensor, number, len(wanted))
    return {name: target.joined() for name, target in shards.items()}


def _own(folder: Folder, piece: Piece, whole: tuple[int, ...]) -> np.ndarray:
    public = folder.read(piece.tensor, piece.index)
    return LAYOUTS[piece.how].own(public, piece_shape(whole, piece))


class _Shards:
    """An array in the making: one buffer for each of this process's devices, on the device or, a small one, on the host."""

    def __init__(self, shape: tuple[int, ...], sharding: jax.sharding.Sharding, small_bytes: int):
        self.shape, self.sharding = shape, sharding
        self.where = sharding.addressable_devices_indices_map(shape)
        local = sharding.shard_shape(shape)
        self.small = 4 * math.prod(local) <= small_bytes
        zeros = (lambda _: np.zeros(local, np.float32)) if self.small else functools.partial(_zeros, local)
        self.buffers: dict[jax.Device, Any] = {device: zeros(device) for device in self.where}

    def put(self, at: tuple[int | slice, ...], read: Callable[[], np.ndarray]) -> None:
        """Writes a piece into every shard that has some of it; `read` is called only if one does."""
        at = (*at, *[slice(None)] * (len(self.shape) - len(at)))
        for device, index in self.where.items():
            inside, starts = [], []  # the part of the piece that this shard has, and where in the shard it goes
            for own, part, size in zip(index or at, at, self.shape, strict=True):
                first, last, _ = own.indices(size) if isinstance(own, slice) else (own, own + 1, 1)
                low, high, _ = part.indices(size) if isinstance(part, slice) else (part, part + 1, 1)
                begin, end = max(first, low), min(last, high)
                starts.append(begin - first)
                inside.append((begin - low, end - low, isinstance(part, slice)))
            if any(end <= begin for begin, end, _ in inside):
                continue
            values = read()[tuple(slice(begin, end) for begin, end, kept in inside if kept)]
            shape = tuple(end - begin for begin, end, _ in inside)
            values = np.ascontiguousarray(values, np.float32).reshape(shape)
            if self.small:
                self.buffers[device][tuple(slice(a, a + n) for a, n in zip(starts, shape, strict=True))] = values
                continue
            place = [np.int32(n) for n in starts]
            self.buffers[device] = _written(self.buffers[device], jax.device_put(values, device), place)

    def joined(self) -> jax.Array:
        parts = [jax.device_put(x, device) for device, x in self.buffers.items()]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, parts)


def _zeros(shape: tuple[int, ...], device: jax.Device) -> jax.Array:
    return jax.jit(lambda: jnp.zeros(shape, jnp.float32), out_shardings=jax.sharding.SingleDeviceSharding(device))()


@functools.partial(jax.jit, donate_argnums=0)
def _written(buffer, values, place):
    return lax.dynamic_update_slice(buffer, values, place)
