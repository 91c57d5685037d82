"""The one decoder: embedding, layers in scans, final norm; every family is a configuration of it.

B rows of this device, S its part of a sequence between layers (over cp and tp), D model width, V vocabulary of this
device (over tp), L MoE layers, E experts.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from mesh import collectives
from mesh.axes import Axes
from mesh.fold import Fold
from moex.config import MemoryConfig, ModelConfig, ParallelConfig, PrecisionConfig
from moex.layers.context import Exchange
from moex.layers.gqa import GroupedQueryAttention
from moex.layers.mla import LatentAttention
from moex.layers.mlp import MLP
from moex.layers.moe import MoE, MoEStats, Steering
from moex.layers.mtp import Ahead, Further
from moex.layers.norm import RMSNorm
from moex.layers.param import declarations, declare
from moex.layers.recall import Memory
from moex.layers.tokens import Tokens, own_part
from moex.memory.residuals import by_name, named
from moex.memory.stash import Stash, sink
from moex.models.pattern import Kind, Segment, kinds, segments
from moex.models.stacks import Stacks


class Enter(Protocol):
    """(name of a part, its stored shards, whether its products compute high) -> its parameters as compute sees them."""

    def __call__(self, name: str, shards: Mapping, high: bool = False, /) -> Mapping: ...


def as_they_are(name: str, shards: Mapping, high: bool = False, /) -> Mapping:
    """The `Enter` of parameters that compute can use as they stand."""
    return shards


class Layer(nnx.Module):
    """One pre-norm layer: attention, then a dense MLP or experts."""

    def __init__(
        self,
        config: ModelConfig,
        parallel: ParallelConfig,
        memory: MemoryConfig,
        precision: PrecisionConfig,
        kind: Kind,
        cp_group: int = 0,
    ):
        module = dict(gqa=GroupedQueryAttention, mla=LatentAttention)[config.attention.kind]
        attention = dataclasses.replace(config.attention, sliding_window=kind.window, window_pattern=())
        self.sparse = kind.sparse
        self.attention_norm = RMSNorm(config.d_model, config.norm_eps)
        exchange = Exchange(parallel.context, parallel.ulysses, cp_group)
        self.attention = module(config.d_model, attention, config.norm_eps, exchange)
        self.ffn_norm = RMSNorm(config.d_model, config.norm_eps)
        if kind.sparse:
            if kind.high:
                precision = PrecisionConfig(compute_dtype=precision.compute_dtype)
            self.moe = MoE(config, parallel, memory, precision)
        else:
            self.mlp = MLP(config.d_model, config.dense_width)

    def __call__(
        self, x_BSD, stash: Stash | None, steering: Steering, tokens: Tokens, fold: Fold, *, meter_N=None, **options
    ):
        """Returns activations like x_BSD, the stash after this layer, and `MoEStats` of a sparse layer or None.

        meter_N: of the attention.  options: `training`, `record`, see `MoE`.
        """
        x_BSD = self._attended(x_BSD, tokens, fold, meter_N)
        return self.feed_forward(x_BSD, stash, steering, tokens, fold, **options)

    def feed_forward(self, x_BSD, stash: Stash | None, steering: Steering, tokens: Tokens, fold: Fold, **options):
        """The layer after its attention."""
        if not self.sparse:
            with jax.named_scope("mlp"):
                return x_BSD + self.mlp(self.ffn_norm(x_BSD), fold), stash, None
        with jax.named_scope("moe"):
            segments_BS, index_BS = own_part(tokens.segments, fold), own_part(tokens.index, fold)
            normed_BSD = named("mlp_norm", self.ffn_norm(x_BSD))
            y_BSD, stats, stash = self.moe.run(
                normed_BSD, stash, steering, segments_BS, fold, index_BS=index_BS, **options
            )
            return x_BSD + y_BSD, stash, stats

    def _attended(self, x_BSD, tokens: Tokens, fold: Fold, meter_N=None):
        with jax.named_scope("attention"):
            x_BSD = named("layer_input", x_BSD)
            mixed_BSD = self.attention(self.attention_norm(x_BSD), tokens, fold, meter_N=meter_N)
            return named("attn_proj", x_BSD + mixed_BSD)

    def depart(self, x_BSD, steering: Steering, tokens: Tokens, fold: Fold):
        """A sparse layer in training up to where rows travel: (`passage.Departed`, what `land` adds them to, `MoEStats`)."""
        x_BSD = self._attended(x_BSD, tokens, fold)
        with jax.named_scope("moe"):
            segments_BS, index_BS = own_part(tokens.segments, fold), own_part(tokens.index, fold)
            normed_BSD = named("mlp_norm", self.ffn_norm(x_BSD))
            departed, stats = self.moe.depart(normed_BSD, steering, segments_BS, index_BS, fold)
            return departed, (x_BSD, self.moe.shared_result(normed_BSD, fold)), stats

    def at_experts(self, rows, weights_R, plan):
        """What has arrived -> what goes back."""
        with jax.named_scope("moe"):
            return self.moe.at_experts(rows, weights_R, plan)

    def land(self, rows, plan, beside, fold: Fold):
        """What came back -> the layer's result.  beside: of `depart`."""
        x_BSD, shared_BSD = beside
        with jax.named_scope("moe"):
            return x_BSD + self.moe.with_shared(self.moe.land(rows, plan, x_BSD.shape, fold), shared_BSD)


