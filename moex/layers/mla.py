"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values come from one narrow latent.

B rows of this device, S its part of a sequence, N heads, D model width; a query or key is [nope | rope] wide, where the
rope part alone carries position and its key is shared by all heads. tp splits heads; latents are equal over tp.
"""

import jax.numpy as jnp
from flax import nnx

from mesh import collectives
from mesh.fold import Fold
from moex.config import AttentionConfig
from moex.layers.context import mix
from moex.layers.norm import RMSNorm
from moex.layers.param import declare
from moex.layers.rope import rotate, softmax_scale
from moex.layers.tokens import Tokens
from moex.precision.linear import linear


class LatentAttention(nnx.Module):
    """MLA with or without a query latent.  In and out: activations [B, S / (cp tp), D]."""

    def __init__(self, d_model: int, config: AttentionConfig, norm_eps: float, *, context: str = "gather"):
        n, nope, rope, v = config.num_heads, config.head_dim, config.rope_dim, config.value_dim
        self.config, self.context = config, context
        if config.q_latent_dim:
            self.query_down = declare(d_model, config.q_latent_dim, axes=(None, None), product="attention")
            self.query_norm = RMSNorm(config.q_latent_dim, norm_eps)
        self.query_up = declare(
            config.q_latent_dim or d_model, n, nope + rope, axes=(None, "tp", None), product="attention"
        )
        self.kv_down = declare(d_model, config.kv_latent_dim + rope, axes=(None, None), product="attention")
        self.kv_norm = RMSNorm(config.kv_latent_dim, norm_eps)
        self.kv_up = declare(config.kv_latent_dim, n, nope + v, axes=(None, "tp", None), product="attention")
        self.out = declare(
            n, v, d_model, axes=("tp", None, None), init="output", product="attention", contracted=2
        )  # fmt: skip

    def __call__(self, x_BSD, tokens: Tokens, fold: Fold):
        config, tp = self.config, fold.dense.tp
        nope = config.head_dim
        x_BSD = collectives.all_gather(x_BSD, tp, dim=1)
        latent = self.query_norm(linear(x_BSD, self.query_down[...])) if config.q_latent_dim else x_BSD
        q = linear(latent, self.query_up[...])
        q = jnp.concatenate([q[..., :nope], rotate(q[..., nope:], tokens.positions, config.rope)], axis=-1)

        narrow = linear(x_BSD, self.kv_down[...])
        kv = linear(self.kv_norm(narrow[..., : config.kv_latent_dim]), self.kv_up[...])
        shared = rotate(narrow[:, :, None, config.kv_latent_dim :], tokens.positions, config.rope)
        shared = jnp.broadcast_to(shared, (*kv.shape[:3], config.rope_dim))
        k, v = jnp.concatenate([kv[..., :nope], shared], axis=-1), kv[..., nope:]

        width = nope + config.rope_dim  # attention kernels want values as wide as keys
        v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, width - config.value_dim)))
        mixed = mix(
            q, k, v, tokens, fold.dense.cp, method=self.context,
            scale=softmax_scale(width, config.rope), window=config.sliding_window, soft_cap=config.soft_cap,
        )  # fmt: skip
        y_BSD = linear(mixed[..., : config.value_dim], self.out[...], contracted=2)
        return collectives.psum_scatter(y_BSD, tp, dim=1)
