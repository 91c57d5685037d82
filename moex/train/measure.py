"""How quantisation treats each product of a model: its operands measured in one forward and backward pass.

M is `moex.precision.statistics.SIZE`; L layers of a stack.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from mesh import Fold, collectives, sharded
from moex.config import RunConfig
from moex.layers import param
from moex.models.decoder import Decoder
from moex.precision import statistics
from moex.precision.matrix import as_matrix
from moex.precision.recipes import GemmRecipe, Precision
from moex.precision.weight import is_quantised
from moex.train.step import Batch, batch_specs, entering, micro_loss, recipes_on_entry, steer, totals


def make_measure_step(config: RunConfig, decoder: Decoder, fold: Fold, mesh) -> Callable:
    """(params, router_bias, batch) -> {parameter's name: float32 [L, 3, M] of x, dy and w, summed over all devices}.

    Of the products with a recipe, on the first micro-batch. Experts' products are computed one by one here, so their hidden
    rows and gradients are seen before they are quantised; with clones only weights that enter as codes are measured.
    """
    places = param.placements(decoder.declarations, fold)
    precision, enter = recipes_on_entry(config), entering(config, decoder, fold)
    measured = lambda d: d.product is not None and precision.recipe(d.product) is not None
    meter = lambda d: jnp.zeros((*(d.stacked,) * bool(d.stacked), 2, statistics.SIZE)) if measured(d) else None

    def with_meters(name: str, both, high: bool = False, /):
        shards, of_part = both
        attach = lambda w, meter: dataclasses.replace(w, meter=meter) if is_quantised(w) else w
        return jax.tree.map(attach, enter(name, shards, high), of_part, is_leaf=lambda x: is_quantised(x) or x is None)

    def run(shards: Mapping, bias_LE, batch: Batch):
        micro = jax.tree.map(lambda x: x[0], batch._replace(step=None))
        tokens_of_losses = totals(config, fold, batch)
        steering = steer(config, bias_LE, micro, key=jax.random.key(config.train.seed))

        def loss(meters):
            params = {name: (part, meters[name]) for name, part in shards.items()}
            return micro_loss(config, decoder, fold, params, steering, micro, tokens_of_losses, with_meters)[0]

        of_rows = jax.grad(loss)(param.tree_map(meter, decoder.declarations))
        of_weights = jax.tree.map(
            lambda d, p, w: _weight(d, p, w, precision, fold), decoder.declarations, places, shards,
            is_leaf=param.is_declaration,
        )  # fmt: skip
        return _joined(of_rows, of_weights)

    specs = jax.tree.map(lambda p: p.spec, places)
    return sharded(run, mesh, in_specs=(specs, PartitionSpec(), batch_specs(fold)), out_specs=PartitionSpec())


def _weight(d: param.Declaration, place, shard, precision: Precision, fold: Fold):
    """float32 [L, M] of a stored shard's own tiles, summed over the devices that hold different ones; None without recipe."""
    recipe: GemmRecipe | None = precision.recipe(d.product)
    if recipe is None:
        return None
    matrices = as_matrix(shard, bool(d.stacked) + d.slices, d.contracted)
    layers = matrices.reshape(max(d.stacked, 1), -1, *matrices.shape[-2:])
    whole = lambda w: statistics.measure(w, dataclasses.replace(recipe.w, stochastic=False))
    found = jax.vmap(jax.vmap(whole))(layers).sum(axis=1)
    return collectives.psum(found, tuple(a for axes in place.dims for a in axes) + place.zero)


def _joined(of_rows: Mapping, of_weights: Mapping) -> dict[str, Any]:
    """By name, w below x and dy."""
    rows = jax.tree_util.tree_leaves_with_path(of_rows)
    weights = jax.tree.leaves(of_weights)
    join = lambda r, w: jnp.concatenate([r.reshape(-1, *r.shape[-2:]), w[:, None]], axis=1)
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")
    return {name(path): join(r, w) for (path, r), w in zip(rows, weights, strict=True)}
