"""QK-clip: after an update, heads whose attention logits were too large get smaller query and key weights.

Of the tokens of the step's batch, over all devices and micro-batches (Kimi K2, arXiv 2507.20534 section 2.1). L layers, those
of multi-token prediction last; N query heads, K key-value heads, H head width.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mesh import Fold, collectives
from mesh.vma import vary
from moex.config import ModelConfig, RunConfig

NAMES = dict(gqa=("query", "query_bias", "key", "key_bias"), mla=("query_up", "kv_up"))
"""Parameters of an attention that are scaled, as far as it has them."""


class Meters(NamedTuple):
    """What attention reads its largest logits into (`moex.layers.attention.attend`): of layers, and of those of multi-token
    prediction, float32 [L, N of this device] each; None without clip.
    """

    layers: Any = None
    further: Any = None


NONE = Meters()


def meters(config: RunConfig, fold: Fold) -> Meters:
    """Of all layers, inside shard_map."""
    if not config.optimizer.qk_clip:
        return NONE
    heads = config.model.attention.num_heads // fold.size("tp")
    zeros = lambda layers: vary(jnp.zeros((layers, heads), jnp.float32), fold.names)
    return Meters(zeros(config.model.num_layers), zeros(config.model.mtp_depth) if config.model.mtp_depth else None)


def over_devices(read: Meters, fold: Fold):
    """Each device's own heads' largest logits -> those of all heads over all tokens, [L, N], equal on all devices."""
    if read.layers is None:
        return None
    read_LN = jnp.concatenate([x for x in read if x is not None])
    heads = read_LN.shape[1]
    first = collectives.axis_index(fold.dense.tp) * heads
    placed = jnp.zeros((read_LN.shape[0], heads * fold.size("tp")), jnp.float32)
    return lax.pmax(lax.dynamic_update_slice_in_dim(vary(placed, fold.names), read_LN, first, 1), fold.names)


def factors(logits_LN, threshold: float, alpha: float, num_kv_heads: int) -> tuple[jax.Array, jax.Array]:
    """Factors of queries [L, N] and keys [L, K] that bring every head's logits to at most the threshold.

    A head's logits are scaled by eta = min(1, threshold / its largest): its query by eta^alpha, its key by eta^(1 - alpha).
    A key that several query heads share is scaled by the smallest eta of theirs, and each of the queries by what is left to
    its own eta, so that heads below the threshold compute what they did.
    """
    eta_LN = jnp.minimum(1.0, threshold / jnp.maximum(logits_LN, threshold))
    least_LK = eta_LN.reshape(len(eta_LN), num_kv_heads, -1).min(axis=-1)
    keys_LK = least_LK ** (1 - alpha)
    return eta_LN / jnp.repeat(keys_LK, eta_LN.shape[1] // num_kv_heads, axis=1), keys_LK


def clipped(config: RunConfig, params: Mapping[str, Any], logits_LN) -> Mapping[str, Any]:
    """The parameters with queries and keys scaled; themselves without clip.  Code of the global view.

    Of latent attention the rotated key is all heads' own, so the rotated part of a query takes all of eta.
    """
    if logits_LN is None:
        return params
    model, opt = config.model, config.optimizer
    found = factors(logits_LN, opt.qk_clip, opt.qk_clip_alpha, model.attention.num_kv_heads)
    new = dict(params)
    for stack, layers in _rows(model).items():
        queries_LN, keys_LK = (x[jnp.array(layers)] for x in found)
        holder = params[stack]["layer"] if stack == "mtp" else params[stack]
        attention = _scaled(model, holder["attention"], queries_LN, keys_LK)
        holder = holder | dict(attention=attention)
        new[stack] = params[stack] | dict(layer=holder) if stack == "mtp" else holder
    return new


def _rows(model: ModelConfig) -> dict[str, list[int]]:
    """Which layers stand in which stack of parameters."""
    sparse = list(model.sparse_layers)
    stacks = dict(
        dense_layers=[i for i in range(model.num_layers) if i not in sparse],
        moe_layers=sparse,
        mtp=list(range(model.num_layers, model.num_layers + model.mtp_depth)),
    )
    return {name: layers for name, layers in stacks.items() if layers}


def _scaled(model: ModelConfig, attention: Mapping[str, Any], queries_LN, keys_LK) -> dict[str, Any]:
    a = model.attention
    if a.kind == "gqa":
        by = dict(query=queries_LN[:, None, :, None], key=keys_LK[:, None, :, None])
        by |= dict(query_bias=queries_LN[..., None], key_bias=keys_LK[..., None])
    else:
        both_LN = queries_LN * keys_LK
        plain = lambda x_LN, rest_LN, width, more: jnp.concatenate(
            [jnp.repeat(x_LN[..., None], width, axis=-1), jnp.repeat(rest_LN[..., None], more, axis=-1)], axis=-1
        )[:, None]
        query = plain(queries_LN, both_LN, a.head_dim, a.rope_dim)
        by = dict(query_up=query, kv_up=plain(keys_LK, jnp.ones_like(keys_LK), a.head_dim, a.value_dim))
    return dict(attention) | {name: attention[name] * by[name] for name in NAMES[a.kind] if name in attention}
