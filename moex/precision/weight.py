"""A weight as quantised products read it, and how it comes out of the stored float32 shard.

K and N are the dims of a weight's matrix [..., K, N], `...` the experts if there are any.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from mesh import Placement, collectives
from mesh.vma import vary, varying
from moex.precision.gathered import gathered_in_codes
from moex.precision.matrix import as_matrix, bits, whole_tiles
from moex.precision.recipes import GemmRecipe
from pallas_kernels.quantize import Quantised, quantize, transposed


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantisedWeight:
    """Codes of a weight, which have no gradient, and a port that takes it.

    forward: [..., N, K], for x w.  backward: [..., K, N], for dy w^T; both with zeros up to whole tiles. Codes are bits of
    whole numbers, so that autodiff passes them by.
    port: float32 zeros of the parameter's shape, never read: the cotangent of this array is the weight's gradient, summed
    and handed on in float32 whatever the codes are.  recipe, contracted: static; leading dims of a parameter that the
    product sums over, after the experts'.  meter: float32 zeros [2, `statistics.SIZE`] whose cotangent are measurements of
    x and dy, or None, as in training.
    """

    forward: Quantised
    backward: Quantised
    port: jax.Array
    recipe: GemmRecipe = dataclasses.field(metadata=dict(static=True))
    contracted: int = dataclasses.field(default=1, metadata=dict(static=True))
    meter: jax.Array | None = None

    def __getitem__(self, index):
        """`[...]` is itself, as of the array that it stands in for."""
        assert index is Ellipsis, "a quantised weight is used whole"
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        return self.port.shape


def is_quantised(x) -> bool:
    return isinstance(x, QuantisedWeight)


def ports(tree):
    """The tree with each quantised weight's port in its place: what a loss is differentiated by."""
    return jax.tree.map(lambda x: x.port if is_quantised(x) else x, tree, is_leaf=is_quantised)


def with_ports(tree, values):
    """The inverse of `ports`."""
    put = lambda x, port: dataclasses.replace(x, port=port) if is_quantised(x) else port
    return jax.tree.map(put, tree, values, is_leaf=is_quantised)


def quantise_here(weight, recipe: GemmRecipe, *, slices: int = 0, contracted: int = 1) -> QuantisedWeight:
    """A weight that is whole on this device, in any float dtype; its gradient passes in float32, then in its dtype."""
    return _quantise_here(weight, recipe, slices, contracted)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _quantise_here(weight, recipe, slices, contracted):
    return _whole(weight, recipe, slices, contracted)


def _here_fwd(weight, recipe, slices, contracted):
    return _whole(weight, recipe, slices, contracted), jnp.zeros((0,), weight.dtype)


def _here_bwd(recipe, slices, contracted, like, cotangent):
    return (cotangent.port.astype(like.dtype),)


_quantise_here.defvjp(_here_fwd, _here_bwd)


def _whole(weight, recipe: GemmRecipe, slices: int, contracted: int) -> QuantisedWeight:
    matrix = whole_tiles(as_matrix(weight, slices, contracted), recipe.tile)
    if recipe.one_copy:
        backward = quantize(matrix, recipe.w)
        forward = transposed(backward)
    else:
        forward, backward = quantize(matrix, recipe.w, transpose=True), quantize(matrix, recipe.w_dgrad)
    return _with_port(forward, backward, weight.shape, recipe, contracted)


def _with_port(forward: Quantised, backward: Quantised, shape, recipe, contracted) -> QuantisedWeight:
    port = vary(jnp.zeros(shape, jnp.float32), varying(backward.codes))
    return QuantisedWeight(bits(forward), bits(backward), port, recipe, contracted)


def enter(
    shard, place: Placement, recipe: GemmRecipe, *, slices: int, contracted: int, gather: str, dtype
) -> QuantisedWeight:
    """Stored float32 shard -> the weight as compute sees it, split by model parallelism only. Its gradient leaves as from
    `Placement.enter`: summed in float32 over all devices that used the weight.

    Args:
      shard: this device's part; a scan may have taken off leading dims since the placement was made.
      slices, contracted: leading dims that are experts, and those after them that the product sums over.
      gather: "compute": the shard is gathered in `dtype`, and that image is quantised. "codes": the master is quantised where
        it is stored, and its codes are gathered.
    """
    if gather == "compute":
        return quantise_here(place.enter(shard, dtype), recipe, slices=slices, contracted=contracted)
    dim = place.zero_dim - (len(place.dims) - shard.ndim)
    return _enter_in_codes(shard, place, recipe, slices, contracted, dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4, 5))
def _enter_in_codes(shard, place: Placement, recipe: GemmRecipe, slices: int, contracted: int, dim: int):
    shard, ways = vary(shard, place.replicated), collectives.axis_size(place.zero)
    if ways == 1 or not recipe.one_copy:
        return _whole(collectives.all_gather(shard, place.zero, dim=dim), recipe, slices, contracted)
    backward = gathered_in_codes(shard, place.zero, dim, recipe, slices, contracted)
    shape = (*shard.shape[:dim], shard.shape[dim] * ways, *shard.shape[dim + 1 :])
    return _with_port(transposed(backward), backward, shape, recipe, contracted)


def _enter_fwd(shard, place, recipe, slices, contracted, dim):
    return _enter_in_codes(shard, place, recipe, slices, contracted, dim), None


def _enter_bwd(place, recipe, slices, contracted, dim, _, cotangent):
    return (collectives.reduce_gradient(cotangent.port, place.zero, place.replicated, dim),)


_enter_in_codes.defvjp(_enter_fwd, _enter_bwd)
