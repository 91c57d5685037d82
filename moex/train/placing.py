"""From a loader's numpy arrays to a step's `Batch` on the mesh."""

from collections.abc import Callable, Mapping

import jax
import numpy as np

from moex.train.step import Batch


def host_rows(abstract: Batch) -> slice:
    """The rows of a micro-batch that this process's devices hold: what it has to read."""
    shape, sharding = abstract.ids.shape, abstract.ids.sharding
    slices = [index[1].indices(shape[1]) for index in sharding.addressable_devices_indices_map(shape).values()]
    return slice(min(s[0] for s in slices), max(s[1] for s in slices))


def place_batch(read: Callable[[slice], Mapping[str, np.ndarray]], step: int, abstract: Batch) -> Batch:
    """Puts a step's rows on the devices.

    Args: read returns, for a slice of rows, arrays `tokens labels mask segments positions` of shape [A, rows, S].
    """
    rows = host_rows(abstract)
    arrays = read(rows)
    index = np.arange(abstract.ids.shape[2], dtype=np.int32)
    values = Batch(
        step=np.int32(step),
        ids=arrays["tokens"],
        labels=arrays["labels"],
        mask=arrays["mask"],
        segments=arrays["segments"],
        positions=arrays["positions"],
        index=np.broadcast_to(index, arrays["tokens"].shape),
    )

    def put(value: np.ndarray, like: jax.ShapeDtypeStruct) -> jax.Array:
        def part(where: tuple[slice, ...]) -> np.ndarray:
            if not where:
                return value
            start, stop, _ = where[1].indices(like.shape[1])
            return value[(where[0], slice(start - rows.start, stop - rows.start), where[2])]

        return jax.make_array_from_callback(like.shape, like.sharding, part, dtype=like.dtype)

    return jax.tree.map(put, values, abstract)
