"""The Mixture-of-Experts block: route, dispatch, experts, combine, and a shared expert beside them.

B rows of this device, S its part of a sequence (over cp and tp), T = B S tokens, D model width, E experts.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mesh import collectives
from mesh.fold import Fold
from moex import dispatch
from moex.config import ModelConfig, ParallelConfig
from moex.layers.experts import Experts
from moex.layers.mlp import MLP
from moex.layers.router import Router, balance_loss, route, z_loss


class MoEStats(NamedTuple):
    """Of one layer and micro-batch, equal on all devices: losses without coefficient (float32), counts (int32)."""

    balance_loss: jax.Array
    z_loss: jax.Array
    counts_E: jax.Array
    overflow: jax.Array


class MoE(nnx.Module):
    """Sparse feed-forward block.  In and out: activations [B, S, D]; also returns `MoEStats`."""

    def __init__(self, config: ModelConfig, parallel: ParallelConfig = ParallelConfig()):  # noqa: B008 (frozen)
        self.router_config, self.transport = config.router, parallel.transport
        self.factors = dict(cell_factor=parallel.cell_factor, row_factor=parallel.row_factor)
        self.router = Router(config.d_model, config.router)
        self.experts = Experts(config.d_model, config.expert_width, config.router.num_experts)
        if config.shared_width:
            self.shared = MLP(config.d_model, config.shared_width)

    def __call__(self, x_BSD, bias_E, real_BS, fold: Fold, *, checkpoint_experts=lambda f: f):
        """bias_E: float32 or None.  real_BS: False for padding, which no expert computes.

        checkpoint_experts: wraps the experts' function, to have its hidden rows computed again in the backward pass.
        """
        config, transport, axes = self.router_config, self.transport, fold.dense.tokens
        x_TD, real_T = x_BSD.reshape(-1, x_BSD.shape[-1]), real_BS.reshape(-1)
        with jax.named_scope("router"):
            logits_TE = self.router(x_TD)
            routing = route(logits_TE, bias_E, config, mask_T=real_T)
            balance, z = balance_loss(logits_TE, real_T, config, axes=axes), z_loss(logits_TE, real_T, axes=axes)
        with jax.named_scope("dispatch"):
            wanted_Tk = jnp.where(real_T[:, None], routing.experts_Tk, config.num_experts)
            plan = dispatch.plan(transport, wanted_Tk, config.num_experts, fold, **self.factors)
            rows_RD = dispatch.send(transport, x_TD, plan, fold)
            weights_R = dispatch.send_pairs(transport, routing.weights_Tk, plan, fold)
        with jax.named_scope("experts"):
            experts = checkpoint_experts(lambda rows, weights: self.experts(rows, weights, plan.sizes_e))
            rows_RD = experts(rows_RD, weights_R)
        with jax.named_scope("combine"):
            y_BSD = dispatch.combine(transport, rows_RD, plan, fold).reshape(x_BSD.shape)
        counts_E, overflow = collectives.psum(routing.counts_E, axes), collectives.psum(plan.overflow, axes)
        if hasattr(self, "shared"):
            with jax.named_scope("shared_expert"):
                y_BSD += self.shared(x_BSD, fold)
        return y_BSD, MoEStats(balance, z, counts_E, overflow)
