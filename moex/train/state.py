"""All that a step carries over to the next, and where it lies on the mesh."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from mesh import Fold
from moex.config import RunConfig
from moex.layers import param
from moex.memory.host import on_host
from moex.models.decoder import Decoder

Leaf = Any
"""An array, or what stands for it in a tree of the same structure: its shape, sharding or spec."""


class TrainState(NamedTuple):
    """step int32: number of the next step.  router_bias float32 [L, E]; a row of zeros without routers, since nothing that
    is saved may be empty.  skips int32: steps in a row without an update because of non-finite gradients.  samples, tokens:
    seen so far, uint32 [2] (low, high).  ema: average of `params` over steps, in the same form; empty without one.
    """

    step: Leaf
    params: Any
    optimizer: Any
    router_bias: Leaf
    skips: Leaf
    samples: Leaf
    tokens: Leaf
    ema: Any


def count(counter, number):
    """Adds an int32 number >= 0 to a (low, high) pair of uint32, with carry."""
    low = counter[0] + number.astype(jnp.uint32)
    return jnp.stack([low, counter[1] + (low < counter[0]).astype(jnp.uint32)])


def counted(counter) -> int:
    """The number in a (low, high) pair, on the host."""
    low, high = (int(part) for part in counter)
    return high << 32 | low


def abstract_state(
    config: RunConfig, decoder: Decoder, tx: optax.GradientTransformation, fold: Fold, mesh
) -> TrainState:
    """Shapes, dtypes and shardings of the whole state; `mesh` may be abstract."""
    places = param.placements(decoder.declarations, fold)
    shardings = jax.tree.map(lambda p: NamedSharding(mesh, p.spec), places)
    everywhere = NamedSharding(mesh, PartitionSpec())
    shaped = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    params = param.abstract(decoder.declarations)
    moments = jax.eval_shape(tx.init, params)
    absent = lambda x: isinstance(x, optax.transforms.MaskedNode)  # frozen, or updated by another rule
    between = on_host if config.memory.optimizer == "host" else lambda sharding: sharding
    moments = optax.tree.map_params(
        tx.init, lambda x, sharding: x if absent(x) else shaped(x, between(sharding)), moments, shardings, is_leaf=absent,
        transform_non_params=lambda x: shaped(x, everywhere),
    )  # fmt: skip
    placed = jax.tree.map(shaped, params, shardings)
    scalar = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)
    return TrainState(
        step=scalar((), jnp.int32),
        params=placed,
        optimizer=moments,
        router_bias=scalar((max(config.model.num_routers, 1), config.model.router.num_experts), jnp.float32),
        skips=scalar((), jnp.int32),
        samples=scalar((2,), jnp.uint32),
        tokens=scalar((2,), jnp.uint32),
        ema=placed if config.optimizer.ema_decay else {},
    )


def initial_state(
    config: RunConfig, decoder: Decoder, abstract: TrainState, weights: Mapping[str, Any] | None = None
) -> TrainState:
    """Draws parameters, and zeros for the rest, on the mesh that `abstract` names.

    weights: `params` and `router_bias` to begin with in their place, laid out as `abstract` says.
    """
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    if weights is None:
        params = param.initial_values(
            decoder.declarations, config.train.seed, config.model.init_std, config.model.num_layers, shardings.params
        )
    else:
        params = weights["params"]
    zeros = lambda tree: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)
    rest = jax.jit(
        lambda: zeros(abstract._replace(params=None, ema=None)), out_shardings=shardings._replace(params=None, ema=None)
    )()  # optax starts its moments and counts at zero
    if weights is not None:
        rest = rest._replace(router_bias=weights["router_bias"])
    # Copies: a step takes over the buffers of its whole state, and cannot take one twice.
    return rest._replace(params=params, ema=jax.tree.map(jnp.copy, params) if abstract.ema else {})
