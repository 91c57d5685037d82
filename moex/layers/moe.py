"""The Mixture-of-Experts block: route, dispatch, experts, combine, and a shared expert beside them.

B rows of this device, S its part of a sequence (over cp and tp), T = B S tokens, D model width, E experts, k a token.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mesh import collectives
from mesh.fold import Fold
from moex import balance
from moex.config import MemoryConfig, ModelConfig, ParallelConfig, PrecisionConfig, RouterConfig
from moex.dispatch import legs
from moex.layers import passage
from moex.layers.experts import Experts
from moex.layers.mlp import MLP
from moex.layers.param import declare
from moex.layers.router import Router, Routing, route
from moex.layers.tokens import own_part
from moex.memory.residuals import kept, named
from moex.memory.stash import Stash
from moex.precision.recipes import resolve


class Steering(NamedTuple):
    """What a layer's routing depends on beside its tokens; each may be None. In a decoder all have a leading dim L.

    bias_E: float32, on the choice.  seen_E: int32 plain choices of the step's earlier micro-batches, for the global-batch
    loss.  key: of this micro-batch's and layer's random numbers.  replay_BSk: recorded choices to use, equal over tp
    (this device's context-parallel part).
    """

    bias_E: jax.Array | None = None
    seen_E: jax.Array | None = None
    key: jax.Array | None = None
    replay_BSk: jax.Array | None = None

    @classmethod
    def of(cls, steering: "Steering | jax.Array | None") -> "Steering":
        """Itself, or what a bias alone, or nothing, stands for."""
        return steering if isinstance(steering, Steering) else cls(steering)


class MoEStats(NamedTuple):
    """Of one layer and micro-batch, equal on all devices: losses without coefficient (float32), the rest int32 counts.

    sequence_loss, global_loss: 0 where their coefficient is.  counts_E: tokens that chose each expert, dropped or not.
    plain_E: choices without bias and groups, as balance losses count them.  gates_E: float32, sum of the weights with which
    each expert's results count, after dropping.  dropped: (token, choice) pairs beyond a
    capacity.  not_finite: real tokens with a router logit that isn't finite.  offsets_E: thresholds of quantile balancing,
    float32; 0 without it.  clones: slots of all devices that hold one.  load: float32, rows of the busiest rank of an ep
    group over the mean, with clones; 0 without them.  need: float32 [4], the cell, spill and rows (`dispatch.Need`) and
    the stash of the device that needs most, in units of balanced routing.  experts_BSk: choices of this device's tokens,
    or None where they weren't asked for.
    """

    balance_loss: jax.Array
    sequence_loss: jax.Array
    global_loss: jax.Array
    z_loss: jax.Array
    counts_E: jax.Array
    plain_E: jax.Array
    gates_E: jax.Array
    overflow: jax.Array
    dropped: jax.Array
    not_finite: jax.Array
    offsets_E: jax.Array
    clones: jax.Array
    load: jax.Array
    need: jax.Array
    experts_BSk: jax.Array | None = None


class MoE(nnx.Module):
    """Sparse feed-forward block.  In and out: activations [B, S, D]; also returns `MoEStats`."""

    def __init__(
        self,
        config: ModelConfig,
        parallel: ParallelConfig = ParallelConfig(),  # noqa: B008 (frozen)
        memory: MemoryConfig = MemoryConfig(),  # noqa: B008 (frozen)
        precision: PrecisionConfig = PrecisionConfig(),  # noqa: B008 (frozen)
    ):
        self.router_config, self.parallel, self.memory = config.router, parallel, memory
        self.num_layers = config.num_moe_layers
        self.precision = recipes = resolve(precision)
        self.router = Router(config.d_model, config.router)
        self.experts = Experts(config, recipes.experts)
        if config.latent_width:
            self.latent_down = declare(config.d_model, config.latent_width, axes=(None, None))
            self.latent_up = declare(config.latent_width, config.d_model, axes=(None, None), init="output")
        if config.shared_width:
            self.shared = MLP(config.d_model, config.shared_width, product="shared")
        if config.shared_gate:
            self.shared_gate = declare(config.d_model, axes=(None,))

    def __call__(self, x_BSD, steering, segments_BS, fold: Fold, **options) -> tuple[jax.Array, MoEStats]:
        """Activations and statistics, see `run`."""
        return self.run(x_BSD, None, steering, segments_BS, fold, **options)[:2]

    def run(
        self, x_BSD, stash: Stash | None, steering, segments_BS, fold: Fold, *,
        index_BS=None, training: bool = False, record: bool = False,
    ) -> tuple[jax.Array, MoEStats, Stash | None]:  # fmt: skip
        """Runs the block on this device's tokens.

        Args:
          stash: of `empty_stash` or the MoE layer before, to keep the experts' rows in.
          steering: a `Steering`, or only its bias_E, or None.
          segments_BS: document of each token, 0 for padding, which no expert computes; or bool, True for real tokens.
          index_BS: place of each token in its row; its place in the array otherwise.
          training: dropping, noise, Sinkhorn's selection and loss statistics that only training needs.
          record: return the choices too.

        Returns: activations, statistics, and the stash as it is after this layer.
        """
        routed = self._routed(x_BSD, Steering.of(steering), segments_BS, index_BS, fold, training)
        way = self._way(x_BSD.shape, fold, dropping=training and self.router_config.capacity_factor > 0)
        y_TD, account, stash = passage.through_experts(
            self.experts, routed.x_TD, routed.weights_Tk, routed.copies, fold, way, stash
        )
        y_BSD = self._projected_back(y_TD).reshape(x_BSD.shape)
        stats = self._stats(routed, account, x_BSD.shape, fold, record=record)
        return self.with_shared(y_BSD, self.shared_result(x_BSD, fold)), stats, stash

    def depart(self, x_BSD, steering, segments_BS, index_BS, fold: Fold) -> tuple[passage.Departed, MoEStats]:
        """The block in training up to where rows travel, see `passage.depart`; arguments as for `run`."""
        routed = self._routed(x_BSD, Steering.of(steering), segments_BS, index_BS, fold, True)
        way = self._way(x_BSD.shape, fold, dropping=self.router_config.capacity_factor > 0)
        departed = passage.depart(routed.x_TD, routed.weights_Tk, routed.copies, fold, way)
        return departed, self._stats(routed, departed.account, x_BSD.shape, fold, record=False)

    def at_experts(self, rows, weights_R, plan):
        """What has arrived -> what goes back, see `passage.at_experts`."""
        return passage.at_experts(self.experts, rows, weights_R, plan)

    def land(self, rows, plan, shape_BSD, fold: Fold):
        """What came back -> the block's result without the shared expert's."""
        with jax.named_scope("combine"):
            y_TD = legs.land(rows, plan, fold)
        return self._projected_back(y_TD).reshape(shape_BSD)

    def shared_result(self, x_BSD, fold: Fold):
        """The shared expert's, or None without one."""
        if not hasattr(self, "shared"):
            return None
        with jax.named_scope("shared_expert"):
            shared_BSD = self.shared(x_BSD, fold)
            if hasattr(self, "shared_gate"):
                shared_BSD = named("shared_experts", shared_BSD)
                shared_BSD *= jax.nn.sigmoid(x_BSD @ self.shared_gate[...])[..., None]
            return shared_BSD

    @staticmethod
    def with_shared(y_BSD, shared_BSD):
        return y_BSD if shared_BSD is None else y_BSD + shared_BSD

    def _projected_back(self, y_TD):
        return named("latent_rows", y_TD) @ self.latent_up[...] if hasattr(self, "latent_up") else y_TD

    def _routed(self, x_BSD, steering: Steering, segments_BS, index_BS, fold: Fold, training: bool) -> "_Routed":
        config = self.router_config
        if index_BS is None:
            index_BS = jnp.broadcast_to(jnp.arange(x_BSD.shape[1], dtype=jnp.int32), x_BSD.shape[:2])
        x_TD, real_T = x_BSD.reshape(-1, x_BSD.shape[-1]), segments_BS.reshape(-1) > 0
        with jax.named_scope("router"):
            logits_TE, routing = self._route(x_TD, real_T, steering, index_BS, fold, training)
            valid_Tk = real_T[:, None] & balance.is_expert(routing.experts_Tk, config.num_experts)
            wanted_Tk = jnp.where(valid_Tk, routing.experts_Tk, config.num_experts)
            weights_Tk = routing.weights_Tk
            if training and config.capacity_factor > 0:
                wanted_Tk, weights_Tk = self._drop(wanted_Tk, weights_Tk, index_BS, fold)
            statistics = self._statistics(logits_TE, real_T, routing, steering, segments_BS, fold, training)
        copies = passage.copies(self.experts, wanted_Tk, config.num_experts, fold, self.parallel)
        x_TD = x_TD @ self.latent_down[...] if hasattr(self, "latent_down") else x_TD
        return _Routed(x_TD, real_T, wanted_Tk, weights_Tk, copies, statistics)

    def _stats(self, routed: "_Routed", account, shape_BSD, fold: Fold, *, record: bool) -> MoEStats:
        axes, num_experts = fold.dense.tokens, self.router_config.num_experts
        lost = routed.real_T[:, None] & (routed.wanted_Tk == num_experts)
        return MoEStats(
            **routed.statistics,
            gates_E=collectives.psum(_gate_mass(routed.wanted_Tk, routed.weights_Tk, num_experts), axes),
            overflow=collectives.psum(account.overflow, axes),
            dropped=collectives.psum(lost.sum(dtype=jnp.int32), axes),
            clones=collectives.psum(routed.copies.clones, axes),
            load=collectives.pmax(routed.copies.load, axes),
            need=collectives.pmax(account.need, axes),
            experts_BSk=routed.wanted_Tk.reshape(*shape_BSD[:2], -1) if record else None,
        )

    def empty_stash(self, matrices, shape_BSD, dtype, fold: Fold) -> Stash:
        """What the first of the model's MoE layers is given, for activations of this shape and dtype in training.

        matrices: shapes of `Experts.matrices`.
        """
        way = self._way(shape_BSD, fold, dropping=self.router_config.capacity_factor > 0)
        num_tokens, num_experts = shape_BSD[0] * shape_BSD[1], self.router_config.num_experts
        return passage.empty_stash(self.experts, matrices, num_tokens, dtype, num_experts, fold, way)

    def _way(self, shape_BSD, fold: Fold, *, dropping: bool) -> passage.Way:
        router = self.router_config
        way = passage.Way(self.parallel, router.top_k, precision=self.precision)
        if dropping:
            way = way._replace(capacity=self._capacity(shape_BSD, fold), pad=router.pad_to_capacity)
        if "experts" not in self.memory.stash:
            return way
        num_tokens, factor = shape_BSD[0] * shape_BSD[1], self.memory.stash_factor
        return passage.with_stash(way, self.num_layers, num_tokens, router.num_experts, fold, factor)

    def _route(self, x_TD, real_T, steering: Steering, index_BS, fold: Fold, training: bool):
        """Logits [T, E] and `Routing` of this device's tokens."""
        config, replay_Tk, number_T = self.router_config, None, None
        keys = dict(jitter=None, forced=None)
        if training and config.noisy:
            if steering.key is None:
                raise ValueError("routing with jitter or forced logits needs a key in training")
            number_T = balance.token_numbers(index_BS, fold).reshape(-1)
            keys = {name: jax.random.fold_in(steering.key, i) for i, name in enumerate(keys)}
        if training and config.jitter:
            x_TD = balance.jitter(x_TD.astype(jnp.float32), keys["jitter"], number_T, config.jitter)
        logits_TE = named("router", self.router(x_TD))
        if steering.replay_BSk is not None:
            replay_Tk = own_part(steering.replay_BSk, fold).reshape(-1, config.top_k)
        routing = route(
            logits_TE, steering.bias_E, config, mask_T=real_T, replay_Tk=replay_Tk, number_T=number_T,
            key=keys["forced"] if config.forced else None, axes=fold.dense.tokens, training=training,
        )  # fmt: skip
        return logits_TE, routing

    def _drop(self, experts_Tk, weights_Tk, index_BS, fold: Fold):
        rows = lambda x_Tk: x_Tk.reshape(*index_BS.shape, -1)
        kept = balance.keep_within_rows(
            rows(experts_Tk), rows(weights_Tk), index_BS, self.router_config, axes=fold.dense.sequence
        )
        return (x.reshape(experts_Tk.shape) for x in kept)

    def _capacity(self, shape, fold: Fold) -> int:
        """Most rows that an expert can get from the rows of a batch that this device has its part of."""
        num_rows, seq_here, _ = shape
        seq_len = seq_here * fold.size(fold.dense.sequence)
        return num_rows * balance.capacity_of(seq_len, self.router_config)

    def _statistics(self, logits_TE, real_T, routing: Routing, steering, segments_BS, fold: Fold, training) -> dict:
        """The fields of `MoEStats` that the router decides."""
        config, axes, none = self.router_config, fold.dense.tokens, jnp.float32(0)
        plain_E = kept(balance.plain_counts(logits_TE, real_T, config, axes=axes))
        micro = lambda counts_E: balance.balance_loss(logits_TE, real_T, config, axes=axes, counts_E=counts_E)
        sequence_loss, global_loss, offsets_E = none, none, jnp.zeros((config.num_experts,), jnp.float32)
        if config.sequence_coefficient:
            sequence_loss = _sequence_loss(logits_TE, segments_BS, config, fold)
        if config.global_coefficient:
            global_loss = micro(plain_E if steering.seen_E is None else plain_E + steering.seen_E)
        if training and config.selection == "quantile":
            by_row = lambda x: x.reshape(*segments_BS.shape, *x.shape[1:])
            bias_E = none if steering.bias_E is None else steering.bias_E
            offsets_E = balance.quantile_offsets(
                by_row(logits_TE), bias_E, by_row(real_T), config, axes=fold.dense.sequence, row_axes=fold.dense.dp
            )
        bad_T = real_T & ~jnp.isfinite(logits_TE).all(axis=-1)
        return dict(
            balance_loss=micro(plain_E),
            sequence_loss=sequence_loss,
            global_loss=global_loss,
            z_loss=balance.z_loss(logits_TE, real_T, axes=axes),
            counts_E=collectives.psum(routing.counts_E, axes),
            plain_E=plain_E,
            not_finite=collectives.psum(bad_T.sum(dtype=jnp.int32), axes),
            offsets_E=offsets_E,
        )


class _Routed(NamedTuple):
    """x_TD: as experts take them.  wanted_Tk: int32, the expert of each pair, E for nobody.  statistics: fields of `MoEStats`
    that the router decides.
    """

    x_TD: jax.Array
    real_T: jax.Array
    wanted_Tk: jax.Array
    weights_Tk: jax.Array
    copies: passage.Copies
    statistics: dict


def _gate_mass(experts_Tk, weights_Tk, num_experts: int):
    """Sum of weights by expert, float32 [E]: a statistic, without gradient."""
    chosen_TkE = experts_Tk[..., None] == jnp.arange(num_experts)[None, None]
    weights_Tk = jax.lax.stop_gradient(weights_Tk).astype(jnp.float32)
    return jnp.where(chosen_TkE, weights_Tk[..., None], 0).sum(axis=(0, 1))


def _sequence_loss(logits_TE, segments_BS, config: RouterConfig, fold: Fold):
    """`sequence_balance_loss` with every document of every row of this device as a sample."""
    row = fold.dense.sequence
    most = segments_BS.shape[1] * fold.size(row)  # a document has a token at least
    start_B = jnp.arange(segments_BS.shape[0], dtype=jnp.int32)[:, None] * most
    segments_T = jnp.where(segments_BS > 0, start_B + segments_BS, 0).reshape(-1)
    return balance.sequence_balance_loss(
        logits_TE, segments_T, config,
        num_segments=segments_BS.shape[0] * most, axes=row, sample_axes=fold.dense.dp,
    )  # fmt: skip
