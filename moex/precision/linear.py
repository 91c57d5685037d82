"""The dense product of the model, y = x w, in the compute dtype or quantised with its two gradients as one rule.

T tokens, K and N the dims of w's matrix.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mesh.vma import vary, varying
from moex.precision.matrix import bits, codes, whole_tiles
from moex.precision.products import product, weight_gradient
from moex.precision.recipes import GemmRecipe
from moex.precision.statistics import measure
from moex.precision.weight import QuantisedWeight
from pallas_kernels.quantize import Format, Quantised, quantize, quantize_both
from pallas_kernels.quantize.scales import magnitude_bits

KEPT = "quantised_x"
"""Name of the codes of x that a product keeps for its weight's gradient, for `jax.checkpoint` policies, where x has none."""


def linear(x, weight, *, contracted: int = 1, name: str | None = None):
    """The last `contracted` dims of x times the first of the weight.

    Args:
      x: [..., *K], in the compute dtype.
      weight: [*K, *N]: an array, or a `QuantisedWeight`, whose recipe says how all three products are quantised.
      name: of x, where a layer marks it for `jax.checkpoint` policies and nothing else needs it: x's codes are kept under
        it in place of x.
    Returns: [..., *N] like x. With a quantised weight the gradient in it is float32, and the product's sums are.
    """
    if isinstance(weight, QuantisedWeight):
        assert weight.contracted == contracted, "the parameter's declaration and its use differ"
        return _quantised(x, weight, contracted, name or KEPT)
    dims = tuple(range(x.ndim - contracted, x.ndim)), tuple(range(contracted))
    return lax.dot_general(x, weight, (dims, ((), ())))


def _quantised(x, weight: QuantisedWeight, contracted: int, name: str):
    lead, out = x.shape[: x.ndim - contracted], weight.shape[contracted:]
    x_TK = whole_tiles(x.reshape(math.prod(lead), -1), weight.recipe.tile, (-1,))
    port_KN = whole_tiles(weight.port.reshape(-1, math.prod(out)), weight.recipe.tile)
    given = x_TK, weight.forward, weight.backward, port_KN, weight.meter
    axes = varying(*jax.tree.leaves(given))
    lifted = jax.tree.map(lambda a: vary(a, axes), given)
    return _linear(*lifted, weight.recipe, tuple(sorted(axes)), name)[:, : math.prod(out)].reshape(*lead, *out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _linear(x_TK, forward, backward, port_KN, meter, recipe: GemmRecipe, axes, name: str):
    x = quantize(x_TK, recipe.x)
    return product(x, codes(forward, recipe.w), recipe.x, x_TK.dtype)


def _forward(x_TK, forward, backward, port_KN, meter, recipe: GemmRecipe, axes, name: str):
    x, columns = two_ways(x_TK, recipe.x, recipe.x_wgrad)
    y_TN = product(x, codes(forward, recipe.w), recipe.x, x_TK.dtype)
    return y_TN, (named(bits(columns), name), backward, None if meter is None else measure(x_TK, recipe.x))


def _backward(recipe: GemmRecipe, axes, name: str, kept, g_TN):
    columns, backward, measured = kept
    keys = random_keys(g_TN, axes) if recipe.dy.stochastic else (None, None)
    dy, dy_columns = two_ways(g_TN, recipe.dy, recipe.dy_wgrad, keys)
    dx_TK = product(dy, codes(backward, recipe.w_dgrad), recipe.dy, g_TN.dtype)
    dw_KN = weight_gradient(codes(columns, recipe.x_wgrad), dy_columns, recipe.x_wgrad)
    meter = None if measured is None else jnp.stack([measured, measure(g_TN, recipe.dy)])
    return dx_TK, None, None, dw_KN, meter


_linear.defvjp(_forward, _backward)


def two_ways(x_RD, rows: Format, columns: Format, keys: Sequence = (None, None)) -> tuple[Quantised, Quantised]:
    """x along its rows, and its transpose along x's columns; R is filled with zeros to whole tiles of the second."""
    filled_RD = whole_tiles(x_RD, 128, (0,))
    if rows == columns and filled_RD.shape == x_RD.shape and not rows.stochastic:
        return quantize_both(x_RD, rows)
    return quantize(x_RD, rows, key=keys[0]), quantize(filled_RD, columns, transpose=True, key=keys[1])


def named(kept: Quantised, name: str = KEPT) -> Quantised:
    """The same codes under a name."""
    return jax.tree.map(lambda a: checkpoint_name(a, name), kept)


def random_keys(g, axes) -> tuple[jax.Array, jax.Array]:
    """Two keys for rounding a gradient stochastically, of its own bits and this device's place.

    The bits stand in for step, micro-batch, layer and product, none of which a product knows: the same gradient is rounded
    in the same way when it is computed again, another one in another. Devices that hold different rows must round by
    different numbers, or their errors would not average out.
    """
    fingerprint = magnitude_bits(g.astype(jnp.float32)).sum(dtype=jnp.int32)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), fingerprint), _place(axes))
    first, second = jax.random.split(key)
    return first, second


def _place(axes):
    return lax.axis_index(axes) if axes else 0
