"""Steps that only read parameters: evaluation, and recording of routing. They run whole models on every pipeline rank.

A micro-batches, B rows, S sequence, L MoE layers, E experts.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from mesh import Fold, collectives, sharded
from mesh.vma import vary
from moex.config import RunConfig
from moex.layers import param
from moex.layers.tokens import Tokens
from moex.models.decoder import Decoder
from moex.train.step import Batch, entry, hidden, nll_sum


def reading_specs(fold: Fold) -> Batch:
    """How a batch is split where it is only read: the micro-batches over the pipeline's ranks, too, each of which then runs
    all layers.
    """
    split = PartitionSpec(fold.dense.pp, fold.dense.dp, fold.dense.cp)
    return Batch(PartitionSpec(), *(split,) * 6)


def make_eval_step(config: RunConfig, decoder: Decoder, fold: Fold, mesh) -> Callable:
    """(params, router_bias, batch) -> (sum of -log p over valid tokens, their number, overflow), over all devices.

    With an overflow above 0 the sum is not to be used.
    """
    pp = fold.dense.pp

    def run(shards: Mapping, bias_LE, batch: Batch):
        params, enter = entry(config, decoder, fold, shards)

        def add(total, micro):
            nll, stats, _ = nll_sum(config, decoder, fold, params, bias_LE, micro, enter)
            overflow = jnp.int32(0) if stats is None else stats.overflow.sum()
            return (total[0] + nll, total[1] + vary(overflow, pp)), None

        zeros = vary(jnp.float32(0), pp), vary(jnp.int32(0), pp)
        (nll, overflow), _ = lax.scan(add, zeros, batch._replace(step=None))
        valid = collectives.psum(batch.mask.sum(dtype=jnp.int32), pp + fold.dense.dp + fold.dense.cp)
        return collectives.psum(nll, pp), valid, collectives.psum(overflow, pp)

    return sharded(run, mesh, in_specs=_in_specs(decoder, fold), out_specs=(PartitionSpec(),) * 3)


def make_record_step(config: RunConfig, decoder: Decoder, fold: Fold, mesh) -> Callable:
    """(params, router_bias, batch) -> experts that the router chooses, int32 [A, B, S, L, k], as `Batch.experts` takes
    them; `num_experts` in the places of padding.  Nothing is dropped and no noise is drawn.
    """

    def run(shards: Mapping, bias_LE, batch: Batch):
        params, enter = entry(config, decoder, fold, shards)

        def one(_, micro: Batch):
            tokens = Tokens(micro.segments, micro.positions, micro.index)
            stats = hidden(config, decoder, fold, params, bias_LE, micro.ids, tokens, enter, record=True)[1]
            if stats is None or stats.experts_BSk is None:
                raise ValueError("a model without MoE layers has no choices to record")
            return None, jnp.moveaxis(stats.experts_BSk, 0, 2)

        return lax.scan(one, None, batch._replace(step=None))[1]

    split = PartitionSpec(fold.dense.pp, fold.dense.dp, fold.dense.sequence)
    return sharded(run, mesh, in_specs=_in_specs(decoder, fold), out_specs=split)


def _in_specs(decoder: Decoder, fold: Fold):
    specs = jax.tree.map(lambda p: p.spec, param.placements(decoder.declarations, fold))
    return specs, PartitionSpec(), reading_specs(fold)
