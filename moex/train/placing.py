"""From a loader's numpy arrays to a step's `Batch` on the mesh."""

import math
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from moex.layers.context import dealt
from moex.train.step import Batch


def host_rows(abstract: Batch) -> slice:
    """The rows of a micro-batch that this process's devices hold: what it has to read."""
    shape, sharding = abstract.ids.shape, abstract.ids.sharding
    slices = [index[1].indices(shape[1]) for index in sharding.addressable_devices_indices_map(shape).values()]
    return slice(min(s[0] for s in slices), max(s[1] for s in slices))


def place_batch(
    read: Callable[[slice], Mapping[str, np.ndarray]], step: int, abstract: Batch, deal: str = "row",
    groups: Sequence[int] = (),
) -> Batch:  # fmt: skip
    """Puts a step's rows on the devices, the sequence in zig-zag order where context parallelism splits it.

    Args: read returns, for a slice of rows, arrays `tokens labels mask segments positions` of shape [A, rows, S], and
    `experts` [A, rows, S, L, k] where the batch has recorded choices.  deal: see `moex.layers.context.dealt`; a step gives
    the same with either.  groups: for each micro-batch, over how many neighbouring ranks its documents lie; all without.
    """
    rows = host_rows(abstract)
    arrays = read(rows)
    segments, cp = arrays["segments"], _parts(abstract.ids.sharding, 2)
    lanes = [cp // group for group in groups] or [1] * len(segments)
    order = np.stack([dealt(micro, cp, deal, n) for micro, n in zip(segments, lanes, strict=True)])
    names = ("tokens", "labels", "mask", "segments", "positions", *["experts"] * (abstract.experts is not None))
    along = lambda x: order.reshape(*order.shape, *[1] * (x.ndim - order.ndim))
    arrays = {name: np.take_along_axis(arrays[name], along(arrays[name]), axis=2) for name in names}
    values = Batch(
        step=np.int32(step),
        ids=arrays["tokens"],
        labels=arrays["labels"],
        mask=arrays["mask"],
        segments=arrays["segments"],
        positions=arrays["positions"],
        index=order.astype(np.int32),
        experts=arrays.get("experts"),
    )

    def put(value: np.ndarray, like: jax.ShapeDtypeStruct) -> jax.Array:
        def part(where: tuple[slice, ...] | None) -> np.ndarray:
            if not where:
                return value
            start, stop, _ = where[1].indices(like.shape[1])
            return value[(where[0], slice(start - rows.start, stop - rows.start), *where[2:])]

        return jax.make_array_from_callback(like.shape, like.sharding, part, dtype=like.dtype)

    return jax.tree.map(put, values, abstract)


def _parts(sharding: jax.sharding.NamedSharding, dim: int) -> int:
    """Number of parts that a dim is split into."""
    axes = sharding.spec[dim] if dim < len(sharding.spec) else None
    names = axes if isinstance(axes, tuple) else (axes,) if axes else ()
    return math.prod(sharding.mesh.shape[name] for name in names)
