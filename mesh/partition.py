"""Where arrays lie: view axes of each dim -> placement on the mesh -> PartitionSpec, and the step's shard_map.

A parameter is split twice: by model parallelism (its declared view axes) and, for storage, over every mesh axis that
would otherwise replicate it (ZeRO).
"""

import dataclasses
from collections.abc import Sequence

import jax
from jax.sharding import PartitionSpec

from mesh.axes import Axes
from mesh.collectives import gather, reduce_gradient
from mesh.fold import Fold


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where one parameter lies.

    dims: mesh axes of model parallelism, one tuple a dim.  zero_dim, zero: the dim that storage splits further, and over
    which axes (inside the model-parallel split).  replicated: axes that hold equal copies.
    """

    dims: tuple[Axes, ...]
    zero_dim: int
    zero: Axes
    replicated: Axes

    @property
    def spec(self) -> PartitionSpec:
        entries = [axes + (self.zero if i == self.zero_dim else ()) for i, axes in enumerate(self.dims)]
        return PartitionSpec(*entries)

    def enter(self, shard, dtype):
        """Stored shard -> the parameter as compute sees it (split by model parallelism only), in `dtype`.

        The shard may lack leading dims that a scan has taken off since the placement was made.
        """
        return gather(shard, self.zero, self.replicated, self.zero_dim - self._taken_off(shard), dtype)

    def leave(self, gradient):
        """Gradient of the entered parameter, not yet summed over devices -> gradient of the stored shard, float32."""
        return reduce_gradient(gradient, self.zero, self.replicated, self.zero_dim - self._taken_off(gradient))

    def _taken_off(self, array) -> int:
        return len(self.dims) - array.ndim


def place(
    shape: Sequence[int],
    view_axes: Sequence[str | None],
    fold: Fold,
    *,
    may_replicate: bool = False,
    stacked_dims: int = 0,
    name: str = "parameter",
) -> Placement:
    """Places a parameter of global `shape` whose dims are split over `view_axes` (None: not split).

    The storage split takes the dim (never one of the `stacked_dims` leading ones, which a scan runs over) that can be
    split over most of the axes left, the largest of equals.

    Raises ValueError, with the name and the numbers, when a dim doesn't divide by its view, unless `may_replicate`.
    """
    dims: list[Axes] = []
    for size, view in zip(shape, view_axes, strict=True):
        axes = fold.view(view) if view else ()
        if size % fold.size(axes):
            if not may_replicate:
                raise ValueError(f"{name}: a dim of {size} doesn't divide by {view}={fold.size(axes)}")
            axes = ()
        dims.append(axes)
    used = {a for axes in dims for a in axes}
    free = tuple(a for a in fold.names if a not in used)
    if stacked_dims:  # the pipeline's ranks innermost: each is sent its own layers' parts of all
        free = tuple(sorted(free, key=lambda a: a in fold.dense.pp))
    zero_dim, zero = _storage_split(shape, dims, free, fold, stacked_dims)
    replicated = tuple(a for a in fold.names if a not in used and a not in zero)
    return Placement(tuple(dims), zero_dim, zero, replicated)


def _storage_split(shape, dims, free: Axes, fold: Fold, stacked_dims: int) -> tuple[int, Axes]:
    best = (1, 0, stacked_dims, ())
    for dim in range(stacked_dims, len(shape)):
        local = shape[dim] // fold.size(dims[dim])
        for first in range(len(free)):  # drop outer axes until the rest divides
            axes = free[first:]
            if local % fold.size(axes) == 0:
                best = max(best, (fold.size(axes), shape[dim], dim, axes), key=lambda b: b[:2])
                break
    return best[2], best[3]


def sharded(function, mesh, in_specs, out_specs):
    """`jax.shard_map` over all axes of the mesh with the types of manual axes checked: the only way in moex to use it."""
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True)
