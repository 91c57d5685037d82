"""A number for an array's bits, equal on every mesh: what a checkpoint is compared with when it is read again."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def checksums(tree: Any) -> dict[str, int]:
    """Name of each array in a tree -> `checksum`, as Python numbers.  One program, one number a leaf to the host."""
    named = {name_of(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}
    return {name: int(number) for name, number in jax.device_get(_all(named)).items()}


def name_of(path: tuple[Any, ...]) -> str:
    """A leaf's place in a tree of dicts, sequences and named tuples, joined by dots."""
    return ".".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


def checksum(x) -> jax.Array:
    """Sum modulo 2^32 of the elements' bits times odd numbers that grow with their place, uint32.

    A sum of integers has no order, so how the array is split changes nothing; an odd factor keeps every changed bit, and
    growing ones see elements that changed places.
    """
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")) if x.dtype != jnp.bool_ else x
    place = jnp.zeros(x.shape, jnp.uint32)
    for dim in range(x.ndim):
        stride = jnp.uint32(math.prod(x.shape[dim + 1 :]) & 0xFFFFFFFF)
        place += lax.broadcasted_iota(jnp.uint32, x.shape, dim) * stride
    return jnp.sum(bits.astype(jnp.uint32) * (2 * place + 1), dtype=jnp.uint32)


@jax.jit
def _all(named: dict[str, Any]) -> dict[str, Any]:
    here = lambda x: jax.device_put(x, jax.memory.Space.Device)  # moments may lie on the host
    return {name: checksum(here(x)) for name, x in named.items()}
