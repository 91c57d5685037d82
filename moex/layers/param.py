"""One declaration of a parameter: shape, view axes, initial value. Everything else is derived from it.

A module declares parameters without values; a tree of declarations gives abstract shapes, placements on a mesh and
initial values. Values travel as a plain nested dict of arrays with the modules' attribute names as keys.
"""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mesh import Fold, Placement, place
from moex.precision import weight
from moex.precision.recipes import Precision

Init = Literal["normal", "output", "ones", "zeros"]

_ONE_PROGRAM = 2**14
"""Numbers of the shortest draw."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Declaration:
    """What is known of a parameter before it has a value.

    shape: global, of one layer.  axes: view axis a dim is split over, or None.  init: `output` is normal with the
    smaller deviation of projections into the residual stream.  slices: leading dims that are drawn one by one (experts).
    float32: enters compute in float32 whatever the compute dtype.  may_replicate: a dim that doesn't divide by its view
    is not split.  decays: under weight decay.  valid_rows: rows of dim 0 that are real; the rest are zero.
    stacked: layers of the stack it is in, 0 outside one.  product: the kind of product it is a factor of (`moex.precision.
    recipes.KINDS`), or None for none that may be quantised.  contracted: dims, after the slices, that the product sums over.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Init = "normal"
    slices: int = 0
    float32: bool = False
    may_replicate: bool = False
    decays: bool = True
    valid_rows: int = 0
    stacked: int = 0
    product: str | None = None
    contracted: int = 1

    @property
    def full_shape(self) -> tuple[int, ...]:
        return ((self.stacked,) if self.stacked else ()) + self.shape

    def placement(self, fold: Fold, name: str) -> Placement:
        lead = 1 if self.stacked else 0
        return place(
            self.full_shape, (None,) * lead + self.axes, fold,
            may_replicate=self.may_replicate, stacked_dims=lead, name=name,
        )  # fmt: skip


def declare(*shape: int, axes: tuple[str | None, ...], **options) -> nnx.Param:
    """A module's parameter, by its `Declaration`; it holds no value until the module is merged with arrays."""
    declaration = Declaration(shape=shape, axes=axes, **options)
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32), declaration=declaration)


def declarations(module: nnx.Module, *, stacked: int = 0) -> dict:
    """Nested dict of the module's `Declaration`s; `stacked` copies of the module are laid along a new leading dim."""
    state = nnx.state(module, nnx.Param)
    tree = jax.tree.map(
        lambda p: dataclasses.replace(p.get_metadata()["declaration"], stacked=stacked),
        state,
        is_leaf=lambda x: isinstance(x, nnx.Param),
    )
    return nnx.to_pure_dict(tree)


def is_declaration(x) -> bool:
    return isinstance(x, Declaration)


def tree_map(function, tree: Mapping, *rest):
    """Maps `function(declaration, *values)` over a tree of declarations and trees of the same structure."""
    return jax.tree.map(function, tree, *rest, is_leaf=is_declaration)


def named_map(function, tree: Mapping, *rest):
    """Maps `function(name, declaration, *values)`, name being the path joined by dots; `rest` as for `tree_map`."""
    name = lambda path: ".".join(str(getattr(k, "key", k)) for k in path)
    named = lambda path, *values: function(name(path), *values)
    return jax.tree_util.tree_map_with_path(named, tree, *rest, is_leaf=is_declaration)


def within(tree: Mapping, part: Mapping) -> dict:
    """Of a nested dict what another has the names of."""
    return {
        name: within(tree[name], inner) if isinstance(inner, Mapping) else tree[name] for name, inner in part.items()
    }


def laid_over(tree: Mapping, part: Mapping) -> dict:
    """A nested dict with another's values in the places that it has."""
    over = lambda name, inner: laid_over(tree[name], inner) if isinstance(inner, Mapping) else inner
    return dict(tree) | {name: over(name, inner) for name, inner in part.items()}


