"""Loss and gradients of a step whose layers lie over pipeline stages: what `moex.pipeline` is given of the model.

B rows of this device, S its part of a sequence, D model width, L layers of a stack, E experts.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mesh import Fold, Placement, collectives
from mesh.vma import vary
from moex.config import ModelConfig, RunConfig
from moex.layers import param
from moex.layers.moe import MoEStats, Steering
from moex.layers.tokens import Tokens
from moex.models.decoder import Decoder, as_they_are, embed
from moex.models.pattern import Kind
from moex.pipeline import storage, ticks
from moex.pipeline.layout import Layout, layout
from moex.pipeline.residuals import zeros_like
from moex.pipeline.schedules import Schedule, one_f_one_b
from moex.precision.weight import is_quantised, ports, with_ports
from moex.train.further import further_loss, totals
from moex.train.loss import cross_entropy_sum
from moex.train.step import Batch, Sums, entering, no_sums, recipes_on_entry, steer

Tree = Any
NOT_SPLIT = Placement((), 0, (), ())
"""Of statistics, which are equal on the devices of a stage."""


class Known(NamedTuple):
    """What a layer has in both passes.  codes: its weights with quantised ones, None without any."""

    codes: Tree
    tokens: Tokens
    steering: Steering


class HeadSums(NamedTuple):
    """lm_loss, mtp: of all micro-batches.  further: `MoEStats` of the layers of multi-token prediction, or None."""

    lm_loss: jax.Array
    mtp: jax.Array
    further: MoEStats | None


def layout_of(config: RunConfig, decoder: Decoder) -> Layout:
    """Where the run's layers stand.  Raises ValueError where they don't fit its stages."""
    parallel = config.parallel
    return layout(decoder.kinds, parallel.pp, parallel.virtual_pp, parallel.layout, mtp_depth=config.model.mtp_depth)


def schedule_of(config: RunConfig, placed: Layout) -> Schedule:
    """Of the run's micro-batches."""
    parallel = config.parallel
    return one_f_one_b(parallel.pp, parallel.virtual_pp, config.train.accumulation, parts=placed.parts())