class FurtherLayer(nnx.Module):
    """One depth of multi-token prediction: its input's projection, a layer with experts, a norm."""

    def __init__(self, layer: Layer, d_model: int, norm_eps: float):
        self.ahead = Ahead(d_model, norm_eps)
        self.layer = layer


class Ends(nnx.Module):
    """Embedding, final norm and head. Rows of the vocabulary past its true size are zero and stay so."""

    def __init__(self, config: ModelConfig):
        rows, real = config.padded_vocab_size, config.vocab_size
        self.embedding = declare(rows, config.d_model, axes=("tp", None), float32=True, valid_rows=real)
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        if not config.tie_embeddings:
            self.head = declare(rows, config.d_model, axes=("tp", None), float32=True, valid_rows=real)


class Decoder:
    """What is static of a model: its layers' structure and its parameters' declarations.

    Parameters are a dict: `ends` (embedding, norm, head), `dense_layers`, `moe_layers`, `mtp`, the layers stacked along a
    leading dim; a stack without layers is absent.
    """

    def __init__(
        self,
        config: ModelConfig,
        parallel: ParallelConfig = ParallelConfig(),  # noqa: B008 (frozen)
        memory: MemoryConfig = MemoryConfig(),  # noqa: B008 (frozen)
        precision: PrecisionConfig = PrecisionConfig(),  # noqa: B008 (frozen)
        *,
        cp_group: int = 0,
    ):
        """cp_group: of neighbours that no document's ring goes beyond, see `moex.layers.context.mix`."""
        self.config, self.memory, self._gathers = config, memory, parallel.zero == 3
        self.kinds = kinds(config, precision)
        modules = {kind: Layer(config, parallel, memory, precision, kind, cp_group) for kind in sorted(set(self.kinds))}
        self._graphs = {kind: nnx.graphdef(module) for kind, module in modules.items()}
        self._segments = segments(self.kinds)
        counts = dict(dense_layers=config.num_mlp_layers, moe_layers=config.num_moe_layers)
        self.declarations = dict(ends=declarations(Ends(config))) | {
            kind.stack: declarations(module, stacked=counts[kind.stack]) for kind, module in modules.items()
        }
        if config.mtp_depth:
            layer = Layer(config, parallel, memory, precision, Kind(sparse=True, window=0), cp_group)
            module = FurtherLayer(layer, config.d_model, config.norm_eps)
            self._further = nnx.graphdef(module)
            self.declarations["mtp"] = declarations(module, stacked=config.mtp_depth)

    def hidden(
        self, params: Mapping, steering, ids_BS, tokens: Tokens, fold: Fold, dtype, enter: Enter = as_they_are, *,
        training: bool = False, record: bool = False, meters_LN=None,
    ) -> tuple[jax.Array, MoEStats | None]:  # fmt: skip
        """Final normalised activations.

        Args:
          params: as compute sees them, or stored shards when `enter` turns shards into that.
          steering: a `Steering` stacked over MoE layers; or only its bias, float32 [L, E]; or None.
          ids_BS: token ids of this device's context-parallel part, equal over tp; `tokens` likewise.
          enter: called with a stack's name and one layer's parameters, inside the scan over layers.
          training, record: see `MoE`.  meters_LN: of this device's heads, each layer's a row; see `attend`.

        Returns: [B, S / tp, D] in `dtype`, and statistics stacked over MoE layers (None without any).
        """
        ends = enter("ends", params["ends"])
        x_BSD = embed(ids_BS, ends["embedding"], fold).astype(dtype)
        stacks = Stacks(params, Steering.of(steering), self.kinds)
        stash, stats, options = None, [], dict(training=training, record=record)

        def run(kind: Kind, x_BSD, stash, weights, steering, meter_N):
            layer = self.layer(kind, enter(kind.stack, weights, kind.high))
            return layer(x_BSD, stash, steering, tokens, fold, meter_N=meter_N, **options)

        def body(segment: Segment, carry, given):
            layers, meters = given
            stats, alone = [], segment.repeats == 1
            for place, (kind, weights, steering) in enumerate(stacks.each(segment.period, layers)):
                layer = self.by_name(kind.sparse, alone, self._gathers)(functools.partial(run, kind))
                *carry, of_layer = layer(*carry, weights, steering, None if meters is None else meters[place])
                stats += [of_layer] if kind.sparse else []
            return tuple(carry), jax.tree.map(lambda *x: jnp.stack(x), *stats) if stats else None

        first = 0
        for segment in self._segments:
            if stash is None and self.memory.stash and training and any(kind.sparse for kind in segment.period):
                stash = self._stash(x_BSD, params["moe_layers"], enter, fold)
            meters, first = _of_segment(meters_LN, first, segment), first + len(segment.period) * segment.repeats
            given = stacks.of(segment), meters
            (x_BSD, stash), found = lax.scan(functools.partial(body, segment), (x_BSD, stash), given)
            stats += [] if found is None else [jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), found)]
        x_BSD = x_BSD if stash is None else sink(x_BSD, stash)
        stats = jax.tree.map(lambda *x: jnp.concatenate(x), *stats) if stats else None
        return self.final_norm(ends, x_BSD), stats

    def by_name(self, sparse: bool, barrier: bool = False, gathers: bool = False) -> Callable[[Callable], Callable]:
        """A wrapper for what computes a layer or a part of it, see `moex.memory.residuals.by_name`."""
        return by_name(self.memory, sparse=sparse, barrier=barrier, gathers=gathers)

    def layer(self, kind: Kind, weights: Mapping) -> Layer:
        """One layer of a kind, with its parameters as compute sees them."""
        return nnx.merge(self._graphs[kind], weights)

    def final_norm(self, ends: Mapping, x_BSD):
        """What the head and further predictions are given of the last layer's activations."""
        with jax.named_scope("final_norm"):
            return nnx.merge(_norm_graph(self.config), ends["norm"])(x_BSD)

    def further(
        self, params: Mapping, steering, hidden_BSD, known: Sequence[Further], fold: Fold, enter: Enter = as_they_are,
        *, over: Axes = (), meters_kN=None, **options,
    ) -> tuple[jax.Array, MoEStats]:  # fmt: skip
        """Final activations of each depth of multi-token prediction, [k, B, S / tp, D], and statistics stacked over them.

        Args:
          hidden_BSD: of `hidden`.  steering: as there; the last k of it are for these layers, without recorded choices.
          known: what each depth knows of the tokens.  over: see `embed`.  meters_kN: as for `hidden`.
        """
        embedding = enter("ends", params["ends"])["embedding"]
        own = jax.tree.map(lambda x: x[self.config.num_moe_layers :], Steering.of(steering)._replace(replay_BSk=None))

        def body(x_BSD, one):
            weights, steering, known, meter_N = one

            def run(x_BSD, weights, meter_N):
                module = nnx.merge(self._further, enter("mtp", weights))
                embedded_BSD = embed(known.ids, embedding, fold, over, x_BSD.dtype)
                x_BSD = module.ahead(x_BSD, embedded_BSD)
                x_BSD, _, stats = module.layer(x_BSD, None, steering, known.tokens, fold, meter_N=meter_N, **options)
                return module.ahead.norm(x_BSD), stats

            remember = self.by_name(True, self.config.mtp_depth == 1, self._gathers)
            x_BSD, stats = remember(run)(x_BSD, weights, meter_N)
            return x_BSD, (x_BSD, stats)

        with jax.named_scope("mtp"):
            stacked = jax.tree.map(lambda *x: jnp.stack(x), *known)
            return lax.scan(body, hidden_BSD, (params["mtp"], own, stacked, meters_kN))[1]

    def remembering(
        self, params: Mapping, steering, ids_BS, tokens: Tokens, fold: Fold, dtype, enter: Enter = as_they_are, *,
        memory: Memory | None = None,
    ) -> tuple[jax.Array, Memory]:  # fmt: skip
        """Final normalised activations without training, and attention's memory after these tokens.

        memory: None reads whole rows, as `hidden`, and returns their own, [L, B, S, ...]; else what came before, of texts
        whose next tokens these are, see `moex.layers.recall`.  The rest as for `hidden`.
        """
        ends, kept = enter("ends", params["ends"]), []
        x_BSD = embed(ids_BS, ends["embedding"], fold).astype(dtype)
        stacks = Stacks(params, Steering.of(steering), self.kinds)

        def body(period: tuple[Kind, ...], carry, given):
            (x_BSD, memory), (number, layers) = carry, given
            kept = []
            for place, (kind, weights, steering) in enumerate(stacks.each(period, layers)):
                layer = self.layer(kind, enter(kind.stack, weights, kind.high))
                normed_BSD = layer.attention_norm(x_BSD)
                if memory is None:
                    y_BSD, own = layer.attention.read(normed_BSD, tokens, fold)
                    kept.append(own)
                else:
                    y_BSD, memory = layer.attention.recall(normed_BSD, tokens, memory, number + place, fold)
                x_BSD = layer.feed_forward(x_BSD + y_BSD, None, steering, tokens, fold)[0]
            return (x_BSD, memory), jax.tree.map(lambda *x: jnp.stack(x), *kept) if kept else None

        first = 0
        for segment in self._segments:
            numbers = first + len(segment.period) * jnp.arange(segment.repeats)
            first += len(segment.period) * segment.repeats
            given = numbers, stacks.of(segment)
            (x_BSD, memory), found = lax.scan(functools.partial(body, segment.period), (x_BSD, memory), given)
            kept += [] if found is None else [jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), found)]
        if memory is None:
            memory = jax.tree.map(lambda *x: jnp.concatenate(x), *kept)
        return self.final_norm(ends, x_BSD), memory

    def _stash(self, x_BSD, weights, enter: Enter, fold: Fold) -> Stash:
        """An empty one for activations like these."""
        first_layer = lambda: enter("moe_layers", jax.tree.map(lambda w: w[0], weights))
        graph = next(graph for kind, graph in self._graphs.items() if kind.sparse)
        moe = lambda weights: nnx.merge(graph, weights).moe
        matrices = jax.eval_shape(moe(first_layer()).experts.matrices)
        return moe(jax.eval_shape(first_layer)).empty_stash(matrices, x_BSD.shape, x_BSD.dtype, fold)

    def head(self, params: Mapping, enter: Enter = as_they_are):
        """The head's weight [V, D], float32; the embedding where they are tied."""
        ends = enter("ends", params["ends"])
        return ends["embedding" if self.config.tie_embeddings else "head"]


