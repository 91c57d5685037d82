"""One training step as a pure function (state, batch) -> (state, metrics), jitted over a folded mesh.

Loss and gradients run inside one shard_map, written for one device's shards; clipping, optimizer and gates run on the
global view in the same jit. A micro-batches, B rows, S sequence, L MoE layers, E experts.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from mesh import Fold, collectives, sharded
from mesh.vma import vary, varying
from moex.config import RunConfig
from moex.layers import param
from moex.layers.router import update_bias
from moex.layers.tokens import Tokens
from moex.models.decoder import Decoder, Enter, as_they_are
from moex.train.loss import cross_entropy_sum
from moex.train.optim import learning_rate
from moex.train.state import Leaf, TrainState, count


class Batch(NamedTuple):
    """A step's tokens, int32 [A, B, S] unless said otherwise; micro-batch i holds the same rows on every mesh.

    step: int32 scalar, the step this batch is for.  ids, labels: tokens and next tokens.  mask: bool, the label counts.
    segments: document within the row, 0 is padding.  positions: offset within the document.  index: place in the row.
    """

    step: Leaf
    ids: Leaf
    labels: Leaf
    mask: Leaf
    segments: Leaf
    positions: Leaf
    index: Leaf


class Sums(NamedTuple):
    """What micro-batches add up to; equal on all devices. balance and z are means over layers and micro-batches."""

    lm_loss: Leaf
    balance: Leaf
    z: Leaf
    counts_LE: Leaf
    overflow: Leaf


def batch_specs(fold: Fold) -> Batch:
    """How a batch is split: rows over dp, sequence over cp."""
    spec = PartitionSpec(None, fold.dense.dp, fold.dense.cp)
    return Batch(PartitionSpec(), spec, spec, spec, spec, spec, spec)


def abstract_batch(config: RunConfig, fold: Fold, mesh) -> Batch:
    """Shapes, dtypes and shardings of a step's batch."""
    train = config.train
    shape = (train.accumulation, train.batch_size // train.accumulation, train.seq_len)
    dtypes = Batch(*[jnp.int32] * 7)._replace(mask=jnp.bool_)
    shapes = Batch(*[shape] * 7)._replace(step=())
    return Batch(
        *(
            jax.ShapeDtypeStruct(s, d, sharding=NamedSharding(mesh, p))
            for s, d, p in zip(shapes, dtypes, batch_specs(fold), strict=True)
        )
    )


def entering(config: RunConfig, decoder: Decoder, fold: Fold) -> Enter:
    """(name of a part, its stored shards) -> its parameters as compute sees them; call it inside shard_map."""
    places = param.placements(decoder.declarations, fold)
    dtype = jnp.dtype(config.precision.compute_dtype)
    return lambda name, shards: param.enter(decoder.declarations[name], places[name], shards, dtype)


def entered(enter: Enter, shards: Mapping) -> dict:
    """All parts at once."""
    return {name: enter(name, part) for name, part in shards.items()}


def hidden(config: RunConfig, decoder: Decoder, fold: Fold, params, bias_LE, ids_BS, tokens: Tokens, enter=as_they_are):
    """Final activations and statistics, see `Decoder.hidden`; biases take part where the router is balanced by them."""
    biases = bias_LE if config.model.router.bias_rate > 0 else None
    dtype = jnp.dtype(config.precision.compute_dtype)
    return decoder.hidden(params, biases, ids_BS, tokens, fold, dtype, enter)


def nll_sum(config: RunConfig, decoder: Decoder, fold: Fold, params, bias_LE, micro: Batch, enter=as_they_are):
    """Sum of -log p(label) over all devices' valid tokens of a micro-batch, and the layers' statistics."""
    tokens = Tokens(micro.segments, micro.positions, micro.index)
    activations, stats = hidden(config, decoder, fold, params, bias_LE, micro.ids, tokens, enter)
    with jax.named_scope("loss"):
        nll = cross_entropy_sum(
            activations, decoder.head(params, enter), micro.labels, micro.mask, fold,
            vocab_size=config.model.vocab_size, chunk_tokens=config.train.loss_chunk_tokens,
        )  # fmt: skip
        return collectives.psum(nll, fold.dense.dp + fold.dense.cp), stats


def micro_loss(config: RunConfig, decoder: Decoder, fold: Fold, params, bias_LE, micro: Batch, total_tokens, enter):
    """One micro-batch's share of the step's loss, and its `Sums`; runs inside shard_map.

    The language-model loss is divided by the step's global number of valid tokens, so micro-batches and devices add up;
    auxiliary losses are statistics of a micro-batch over all devices and enter as their mean over micro-batches.
    """
    model, router = config.model, config.model.router
    nll, stats = nll_sum(config, decoder, fold, params, bias_LE, micro, enter)
    lm_loss = nll / total_tokens
    if stats is None:
        none = jnp.float32(0)
        return lm_loss, Sums(lm_loss, none, none, jnp.zeros((0, router.num_experts), jnp.int32), jnp.int32(0))
    share = 1 / config.train.accumulation
    balance, z = stats.balance_loss.sum() * share, stats.z_loss.sum() * share
    loss = lm_loss + router.aux_coefficient * balance + router.z_coefficient * z
    layers = model.num_moe_layers
    return loss, Sums(lm_loss, balance / layers, z / layers, stats.counts_E, stats.overflow.sum())


def loss_and_gradients(config: RunConfig, decoder: Decoder, fold: Fold) -> Callable:
    """The function inside shard_map: (stored shards, bias_LE, batch) -> (gradients of the shards, loss, Sums, tokens).

    ZeRO-1 gathers parameters once, sums gradients of the gathered ones over micro-batches and reduces them once; ZeRO-3
    gathers a layer's parameters where the layer runs, and reduces its gradients there.
    """
    places, enter_part = param.placements(decoder.declarations, fold), entering(config, decoder, fold)

    def run(shards, bias_LE, batch: Batch):
        once = config.parallel.zero == 1
        params, enter = (entered(enter_part, shards), as_they_are) if once else (shards, enter_part)
        valid = collectives.psum(batch.mask.sum(dtype=jnp.int32), fold.dense.dp + fold.dense.cp)
        total_tokens = jnp.maximum(valid, 1).astype(jnp.float32)

        def micro_gradients(micro: Batch):
            function = lambda p: micro_loss(config, decoder, fold, p, bias_LE, micro, total_tokens, enter)
            (loss, sums), grads = jax.value_and_grad(function, has_aux=True)(params)
            return jax.tree.map(lambda g: g.astype(jnp.float32), grads), loss, sums

        micros = batch._replace(step=None)
        if config.train.accumulation == 1:
            grads, loss, sums = micro_gradients(jax.tree.map(lambda x: x[0], micros))
        else:
            zeros = lambda x: vary(jnp.zeros(x.shape, x.dtype), varying(x))
            start = jax.tree.map(zeros, jax.eval_shape(micro_gradients, jax.tree.map(lambda x: x[0], micros)))
            add = lambda total, micro: (jax.tree.map(jnp.add, total, micro_gradients(micro)), None)
            (grads, loss, sums), _ = lax.scan(add, start, micros)
        if once:
            grads = jax.tree.map(lambda p, g: p.leave(g), places, grads)
        return grads, loss, sums, valid

    return run


def make_train_step(
    config: RunConfig, decoder: Decoder, tx: optax.GradientTransformation, fold: Fold, mesh
) -> Callable:
    """(state, batch) -> (state, metrics); jit it with the state donated.

    An overflow anywhere, or a batch of another step, leaves the whole state as it was (`applied` is 0 and the step can be
    run again). Non-finite loss or gradients advance the step but leave parameters, optimizer and bias.
    """
    specs = jax.tree.map(lambda p: p.spec, param.placements(decoder.declarations, fold))
    scalar = PartitionSpec()
    inner = sharded(
        loss_and_gradients(config, decoder, fold), mesh,
        in_specs=(specs, scalar, batch_specs(fold)), out_specs=(specs, scalar, Sums(*[scalar] * 5), scalar),
    )  # fmt: skip
    schedule = learning_rate(config.optimizer, config.train.steps)
    rate = config.model.router.bias_rate

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict]:
        grads, loss, sums, valid = inner(state.params, state.router_bias, batch)
        grad_norm, lr = optax.tree.norm(grads), schedule(state.step)
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        go = (sums.overflow == 0) & (batch.step == state.step)
        with jax.named_scope("optimizer"):
            direction, moments = tx.update(grads, state.optimizer, state.params)
            params = jax.tree.map(lambda p, d: p + lr * d, state.params, direction)
        bias = update_bias(state.router_bias, sums.counts_LE, rate) if rate else state.router_bias
        learned = _where(finite, (params, moments, bias), (state.params, state.optimizer, state.router_bias))
        rows = batch.ids.shape[0] * batch.ids.shape[1]
        after = TrainState(
            step=state.step + 1,
            params=learned[0],
            optimizer=learned[1],
            router_bias=learned[2],
            skips=jnp.where(finite, 0, state.skips + 1),
            samples=count(state.samples, jnp.int32(rows)),
            tokens=count(state.tokens, valid),
        )
        metrics = dict(
            step=state.step, loss=loss, lm_loss=sums.lm_loss, aux_loss=sums.balance, z_loss=sums.z, grad_norm=grad_norm,
            lr=lr, valid_tokens=valid, expert_counts=sums.counts_LE, overflow=sums.overflow,
            skipped=(~finite).astype(jnp.int32), applied=go.astype(jnp.int32),
        )  # fmt: skip
        return _where(go, after, state), metrics

    return step


def _where(condition, new, old):
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


def make_eval_step(config: RunConfig, decoder: Decoder, fold: Fold, mesh) -> Callable:
    """(params, router_bias, batch) -> (sum of -log p over valid tokens, their number), over all devices."""
    enter = entering(config, decoder, fold)

    def run(shards: Mapping, bias_LE, batch: Batch):
        params = entered(enter, shards)
        add = lambda total, micro: (total + nll_sum(config, decoder, fold, params, bias_LE, micro)[0], None)
        nll, _ = lax.scan(add, jnp.float32(0), batch._replace(step=None))
        return nll, collectives.psum(batch.mask.sum(dtype=jnp.int32), fold.dense.dp + fold.dense.cp)

    specs = jax.tree.map(lambda p: p.spec, param.placements(decoder.declarations, fold))
    scalar = PartitionSpec()
    return sharded(run, mesh, in_specs=(specs, scalar, batch_specs(fold)), out_specs=(scalar, scalar))