def loss_and_gradients(config: RunConfig, decoder: Decoder, fold: Fold) -> Callable:
    """The function inside shard_map, as `moex.train.step.loss_and_gradients` has it, with the layers over stages.

    ZeRO-1 gathers a rank's layers once and reduces their gradients once; ZeRO-3 does so in each layer of each tick. Embedding
    and head are split over stages by rows of the vocabulary; they, the final norm and the layers of multi-token prediction,
    which all ranks compute for the last one, are gathered once a step.
    """
    placed = layout_of(config, decoder)
    schedule = schedule_of(config, placed)

    def run(shards, bias_LE, batch: Batch):
        weights = _Weights(config, decoder, fold, placed, shards)
        work = _work(config, decoder, fold, weights, bias_LE, batch)
        _, rows, seq_len = batch.ids.shape
        shape = (rows, seq_len // fold.size(fold.dense.tp), config.model.d_model)
        found = ticks.run(schedule, placed, fold, work, shape, jnp.dtype(config.precision.compute_dtype))
        sums, loss = _sums(config, decoder, fold, placed, found)
        valid = collectives.psum(batch.mask.sum(dtype=jnp.int32), fold.dense.dp + fold.dense.cp)
        return weights.leave(found), loss, sums, valid

    return run


class _Weights:
    """A rank's weights as ticks use them, and the way of their gradients back to storage."""

    def __init__(self, config: RunConfig, decoder: Decoder, fold: Fold, placed: Layout, shards: Mapping):
        self.declared, self.fold, self.pp = decoder.declarations, fold, fold.dense.pp
        self.places = param.placements(self.declared, fold)
        self.once = config.parallel.zero == 1
        stacks = [name for name in self.declared if name.endswith("_layers")]
        self.orders = {name: placed.order(name, decoder.kinds) for name in stacks}
        self.staged = jax.tree.map(lambda p: storage.of_stage(p, self.pp), {name: self.places[name] for name in stacks})
        self.enter = entering(config, decoder, fold, self.staged)
        of_stages = {name: self._to_stages(config, name, shards[name]) for name in stacks}
        self.stacks = {name: self.enter(name, of_stages[name]) for name in stacks} if self.once else of_stages
        whole = entering(config, decoder, fold)
        self.ends = {name: self._end(name, shards[name], whole) for name in self.declared if name not in stacks}

    def _to_stages(self, config: RunConfig, name: str, shards: Mapping):
        """In the dtype they are gathered in, or in float32 where that happens in each layer, or codes are made of them."""
        codes = config.precision.gather == "codes" and recipes_on_entry(config)
        compute = jnp.dtype(config.precision.compute_dtype)

        def one(d: param.Declaration, place, shard):
            exact = d.float32 or not self.once or bool(codes and codes.recipe(d.product))
            dtype = jnp.float32 if exact else compute
            return storage.to_stages(shard, place, self.orders[name], self.pp, dtype)

        return param.tree_map(one, self.declared[name], self.places[name], shards)

    def _end(self, name: str, shards: Mapping, whole: Callable):
        """A part outside of stages: whole on each rank, but for the rows of embedding and head."""
        if name != "ends":
            return whole(name, shards)
        split = lambda d, place, x: storage.rows_to_ranks(x, place, self.pp, jnp.float32) if d.valid_rows else None
        rows = param.tree_map(split, self.declared[name], self.places[name], shards)
        rest = {part: x for part, x in shards.items() if not jax.tree.leaves(rows[part])}
        return rows | whole(name, rest)

    def leave(self, found: ticks.Totals) -> dict:
        """Gradients of the stored shards, summed over all devices."""
        stacks = found.stacks
        if self.once:
            stacks = jax.tree.map(lambda place, g: place.leave(g), self.staged, stacks)

        def home(order, d: param.Declaration, place, gradient):
            if d.stacked and order is not None:
                return storage.from_stages(gradient, place, order, self.pp, d.stacked)
            return storage.rows_from_ranks(gradient, place, self.pp) if d.valid_rows else place.leave(gradient)

        return {
            name: param.tree_map(
                functools.partial(home, self.orders.get(name)), self.declared[name], self.places[name], gradients
            )
            for name, gradients in (stacks | found.ends).items()
        }


def _work(config: RunConfig, decoder: Decoder, fold: Fold, weights: _Weights, bias_LE, batch: Batch) -> ticks.Work:
    model, pp = config.model, fold.dense.pp
    step_key = jax.random.fold_in(jax.random.key(config.train.seed), batch.step)
    micros = batch._replace(step=None)
    tokens_of_losses = totals(config, fold, batch)
    at = lambda m: jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, m, 0, keepdims=False), micros)
    dtype = jnp.dtype(config.precision.compute_dtype)
    router, share = model.router, 1 / config.train.accumulation
    coefficients = dict(
        balance_loss=router.aux_coefficient, sequence_loss=router.sequence_coefficient,
        global_loss=router.global_coefficient, z_loss=router.z_coefficient,
    )  # fmt: skip
    seeds = {name: value * share for name, value in coefficients.items()}
    steering_of = lambda m, micro, seen_LE: steer(
        config, bias_LE, micro, seen_LE=seen_LE, key=jax.random.fold_in(step_key, m)
    )
    router_of = jnp.asarray(_numbers(decoder), jnp.int32)
    quantised = lambda stack: any(map(is_quantised, jax.tree.leaves(stack, is_leaf=is_quantised)))
    codes = {name: stack if quantised(stack) else None for name, stack in weights.stacks.items()}

    def embedded(ends, m):
        x_BSD = embed(at(m).ids, ends["ends"]["embedding"], fold, pp).astype(dtype)
        return vary(x_BSD, fold.names)

    def known(kind: Kind, slot: ticks.At, m) -> Known:
        micro, steering = at(m), Steering()
        if kind.sparse:
            stacked = steering_of(m, micro, None)
            steering = jax.tree.map(lambda x: x[router_of[slot.layer]], stacked)
        here = ticks.pick(codes[kind.stack], slot.index)
        return Known(here, Tokens(micro.segments, micro.positions, micro.index), steering)

    def layer(kind: Kind) -> Callable:
        def run(values, known: Known, given):
            x_BSD, seen_E = given
            part = values if known.codes is None else with_ports(known.codes, values)
            entered = part if weights.once else weights.enter(kind.stack, part, kind.high)
            steering = known.steering._replace(seen_E=seen_E if router.global_coefficient else None)
            module = decoder.layer(kind, entered)
            y_BSD, _, stats = module(x_BSD, None, steering, known.tokens, fold, training=True)
            losses = {} if stats is None else {name: vary(getattr(stats, name), pp) for name in ticks.LOSSES}
            return (y_BSD, losses), stats

        return run

    def head(ends, y_BSD, m, sums: HeadSums | None):
        micro, last = at(m), collectives.axis_index(pp) == collectives.axis_size(pp) - 1
        params = {name: with_ports(weights.ends[name], part) for name, part in ends.items()}
        hidden_BSD = decoder.final_norm(params["ends"], collectives.of_last(y_BSD, pp))
        with jax.named_scope("loss"):
            nll = cross_entropy_sum(
                hidden_BSD, decoder.head(params), micro.labels, micro.mask, fold, vocab_size=model.vocab_size,
                chunk_tokens=config.train.loss_chunk_tokens, over=pp,
            )  # fmt: skip
            lm_loss = collectives.psum(nll, fold.dense.dp + fold.dense.cp) / tokens_of_losses[0]
        loss, mtp_loss, more = lm_loss, jnp.float32(0), None
        if model.mtp_depth:
            steering = steering_of(m, micro, None if sums is None else _seen_by_all(model, sums))
            given = params, steering, micro, hidden_BSD, tokens_of_losses[1:], as_they_are
            mtp_loss, more = further_loss(config, decoder, fold, *given, over=pp, training=True)
            loss = loss + mtp_loss + sum(seed * getattr(more, name).sum() for name, seed in seeds.items())
        found = jax.tree.map(lambda x: vary(x, pp), HeadSums(lm_loss, mtp_loss, more))
        return jnp.where(last, vary(loss, pp), 0), found if sums is None else _joined(sums, found)

    values = {name: ports(part) for name, part in weights.ends.items()}
    shape_BSD = (batch.ids.shape[1], batch.ids.shape[2] // fold.size(fold.dense.tp), model.d_model)
    example_BSD = vary(jnp.zeros(shape_BSD, dtype), fold.names)
    no_sums = zeros_like(jax.eval_shape(lambda ends, y: head(ends, y, jnp.int32(0), None)[1], values, example_BSD))
    return ticks.Work(
        ends=values, stacks={name: ports(stack) for name, stack in weights.stacks.items()}, embed=embedded, head=head,
        no_sums=no_sums, no_seen=jnp.zeros((router.num_experts,), jnp.int32),
        layers={kind: layer(kind) for kind in dict.fromkeys(decoder.kinds)}, known=known, seeds=seeds,
    )  # fmt: skip


def _numbers(decoder: Decoder) -> list[int]:
    """Of each layer, how many before it have experts: its router's number, if it has one."""
    sparse = [kind.sparse for kind in decoder.kinds]
    return [sum(sparse[:i]) for i in range(len(sparse))]


def _seen_by_all(model: ModelConfig, sums: HeadSums):
    """Plain choices of earlier micro-batches in the layers of multi-token prediction, zeros for others: int32 [L, E]."""
    assert sums.further is not None, "asked for where there are such layers"
    return jnp.concatenate(
        [jnp.zeros((model.num_moe_layers, model.router.num_experts), jnp.int32), sums.further.plain_E]
    )


def _joined(sums: HeadSums, found: HeadSums) -> HeadSums:
    further = None
    if sums.further is not None and found.further is not None:
        further = ticks.joined(sums.further, found.further)
    return HeadSums(sums.lm_loss + found.lm_loss, sums.mtp + found.mtp, further)


def _sums(
    config: RunConfig, decoder: Decoder, fold: Fold, placed: Layout, found: ticks.Totals
) -> tuple[Sums, jax.Array]:
    """The step's `Sums` and loss, on all devices: every number stands on one rank, and zeros on the others."""
    model, router, pp, share = config.model, config.model.router, fold.dense.pp, 1 / config.train.accumulation
    last = collectives.axis_index(pp) == collectives.axis_size(pp) - 1
    equal = lambda x: collectives.psum(jnp.where(last, x, jnp.zeros_like(x)), pp)  # they are; this lets the type say so
    lm_loss, mtp_loss, further = jax.tree.map(equal, found.sums)
    if found.stats is None:
        return no_sums((0, router.num_experts))._replace(lm_loss=lm_loss), lm_loss
    order_PN = placed.order("moe_layers", decoder.kinds)
    everywhere = lambda x: storage.from_stages(x, NOT_SPLIT, order_PN, pp, model.num_moe_layers)
    stats = jax.tree.map(everywhere, found.stats)
    if further is not None:
        stats = jax.tree.map(lambda *x: jnp.concatenate(x), stats, further)
    losses = {name: getattr(stats, name).sum() * share for name in ticks.LOSSES}
    coefficients = (
        router.aux_coefficient,
        router.sequence_coefficient,
        router.global_coefficient,
        router.z_coefficient,
    )
    loss = lm_loss + mtp_loss
    for factor, value in zip(coefficients, losses.values(), strict=True):
        loss += factor * value
    balance, sequence, all_micros, z = (value / model.num_routers for value in losses.values())
    return Sums(
        lm_loss=lm_loss, mtp=mtp_loss, balance=balance, sequence=sequence, all_micros=all_micros, z=z,
        counts_LE=stats.counts_E, plain_LE=stats.plain_E, gates_LE=stats.gates_E, offsets_LE=stats.offsets_E * share,
        load=stats.load.max(), need=stats.need.max(axis=0),
        **{name: getattr(stats, name).sum() for name in ("overflow", "dropped", "not_finite", "clones")},
    ), loss  # fmt: skip
