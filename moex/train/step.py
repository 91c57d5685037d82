"""One training step as a pure function (state, batch) -> (state, metrics), jitted over a folded mesh.

Loss and gradients run inside one shard_map, written for one device's shards; clipping, optimizer and gates run on the
global view in the same jit. A micro-batches, B rows, S sequence, L MoE layers, E experts.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from mesh import Fold, collectives, sharded
from mesh.vma import vary, varying
from moex import balance
from moex.config import RouterConfig, RunConfig
from moex.layers import param
from moex.layers.moe import Steering
from moex.layers.tokens import Tokens
from moex.memory import host
from moex.models.decoder import Decoder, Enter, as_they_are
from moex.models.stacks import joined, parted
from moex.precision.recipes import Precision, resolve
from moex.precision.weight import ports, with_ports
from moex.train import qk_clip
from moex.train.further import further_loss, totals
from moex.train.loss import cross_entropy_sum
from moex.train.optim import learning_rate, without_frozen
from moex.train.state import Leaf, TrainState, count

NEEDS = ("need_cell", "need_spill", "need_rows", "need_stash")
"""Metrics: the factors that would have been enough for a step."""


class Batch(NamedTuple):
    """A step's tokens, int32 [A, B, S] unless said otherwise; micro-batch i holds the same rows on every mesh.

    step: int32 scalar, the step this batch is for.  ids, labels: tokens and next tokens.  mask: bool, the label counts.
    segments: document within the row, 0 is padding.  positions: offset within the document.  index: place in the row.
    experts: recorded choices [A, B, S, L, k] to use in place of the router's, or None.
    """

    step: Leaf
    ids: Leaf
    labels: Leaf
    mask: Leaf
    segments: Leaf
    positions: Leaf
    index: Leaf
    experts: Leaf = None


class Sums(NamedTuple):
    """What micro-batches add up to; equal on all devices. See `MoEStats`: the losses are means over layers and
    micro-batches, offsets_LE over micro-batches; counts and gates are sums; load, need and logits_LN, attention's largest
    of all layers and heads with QK-clip, else None, are the most of any.
    """

    lm_loss: Leaf
    mtp: Leaf
    balance: Leaf
    sequence: Leaf
    all_micros: Leaf
    z: Leaf
    counts_LE: Leaf
    plain_LE: Leaf
    gates_LE: Leaf
    overflow: Leaf
    dropped: Leaf
    not_finite: Leaf
    clones: Leaf
    offsets_LE: Leaf
    load: Leaf
    need: Leaf
    logits_LN: Leaf = None

    def joined(self, other: "Sums") -> "Sums":
        """Of the micro-batches of both."""
        largest = lambda name: jax.tree.map(jnp.maximum, getattr(self, name), getattr(other, name))
        most = {name: largest(name) for name in ("load", "need", "logits_LN")}
        return jax.tree.map(jnp.add, self, other)._replace(**most)


def batch_specs(fold: Fold, *, replay: bool = False) -> Batch:
    """How a batch is split: rows over dp, sequence over cp.  replay: with recorded choices of experts."""
    spec = PartitionSpec(None, fold.dense.dp, fold.dense.cp)
    return Batch(PartitionSpec(), spec, spec, spec, spec, spec, spec, spec if replay else None)


def abstract_batch(config: RunConfig, fold: Fold, mesh, *, replay: bool = False) -> Batch:
    """Shapes, dtypes and shardings of a step's batch."""
    train, model = config.train, config.model
    shape = (train.accumulation, train.batch_size // train.accumulation, train.seq_len)
    choices = (*shape, model.num_moe_layers, model.router.top_k)
    leaf = lambda shape, spec, dtype=jnp.int32: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
    specs = batch_specs(fold, replay=replay)
    return Batch(
        step=leaf((), specs.step),
        mask=leaf(shape, specs.mask, jnp.bool_),
        experts=leaf(choices, specs.experts) if replay else None,
        **{name: leaf(shape, specs.ids) for name in ("ids", "labels", "segments", "positions", "index")},
    )


def entering(config: RunConfig, decoder: Decoder, fold: Fold, places: Mapping | None = None) -> Enter:
    """(name of a part, its stored shards) -> its parameters as compute sees them; call it inside shard_map.

    places: where the shards lie, if not where they are stored.
    """
    places = places or param.placements(decoder.declarations, fold)
    dtype = jnp.dtype(config.precision.compute_dtype)
    precision = recipes_on_entry(config)

    def enter(name: str, shards: Mapping, high: bool = False, /) -> dict:
        recipes = Precision() if high else precision
        declared, places_of = (param.within(tree[name], shards) for tree in (decoder.declarations, places))
        return param.enter(declared, places_of, shards, dtype, recipes)

    return enter


def recipes_on_entry(config: RunConfig) -> Precision:
    """The recipes of weights that are quantised as they enter compute. With clones, experts' weights are so where they are
    used: what is fetched for a clone stands beside a device's own.
    """
    precision = resolve(config.precision)
    return dataclasses.replace(precision, experts=None) if config.parallel.echo_slots else precision


def entered(enter: Enter, shards: Mapping, decoder: Decoder) -> dict:
    """All parts at once, layers that compute high apart (`stacks.parted`)."""
    parts = parted(shards, decoder.kinds)
    return {name: enter(name.removesuffix("_high"), part, name.endswith("_high")) for name, part in parts.items()}


def entry(config: RunConfig, decoder: Decoder, fold: Fold, shards: Mapping) -> tuple[Mapping, Enter]:
    """Parameters and the `Enter` to give with them: gathered here and now with ZeRO-1, by each layer with ZeRO-3 or where
    a device of a pipeline can't hold all.
    """
    enter = entering(config, decoder, fold)
    at_once = config.parallel.zero == 1 and config.parallel.pp == 1
    return (entered(enter, shards, decoder), as_they_are) if at_once else (shards, enter)


def hidden(
    config: RunConfig,
    decoder: Decoder,
    fold: Fold,
    params,
    steering,
    ids_BS,
    tokens: Tokens,
    enter=as_they_are,
    **options,
):
    """Final activations and statistics in the run's compute dtype, see `Decoder.hidden`."""
    dtype = jnp.dtype(config.precision.compute_dtype)
    return decoder.hidden(params, steering, ids_BS, tokens, fold, dtype, enter, **options)


def nll_sum(
    config: RunConfig, decoder: Decoder, fold: Fold, params, steering, micro: Batch, enter=as_they_are, **options
):
    """Sum of -log p(label) over all devices' valid tokens of a micro-batch, the layers' statistics, and final activations."""
    tokens = Tokens(micro.segments, micro.positions, micro.index)
    activations, stats = hidden(config, decoder, fold, params, steering, micro.ids, tokens, enter, **options)
    with jax.named_scope("loss"):
        nll = cross_entropy_sum(
            activations, decoder.head(params, enter), micro.labels, micro.mask, fold,
            vocab_size=config.model.vocab_size, chunk_tokens=config.train.loss_chunk_tokens,
        )  # fmt: skip
        return collectives.psum(nll, fold.dense.dp + fold.dense.cp), stats, activations


def micro_loss(
    config: RunConfig, decoder: Decoder, fold: Fold, params, steering, micro: Batch, totals, enter, meters=qk_clip.NONE
):
    """One micro-batch's share of the step's loss, and its `Sums`; runs inside shard_map.

    The language-model loss is divided by the step's global number of valid tokens (`totals`), so micro-batches and devices
    add up, and each depth of multi-token prediction by its own;
    auxiliary losses are statistics of a micro-batch over all devices and enter as their mean over micro-batches.
    """
    router, layers = config.model.router, config.model.num_routers
    options = dict(training=True, meters_LN=meters.layers)
    nll, stats, activations = nll_sum(config, decoder, fold, params, steering, micro, enter, **options)
    lm_loss, mtp_loss = nll / totals[0], jnp.float32(0)
    if stats is None:
        return lm_loss, no_sums((0, router.num_experts))._replace(lm_loss=lm_loss)
    if config.model.mtp_depth:
        given = params, steering, micro, activations, totals[1:], enter
        mtp_loss, more = further_loss(config, decoder, fold, *given, training=True, meters_kN=meters.further)
        stats = jax.tree.map(lambda *x: jnp.concatenate(x), stats, more)
    share = 1 / config.train.accumulation
    terms = dict(
        balance=(router.aux_coefficient, stats.balance_loss),
        sequence=(router.sequence_coefficient, stats.sequence_loss),
        all_micros=(router.global_coefficient, stats.global_loss),
        z=(router.z_coefficient, stats.z_loss),
    )
    shares = {name: (factor, loss_L.sum() * share) for name, (factor, loss_L) in terms.items()}
    loss = lm_loss + mtp_loss
    for factor, value in shares.values():
        loss += factor * value
    return loss, Sums(
        lm_loss=lm_loss,
        mtp=mtp_loss,
        **{name: value / layers for name, (_, value) in shares.items()},
        counts_LE=stats.counts_E,
        plain_LE=stats.plain_E,
        gates_LE=stats.gates_E,
        offsets_LE=stats.offsets_E * share,
        load=stats.load.max(),
        need=stats.need.max(axis=0),
        **{name: getattr(stats, name).sum() for name in ("overflow", "dropped", "not_finite", "clones")},
    )


def no_sums(shape_LE: tuple[int, int]) -> Sums:
    """`Sums` of nothing: zeros."""
    none, counts = jnp.float32(0), jnp.zeros(shape_LE, jnp.int32)
    zeros = dict.fromkeys(("overflow", "dropped", "not_finite", "clones"), jnp.int32(0))
    per_expert = dict.fromkeys(("gates_LE", "offsets_LE"), counts.astype(jnp.float32))
    floats = per_expert | dict(load=none, need=jnp.zeros((len(NEEDS),), jnp.float32))
    return Sums(none, none, none, none, none, none, counts, counts, **zeros, **floats)


def steer(config: RunConfig, bias_LE, micro: Batch, *, seen_LE=None, key=None) -> Steering:
    """What the layers' routing depends on in one micro-batch."""
    router, layers = config.model.router, config.model.num_routers
    if not layers:
        return Steering()
    replay = None if micro.experts is None else jnp.moveaxis(micro.experts, 2, 0)
    return Steering(
        bias_E=bias_LE,
        seen_E=seen_LE if router.global_coefficient else None,
        key=jax.random.split(key, layers) if router.noisy and key is not None else None,
        replay_BSk=replay,
    )


def stretches(config: RunConfig, decoder: Decoder) -> list[tuple[Decoder, slice]]:
    """Micro-batches that follow each other and whose documents lie over as many ranks, with the decoder for them."""
    if not config.parallel.cp_groups:
        return [(decoder, slice(None))]
    groups = config.parallel.groups_of(config.train.accumulation)
    parts = {group: slice(groups.index(group), groups.index(group) + groups.count(group)) for group in groups}
    like = lambda group: Decoder(config.model, config.parallel, config.memory, config.precision, cp_group=group)
    return [(like(group), part) for group, part in parts.items()]


def loss_and_gradients(config: RunConfig, decoder: Decoder, fold: Fold) -> Callable:
    """The function inside shard_map: (stored shards, bias_LE, batch) -> (gradients of the shards, loss, Sums, tokens).

    ZeRO-1 gathers parameters once, sums gradients of the gathered ones over micro-batches and reduces them once; ZeRO-3
    gathers a layer's parameters where the layer runs, and reduces its gradients there.
    """
    places = param.placements(decoder.declarations, fold)

    def run(shards, bias_LE, batch: Batch):
        once = config.parallel.zero == 1
        step_key = jax.random.fold_in(jax.random.key(config.train.seed), batch.step)
        params, enter = entry(config, decoder, fold, shards)
        valid = collectives.psum(batch.mask.sum(dtype=jnp.int32), fold.dense.dp + fold.dense.cp)
        tokens_of_losses = totals(config, fold, batch)

        def micro_gradients(decoder: Decoder, micro: Batch, number, seen_LE):
            key = jax.random.fold_in(step_key, number)
            steering = steer(config, bias_LE, micro, seen_LE=seen_LE, key=key)
            given = steering, micro, tokens_of_losses, enter
            function = lambda p, read: micro_loss(config, decoder, fold, with_ports(params, p), *given, read)
            differentiated = jax.value_and_grad(function, argnums=(0, 1), has_aux=True)
            (loss, sums), (grads, read) = differentiated(ports(params), qk_clip.meters(config, fold))
            sums = sums._replace(logits_LN=qk_clip.over_devices(read, fold))
            return jax.tree.map(lambda g: g.astype(jnp.float32), grads), loss, sums

        micros = batch._replace(step=None)
        if config.train.accumulation == 1:
            grads, loss, sums = micro_gradients(decoder, jax.tree.map(lambda x: x[0], micros), jnp.int32(0), None)
        else:
            zeros = lambda x: vary(jnp.zeros(x.shape, x.dtype), varying(x))
            first = jax.tree.map(lambda x: x[0], micros), jnp.int32(0), jnp.zeros_like(bias_LE, jnp.int32)
            start = jax.tree.map(zeros, jax.eval_shape(functools.partial(micro_gradients, decoder), *first))

            def add(decoder, total, at):
                (grads, loss, sums), (micro, number) = total, at
                more, more_loss, more_sums = micro_gradients(decoder, micro, number, sums.plain_LE)
                return (jax.tree.map(jnp.add, grads, more), loss + more_loss, sums.joined(more_sums)), None

            numbers = jnp.arange(config.train.accumulation, dtype=jnp.int32)
            total = start
            for own, part in stretches(config, decoder):
                given = jax.tree.map(lambda x, part=part: x[part], (micros, numbers))
                total, _ = lax.scan(functools.partial(add, own), total, given)
            grads, loss, sums = total
        if once:
            grads = jax.tree.map(lambda p, g: p.leave(g), places, joined(grads, decoder.kinds))
        return grads, loss, sums, valid

    return run


def make_train_step(
    config: RunConfig, decoder: Decoder, tx: optax.GradientTransformation, fold: Fold, mesh, *, replay: bool = False,
    gradients: Callable | None = None,
) -> Callable:  # fmt: skip
    """(state, batch) -> (state, metrics); jit it with the state donated.  replay: batches bring choices of experts.

    gradients: what takes the place of `loss_and_gradients`.

    An overflow anywhere, or a batch of another step, leaves the whole state as it was (`applied` is 0 and the step can be
    run again). Non-finite loss or gradients advance the step but leave parameters, optimizer and bias.
    """
    specs = jax.tree.map(lambda p: p.spec, param.placements(decoder.declarations, fold))
    scalar = PartitionSpec()
    inner = sharded(
        (gradients or loss_and_gradients)(config, decoder, fold), mesh,
        in_specs=(specs, scalar, batch_specs(fold, replay=replay)),
        out_specs=(specs, scalar, Sums(*[scalar] * len(Sums._fields)), scalar),
    )  # fmt: skip
    schedule = learning_rate(config.optimizer, config.train.steps)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict]:
        grads, loss, sums, valid = inner(state.params, state.router_bias, batch)
        grads = without_frozen(config.optimizer, decoder.declarations, grads)
        grad_norm, lr = optax.tree.norm(grads), schedule(state.step)
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        go = (sums.overflow == 0) & (batch.step == state.step)
        parked = state.optimizer
        with jax.named_scope("optimizer"):
            if config.memory.optimizer == "host":
                held, grads = host.brought(parked, grads)
                state = state._replace(optimizer=held)
            direction, moments = tx.update(grads, state.optimizer, state.params)
            params = jax.tree.map(lambda p, d: p + lr * d, state.params, direction)
            params = qk_clip.clipped(config, params, sums.logits_LN)
        bias = state.router_bias
        if config.model.num_routers:
            bias = _next_bias(config.model.router, bias, sums)
        ema = optax.incremental_update(params, state.ema, 1 - config.optimizer.ema_decay) if state.ema else {}
        before = state.params, state.optimizer, state.router_bias, state.ema
        learned = _where(finite, (params, moments, bias, ema), before)
        rows = batch.ids.shape[0] * batch.ids.shape[1]
        after = TrainState(
            step=state.step + 1,
            params=learned[0],
            optimizer=learned[1],
            router_bias=learned[2],
            skips=jnp.where(finite, 0, state.skips + 1),
            samples=count(state.samples, jnp.int32(rows)),
            tokens=count(state.tokens, valid),
            ema=learned[3],
        )
        metrics = dict(
            step=state.step, loss=loss, lm_loss=sums.lm_loss, aux_loss=sums.balance, z_loss=sums.z, grad_norm=grad_norm,
            lr=lr, valid_tokens=valid, expert_counts=sums.counts_LE, overflow=sums.overflow, dropped=sums.dropped,
            router_not_finite=sums.not_finite, skipped=(~finite).astype(jnp.int32), applied=go.astype(jnp.int32),
        )  # fmt: skip
        router = config.model.router
        metrics |= dict(mtp_loss=sums.mtp) if config.model.mtp_depth else {}
        metrics |= dict(max_logits=sums.logits_LN.max(axis=-1)) if config.optimizer.qk_clip else {}
        metrics |= dict(sequence_loss=sums.sequence) if router.sequence_coefficient else {}
        metrics |= dict(global_loss=sums.all_micros) if router.global_coefficient else {}
        metrics |= dict(clones=sums.clones, echo_load=sums.load) if config.parallel.echo_slots else {}
        if config.model.num_moe_layers:
            needs = dict(zip(NEEDS, sums.need, strict=True))
            mass_LE = sums.gates_LE
            metrics["gate_load"] = mass_LE.max(axis=-1) / jnp.maximum(mass_LE.mean(axis=-1), 1e-30)
            metrics |= needs if config.memory.stash else {n: x for n, x in needs.items() if n != "need_stash"}
        after = _where(go, after, state)
        if config.memory.optimizer == "host":
            after = after._replace(optimizer=host.sent_back(after.optimizer, parked))
        return after, metrics

    return step


def _next_bias(router: RouterConfig, bias_LE, sums: Sums):
    if router.selection == "quantile":
        return balance.update_quantile_bias(bias_LE, sums.offsets_LE, router.quantile_decay)
    if not router.bias_rate:
        return bias_LE
    moved = balance.update_bias(bias_LE, sums.counts_LE, router.bias_rate)
    return balance.centred(moved) if router.bias_centred else moved


def _where(condition, new, old):
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)
