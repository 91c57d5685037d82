"""The loss of multi-token prediction, beside the model's own: each depth a mean over its own valid tokens of the step.

B rows of this device, S its part of a sequence, k depths.
"""

import jax
import jax.numpy as jnp

from mesh import collectives
from mesh.axes import Axes
from mesh.collectives import of_last
from mesh.fold import Fold
from moex.config import RunConfig
from moex.layers.mtp import Further, further
from moex.layers.tokens import Tokens
from moex.models.decoder import Decoder, Enter
from moex.train.loss import cross_entropy_sum


def depths(config: RunConfig, fold: Fold, batch) -> list[Further]:
    """What each depth knows of a micro-batch (anything with `ids`, `labels`, `mask` and the three of `Tokens`, [B, S])."""
    tokens = Tokens(batch.segments, batch.positions, batch.index)
    given = batch.ids, batch.labels, batch.mask, tokens
    return [further(*given, depth, fold) for depth in range(1, config.model.mtp_depth + 1)]


def totals(config: RunConfig, fold: Fold, batch):
    """Valid tokens of a step on all devices, float32 [1 + k], at least 1: of the model's own loss, then of each depth."""
    rows = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), batch._replace(step=None, experts=None))
    masks = [rows.mask, *(known.mask for known in depths(config, fold, rows))]
    counts = jnp.stack([mask.sum(dtype=jnp.int32) for mask in masks])
    counts = collectives.psum(counts, fold.dense.dp + fold.dense.cp)
    return jnp.maximum(counts, 1).astype(jnp.float32)


def further_loss(
    config: RunConfig, decoder: Decoder, fold: Fold, params, steering, micro, hidden_BSD, totals_k, enter: Enter,
    *, over: Axes = (), **options,
):  # fmt: skip
    """(share of the step's loss, statistics of the layers): coefficient / k times the sum of the depths' mean losses.

    hidden_BSD: the model's final activations.  totals_k: of `totals`, without the first.  over: axes that split tp's rows of
    embedding and head further.
    """
    known = depths(config, fold, micro)
    outputs, stats = decoder.further(params, steering, hidden_BSD, known, fold, enter, over=over, **options)
    loss = jnp.float32(0)
    for depth, one in enumerate(known):
        nll = cross_entropy_sum(
            of_last(outputs[depth], over), decoder.head(params, enter), one.labels, one.mask, fold,
            vocab_size=config.model.vocab_size, chunk_tokens=config.train.loss_chunk_tokens, over=over,
        )  # fmt: skip
        loss += collectives.psum(nll, fold.dense.dp + fold.dense.cp) / totals_k[depth]
    return loss * (config.model.mtp_coefficient / config.model.mtp_depth), stats
