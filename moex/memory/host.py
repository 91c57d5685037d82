"""Pinned memory of the host, as a place for arrays that a step doesn't need for most of its time."""

import jax
from jax import lax
from jax.sharding import NamedSharding

KIND = "pinned_host"


def on_host(sharding: NamedSharding) -> NamedSharding:
    """The same split, in the memory of each device's host."""
    placed = sharding.with_memory_kind(KIND)
    if placed.memory_kind is not None:
        return placed
    # GPUs that aren't there, for which a step is compiled, have no memories; a mesh without devices asks for none.
    return NamedSharding(sharding.mesh.abstract_mesh, sharding.spec, memory_kind=KIND)


def brought(tree, after):
    """Arrays of the host on the device, inside a jitted function, not before `after` (a tree) is known: without that
    XLA starts with such copies, and they would be there all the time.  Returns (tree on the device, `after`).
    """
    after, tree = lax.optimization_barrier((after, tree))
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), tree), after


def sent_back(tree, like):
    """Each array to the memory that the one of `like` was in."""
    return jax.tree.map(lambda x, old: jax.device_put(x, jax.typeof(old).memory_space), tree, like)