def abstract(tree: Mapping) -> dict:
    """Global shapes and dtypes of the parameters."""
    return tree_map(lambda d: jax.ShapeDtypeStruct(d.full_shape, jnp.float32), tree)


def placements(tree: Mapping, fold: Fold) -> dict:
    """Where each parameter lies on the folded mesh."""
    return named_map(lambda name, d: d.placement(fold, name), tree)


def enter(tree: Mapping, places: Mapping, shards: Mapping, compute_dtype, precision: Precision) -> dict:
    """Stored shards -> parameters as compute sees them: in the compute dtype, where declared in float32, or as
    `QuantisedWeight` where the precision has a recipe for the product that they are in.
    """

    def one(d: Declaration, p: Placement, x):
        if (recipe := precision.recipe(d.product)) is None:
            return p.enter(x, jnp.float32 if d.float32 else compute_dtype)
        slices = d.slices + x.ndim - len(d.shape)
        return weight.enter(
            x, p, recipe, slices=slices, contracted=d.contracted, gather=precision.gather, dtype=compute_dtype
        )

    return tree_map(one, tree, places, shards)


def initial_values(tree: Mapping, seed: int, std: float, num_layers: int, shardings: Mapping | None = None) -> dict:
    """Draws all parameters, float32. Bits depend on (seed, path, layer, expert) only, not on the mesh.

    Args:
      std: deviation of `normal`; `output` has std / sqrt(2 num_layers).
      shardings: tree of `jax.sharding.Sharding`; None leaves whole arrays on the default device.
    """
    key = jax.random.key(seed)
    deviations = dict(normal=std, output=std / (2 * num_layers) ** 0.5)

    def draw(name: str, d: Declaration, sharding=None):
        lead = d.full_shape[: (1 if d.stacked else 0) + d.slices]
        slice_shape = d.full_shape[len(lead) :]
        path_key = jax.random.fold_in(key, int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big"))

        def one(where: tuple[int, ...]) -> np.ndarray:
            if d.init in ("ones", "zeros"):
                return np.full(slice_shape, float(d.init == "ones"), np.float32)
            number = int(np.ravel_multi_index(where, lead)) if lead else 0
            value = _normal(path_key, number, slice_shape, deviations[d.init])
            if d.valid_rows:
                value = np.where(np.arange(slice_shape[0])[:, None] < d.valid_rows, value, np.float32(0))
            return value

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None, "JAX names the part that it wants"
            ranges = [range(*s.indices(n)) for s, n in zip(index[: len(lead)], lead, strict=True)]
            out_shape = [len(r) for r in ranges] + [
                len(range(*s.indices(n))) for s, n in zip(index[len(lead) :], slice_shape, strict=True)
            ]
            out = np.empty(out_shape, np.float32)
            for at in np.ndindex(*[len(r) for r in ranges]):
                out[at] = one(tuple(r[i] for r, i in zip(ranges, at, strict=True)))[index[len(lead) :]]
            return out

        if sharding is None:
            return jnp.asarray(part((slice(None),) * len(d.full_shape)))
        return jax.make_array_from_callback(d.full_shape, sharding, part)

    return named_map(draw, tree) if shardings is None else named_map(draw, tree, shardings)


def _normal(key, number: int, shape: tuple[int, ...], deviation: float) -> np.ndarray:
    """One slice. Small ones begin a longer draw, which has the same numbers first, so that one program serves them all."""
    size = math.prod(shape)
    return np.asarray(_draw(key, number, max(size, _ONE_PROGRAM), deviation))[:size].reshape(shape)


@functools.partial(jax.jit, static_argnums=(2,))
def _draw(key, number, size: int, deviation):
    return jax.random.normal(jax.random.fold_in(key, number), (size,), jnp.float32) * deviation


def materialise(module: nnx.Module, *, seed: int = 0, std: float = 0.02, num_layers: int = 1) -> nnx.Module:
    """A copy of the module that holds initial values, for use on one device, as in a notebook."""
    graphdef = nnx.graphdef(module)
    return nnx.merge(graphdef, initial_values(declarations(module), seed, std, num_layers))