def _of_segment(x_L, first: int, segment: Segment):
    """What a segment's scan runs over of an array with a row for each layer, [repeats, layers of a period, ...], or None."""
    size = len(segment.period)
    if x_L is None:
        return None
    return x_L[first : first + size * segment.repeats].reshape(segment.repeats, size, *x_L.shape[1:])


def _norm_graph(config: ModelConfig):
    return nnx.graphdef(RMSNorm(config.d_model, config.norm_eps))


def embed(ids_BS, weight_VD, fold: Fold, over: Axes = (), dtype=None):
    """Rows of the embedding by token id: ids [B, S] equal over tp -> [B, S / tp, D], each device holding V rows.

    over: axes that split tp's rows further.  dtype: of the result, the weight's by default; only one term of a sum over
    `over` isn't zero, so it is exact in any.
    """
    tp = fold.dense.tp
    local_BS = ids_BS - collectives.axis_index(tp + over) * weight_VD.shape[0]
    mine_BS = (local_BS >= 0) & (local_BS < weight_VD.shape[0])
    rows = weight_VD[jnp.where(mine_BS, local_BS, 0)] * mine_BS[..., None]
    found = collectives.psum_scatter(rows, tp, dim=1)
    return collectives.psum(found.astype(dtype or found.dtype), over)
