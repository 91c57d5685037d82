"""Collectives over a view axis: a tuple of mesh axes. Over the empty tuple each is the identity.

Those that move data are skipped over a single device too: XLA would choose layouts for them and copy.

All run inside `jax.shard_map(check_vma=True)`; array arguments are one device's shards.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from mesh.axes import Axes
from mesh.vma import vary, varying


def axis_index(axes: Axes):
    """int32 index of this device along the view, outer axis slowest; 0 over an empty view."""
    return lax.axis_index(axes) if axes else jnp.int32(0)


def axis_size(axes: Axes) -> int:
    """Number of devices along the view, a Python int."""
    return lax.axis_size(axes) if axes else 1


def all_gather(x, axes: Axes, *, dim: int):
    """Concatenates the shards along `dim`. Its transpose is `psum_scatter`."""
    if not axes:
        return x
    x = vary(x, axes)
    if axis_size(axes) == 1:
        return x
    return _gathered(x, axes, dim) if _inexact(x) else lax.all_gather(x, axes, axis=dim, tiled=True)


def psum(x, axes: Axes):
    """Sums over the view; an array that is equal on all its devices is counted once for each."""
    return lax.psum(vary(x, axes), axes) if axes else x


def pmax(x, axes: Axes):
    """Maximum over the view. It has no gradient: pass through `lax.stop_gradient` first."""
    return lax.pmax(vary(x, axes), axes) if axes else x


def of_last(x, axes: Axes):
    """The array of the view's last device, on all of them. Its gradient is the float32 sum of theirs, on the last alone."""
    return _of_last(vary(x, axes), axes) if axes else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _of_last(x, axes: Axes):
    return vary(lax.psum(_on_last(x, axes), axes), axes)


def _on_last(x, axes: Axes):
    return jnp.where(axis_index(axes) == axis_size(axes) - 1, x, jnp.zeros_like(x))


def _of_last_bwd(axes, _, g):
    return (_on_last(lax.psum(g.astype(jnp.float32), axes).astype(g.dtype), axes),)


_of_last.defvjp(lambda x, axes: (_of_last(x, axes), None), _of_last_bwd)


def psum_scatter(x, axes: Axes, *, dim: int):
    """Sums over the view and keeps this device's part of `dim`, which must divide by the view's size.

    Sums are float32 whatever the dtype, and the result is cast back; its transpose is `all_gather`.
    """
    if not axes:
        return x
    x = vary(x, axes)
    if axis_size(axes) == 1:
        return x
    return _scattered(x, axes, dim) if _inexact(x) else lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gathered(x, axes: Axes, dim: int):
    return lax.all_gather(x, axes, axis=dim, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _scattered(x, axes: Axes, dim: int):
    return lax.psum_scatter(x.astype(jnp.float32), axes, scatter_dimension=dim, tiled=True).astype(x.dtype)


_gathered.defvjp(
    lambda x, axes, dim: (_gathered(x, axes, dim), None), lambda axes, dim, _, g: (_scattered(g, axes, dim),)
)
_scattered.defvjp(
    lambda x, axes, dim: (_scattered(x, axes, dim), None), lambda axes, dim, _, g: (_gathered(g, axes, dim),)
)


def _inexact(x) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def all_to_all(x, axes: Axes, *, split_dim: int, concat_dim: int, group: int = 0):
    """Sends the i-th part of `split_dim` to device i and concatenates what arrives along `concat_dim`.

    group: only among this many neighbours along the view, which it must divide; 0 for all.
    """
    x, devices = vary(x, axes), axis_size(axes)
    if devices == 1 or group == 1:
        return x
    groups = [list(range(at, at + group)) for at in range(0, devices, group)] if 0 < group < devices else None
    return lax.all_to_all(x, axes, split_dim, concat_dim, tiled=True, axis_index_groups=groups)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def gather(shard, axes: Axes, replicated: Axes, dim: int, dtype):
    """The one door by which a parameter enters compute: cast, then all-gather; gradients come back summed in float32.

    Args:
      shard: this device's part of the parameter, split along `dim` over `axes`, equal over `replicated`.
      axes, replicated: disjoint; together with the axes of model parallelism they are the whole mesh.
      dtype: of the result. The backward pass casts to float32 before it reduces, whatever `dtype` is.

    Returns: the parameter, full along `dim`, typed as varying over `axes` and `replicated`.
    """
    shard = vary(shard.astype(dtype), replicated)
    return all_gather(shard, axes, dim=dim)


def _gather_fwd(shard, axes, replicated, dim, dtype):
    return gather(shard, axes, replicated, dim, dtype), jnp.zeros((0,), shard.dtype)


def _gather_bwd(axes, replicated, dim, dtype, like, cotangent):
    return (reduce_gradient(cotangent, axes, replicated, dim).astype(like.dtype),)


gather.defvjp(_gather_fwd, _gather_bwd)


def reduce_gradient(cotangent, axes: Axes, replicated: Axes, dim: int):
    """The transpose of `gather`: each device's part of the gradient, summed in float32 over all that used the parameter."""
    grad = psum_scatter(cotangent.astype(jnp.float32), axes, dim=dim)
    summed = tuple(a for a in replicated if a in varying(grad))
    return psum(grad, summed)
