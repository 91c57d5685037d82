"""Types of manual axes for kernels: arrays in a shard_map carry over which mesh axes their values differ.

An op makes all its arguments varying over the union of their axes before its custom VJP. The VJP's types then agree, and
JAX sums a replicated argument's gradient by transposing that cast.
"""

import jax
from jax import lax


def axes_of(*arrays) -> frozenset[str]:
    """Mesh axes over which any of the arrays is typed as varying; empty outside shard_map."""
    return frozenset().union(*map(_axes, arrays))


def _axes(array) -> frozenset[str]:
    kind = jax.typeof(array)
    kind = getattr(kind, "mat", kind)  # since JAX 0.12 the manual axes sit one level down
    return frozenset(getattr(kind, "varying", getattr(kind, "vma", ())))


def cast_to(axes: frozenset[str], array):
    """The array, typed as varying over `axes` as well."""
    missing = tuple(sorted(axes - _axes(array)))
    return lax.pcast(array, missing, to="varying") if missing else array


def align(*arrays):
    """All arrays, typed as varying over the union of their axes."""
    axes = axes_of(*arrays)
    return tuple(cast_to(axes, array) for array in arrays)
