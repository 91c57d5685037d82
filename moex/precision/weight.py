"""A weight as quantised products read it, and how it comes out of the stored float32 shard.

K and N are the dims of a weight's matrix [..., K, N], `...` the experts if there are any.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from mesh import Placement, collectives
from mesh.vma import vary, varying
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


def bits(quantised: Quantised) -> Quantised:
    """Codes as bytes: an integer has no gradient. Four-bit codes stay, each in an element of its own."""
    codes, scales, outer = quantised
    if codes.dtype == jnp.float4_e2m1fn:
        return Quantised(lax.bitcast_convert_type(codes, jnp.uint4), _scale_bits(scales), outer)
    return Quantised(lax.bitcast_convert_type(codes, jnp.uint8), _scale_bits(scales), outer)


def _scale_bits(scales):
    return scales if scales.dtype == jnp.float32 else lax.bitcast_convert_type(scales, jnp.uint8)


def codes(bits: Quantised, format) -> Quantised:
    """The inverse of `bits`."""
    stored = dict(mx=jnp.float8_e8m0fnu, nvfp4=jnp.float8_e4m3fn).get(format.kind)
    scales = bits.scales if stored is None else lax.bitcast_convert_type(bits.scales, stored)
    return Quantised(lax.bitcast_convert_type(bits.codes, format.dtype), scales, bits.outer)


def matrix_shape(shape, slices: int, contracted: int) -> tuple[int, ...]:
    """[*experts, *K, *N] -> [*experts, K, N]."""
    lead, rest = shape[:slices], shape[slices:]
    return (*lead, math.prod(rest[:contracted]), math.prod(rest[contracted:]))


def as_matrix(x, slices: int, contracted: int):
    """The array in that shape."""
    return x.reshape(matrix_shape(x.shape, slices, contracted))


def whole_tiles(x, tile: int, dims: tuple[int, ...] = (-2, -1)):
    """The array with zeros behind it, so that each of the dims has whole tiles."""
    more = [(0, 0)] * x.ndim
    for dim in dims:
        more[dim] = (0, -x.shape[dim] % tile)
    return jnp.pad(x, more) if any(after for _, after in more) else x


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
      gather: "compute": the shard is gathered in `dtype`, and that image is quantised. "codes": the master is quantised;
        where shards begin at a tile's border the codes travel, elsewhere the master does, with the same bits.
    """
    if gather == "compute":
        return quantise_here(place.enter(shard, dtype), recipe, slices=slices, contracted=contracted)
    dim = place.zero_dim - (len(place.dims) - shard.ndim)
    return _enter_in_codes(shard, place, recipe, slices, contracted, dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4, 5))
def _enter_in_codes(shard, place: Placement, recipe: GemmRecipe, slices: int, contracted: int, dim: int):
    shard = vary(shard, place.replicated)
    parts = collectives.axis_size(place.zero)
    if parts == 1 or not travels_in_codes(shard.shape, dim, recipe, slices, contracted):
        return _whole(collectives.all_gather(shard, place.zero, dim=dim), recipe, slices, contracted)
    matrix, outer, agreed = as_matrix(shard, slices, contracted), None, dim >= slices
    if recipe.w.kind in ("tensor", "nvfp4") and agreed:  # one number for a whole matrix: its shards agree on it
        outer = collectives.pmax(jnp.abs(matrix).max(axis=(-2, -1), keepdims=True), place.zero)
    found = quantize(matrix, recipe.w, outer_amax=outer)
    sent = bits(found)
    gather = functools.partial(collectives.all_gather, axes=place.zero)
    whole = gather(sent.codes.reshape(shard.shape), dim=dim)
    matrix_dim = dim if dim < slices else slices + (dim >= slices + contracted)
    scales = sent.scales if agreed and recipe.w.kind == "tensor" else gather(sent.scales, dim=matrix_dim)
    outer = sent.outer if agreed or sent.outer is None else gather(sent.outer, dim=matrix_dim)
    backward = codes(Quantised(as_matrix(whole, slices, contracted), scales, outer), recipe.w)
    return _with_port(transposed(backward), backward, whole.shape, recipe, contracted)


def travels_in_codes(shard_shape, dim: int, recipe: GemmRecipe, slices: int, contracted: int) -> bool:
    """Whether a shard split along `dim` has whole tiles, contiguous in its matrix, so that codes can be gathered."""
    if not recipe.one_copy:
        return False
    if dim >= slices and dim not in (slices, slices + contracted):
        return False
    rows, columns = matrix_shape(shard_shape, slices, contracted)[-2:]
    return rows % recipe.tile == 0 and columns % recipe.tile == 0


def _enter_fwd(shard, place, recipe, slices, contracted, dim):
    return _enter_in_codes(shard, place, recipe, slices, contracted, dim), None


def _enter_bwd(place, recipe, slices, contracted, dim, _, cotangent):
    return (collectives.reduce_gradient(cotangent.port, place.zero, place.replicated, dim),)


_enter_in_codes.defvjp(_enter_fwd, _enter_bwd)
