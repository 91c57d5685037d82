"""Loss and gradients of a step whose layers lie over pipeline stages: what `moex.pipeline` is given of the model.

B rows of this device, S its part of a sequence, D model width, L layers of a stack, E experts.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mesh import Fold, Placement, collectives
from mesh.vma import vary
from moex.config import ModelConfig, RouterConfig, RunConfig
from moex.dispatch import legs
from moex.layers import param
from moex.layers.moe import MoEStats, Steering
from moex.layers.tokens import Tokens
from moex.models.decoder import Decoder, Layer, as_they_are, embed
from moex.models.pattern import Kind
from moex.pipeline import storage, ticks
from moex.pipeline.chains import LOSSES, Chain, Cut, Given, Known, Making, Whole
from moex.pipeline.layout import Layout, layout
from moex.pipeline.residuals import zeros_like
from moex.pipeline.schedules import Schedule, one_f_one_b
from moex.precision.weight import ports, with_ports
from moex.train.further import further_loss, totals
from moex.train.loss import cross_entropy_sum
from moex.train.step import Batch, Sums, entering, no_sums, recipes_on_entry, steer

Tree = Any
NOT_SPLIT = Placement((), 0, (), ())
"""Of statistics, which are equal on the devices of a stage."""


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
    given = parallel.pp, parallel.virtual_pp, config.train.accumulation
    return one_f_one_b(*given, delay=int(parallel.overlap), parts=placed.parts())


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
        model = _Model(config, decoder, fold, weights, bias_LE, batch)
        found = ticks.run(schedule, placed, fold, model.work(), model.shape_BSD, model.dtype)
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


class _Model:
    """The model's parts as ticks call them, on one device's shards; m is the number of a micro-batch."""

    def __init__(self, config: RunConfig, decoder: Decoder, fold: Fold, weights: "_Weights", bias_LE, batch: Batch):
        self.config, self.decoder, self.fold, self.weights, self.bias_LE = config, decoder, fold, weights, bias_LE
        self.router, self.pp = config.model.router, fold.dense.pp
        self.micros = batch._replace(step=None)
        self.step_key = jax.random.fold_in(jax.random.key(config.train.seed), batch.step)
        self.tokens_of_losses = totals(config, fold, batch)
        self.dtype = jnp.dtype(config.precision.compute_dtype)
        self.shape_BSD = batch.ids.shape[1], batch.ids.shape[2] // fold.size(fold.dense.tp), config.model.d_model
        sparse = [kind.sparse for kind in decoder.kinds]
        self.router_of = jnp.asarray([sum(sparse[:layer]) for layer in range(len(sparse))], jnp.int32)
        self.seeds = {name: value / config.train.accumulation for name, value in coefficients(self.router).items()}

    def work(self) -> ticks.Work:
        values = {name: ports(part) for name, part in self.weights.ends.items()}
        like_BSD = vary(jnp.zeros(self.shape_BSD, self.dtype), self.fold.names)
        first = lambda ends, y_BSD: self.head(ends, y_BSD, jnp.int32(0), None)[1]
        return ticks.Work(
            ends=values,
            stacks={name: ports(stack) for name, stack in self.weights.stacks.items()},
            embed=self.embed,
            head=self.head,
            no_sums=zeros_like(jax.eval_shape(first, values, like_BSD)),
            no_seen=jnp.zeros((self.router.num_experts,), jnp.int32),
            chain=self.chain,
            known=self.known,
            seeds=self.seeds,
        )

    def micro(self, m) -> Batch:
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, m, 0, keepdims=False), self.micros)

    def steering(self, m, micro: Batch, seen_LE=None) -> Steering:
        return steer(self.config, self.bias_LE, micro, seen_LE=seen_LE, key=jax.random.fold_in(self.step_key, m))

    def embed(self, ends, m):
        x_BSD = embed(self.micro(m).ids, ends["ends"]["embedding"], self.fold, self.pp, self.dtype)
        return vary(x_BSD, self.fold.names)

    def known(self, kind: Kind, slot: ticks.At, m) -> Known:
        micro, steering = self.micro(m), Steering()
        if kind.sparse:
            steering = jax.tree.map(lambda x: x[self.router_of[slot.layer]], self.steering(m, micro))
        tokens = Tokens(micro.segments, micro.positions, micro.index)
        return Known(ticks.pick(self.weights.stacks[kind.stack], slot.index), tokens, steering)

    def chain(self, kind: Kind, weights, known: Known, given: Given) -> Chain:
        """Cut where rows travel, if it can be: with overlap or without, so that both have the same bits."""

        def build(values, known: Known) -> Layer:
            part = with_ports(param.within(known.whole, values), values)
            entered = part if self.weights.once else self.weights.enter(kind.stack, part, kind.high)
            return self.decoder.layer(kind, param.laid_over(known.whole, entered))

        cut = Cut if kind.sparse and can_be_cut(self.config) else Whole
        making = Making(build, self.decoder.by_name(kind.sparse, barrier=True), lambda loss: vary(loss, self.pp))
        return cut.of(making, self.fold, weights, known, given)

    def head(self, ends, y_BSD, m, sums: HeadSums | None):
        """(the loss on the last rank, zero on the others, `HeadSums` with this micro-batch's)."""
        config, decoder, fold, pp = self.config, self.decoder, self.fold, self.pp
        micro, last = self.micro(m), collectives.axis_index(pp) == collectives.axis_size(pp) - 1
        params = {name: with_ports(self.weights.ends[name], part) for name, part in ends.items()}
        hidden_BSD = decoder.final_norm(params["ends"], collectives.of_last(y_BSD, pp))
        with jax.named_scope("loss"):
            nll = cross_entropy_sum(
                hidden_BSD, decoder.head(params), micro.labels, micro.mask, fold, vocab_size=config.model.vocab_size,
                chunk_tokens=config.train.loss_chunk_tokens, over=pp,
            )  # fmt: skip
            lm_loss = collectives.psum(nll, fold.dense.dp + fold.dense.cp) / self.tokens_of_losses[0]
        loss, mtp_loss, more = lm_loss, jnp.float32(0), None
        if config.model.mtp_depth:
            steering = self.steering(m, micro, None if sums is None else _seen_by_all(config.model, sums))
            given = params, steering, micro, hidden_BSD, self.tokens_of_losses[1:], as_they_are
            mtp_loss, more = further_loss(config, decoder, fold, *given, over=pp, training=True)
            loss = loss + mtp_loss + sum(seed * getattr(more, name).sum() for name, seed in self.seeds.items())
        found = jax.tree.map(lambda x: vary(x, pp), HeadSums(lm_loss, mtp_loss, more))
        return jnp.where(last, vary(loss, pp), 0), found if sums is None else _joined(sums, found)


def can_be_cut(config: RunConfig) -> bool:
    """Whether rows' way to experts can be taken out of a layer; `moex.validate.pipeline` asks for it where it must be."""
    parallel = config.parallel
    apart = parallel.transport in legs.IN_LEGS and not parallel.echo_slots and parallel.waves == 1
    return apart and config.precision.wire == "compute" and not {"layer", "moe"} & set(config.memory.recompute)


def coefficients(router: RouterConfig) -> dict[str, float]:
    """Weights of a layer's losses in the step's, by their names in `MoEStats`."""
    return dict(
        balance_loss=router.aux_coefficient, sequence_loss=router.sequence_coefficient,
        global_loss=router.global_coefficient, z_loss=router.z_coefficient,
    )  # fmt: skip


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
    losses = {name: getattr(stats, name).sum() * share for name in LOSSES}
    loss = lm_loss + mtp_loss
    for name, factor in coefficients(router).items():
        loss += factor * losses[name]
    balance, sequence, all_micros, z = (losses[name] / model.num_routers for name in LOSSES)
    return Sums(
        lm_loss=lm_loss, mtp=mtp_loss, balance=balance, sequence=sequence, all_micros=all_micros, z=z,
        counts_LE=stats.counts_E, plain_LE=stats.plain_E, gates_LE=stats.gates_E, offsets_LE=stats.offsets_E * share,
        load=stats.load.max(), need=stats.need.max(axis=0),
        **{name: getattr(stats, name).sum() for name in ("overflow", "dropped", "not_finite", "clones")},
    ), loss  # fmt: skip
