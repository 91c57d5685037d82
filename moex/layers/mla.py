"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values come from one narrow latent.

B rows of this device, S its part of a sequence, N heads, D model width; a query or key is [nope | rope] wide, where the
rope part alone carries position and its key is shared by all heads. tp splits heads; latents are equal over tp.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from mesh import collectives
from mesh.fold import Fold
from moex.config import AttentionConfig
from moex.layers.attention import attend
from moex.layers.context import Exchange, mix
from moex.layers.norm import RMSNorm
from moex.layers.param import declare
from moex.layers.recall import Memory, places, recalled, remember, texts
from moex.layers.rope import rotate, softmax_scale
from moex.layers.tokens import Tokens
from moex.memory.residuals import named
from moex.precision.linear import linear
from moex.precision.weight import is_quantised


class LatentAttention(nnx.Module):
    """MLA with or without a query latent.  In and out: activations [B, S / (cp tp), D]."""

    def __init__(self, d_model: int, config: AttentionConfig, norm_eps: float, exchange: Exchange = Exchange()):
        n, nope, rope, v = config.num_heads, config.head_dim, config.rope_dim, config.value_dim
        self.config, self.exchange = config, exchange
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

    def __call__(self, x_BSD, tokens: Tokens, fold: Fold, *, meter_N=None):
        """meter_N: of this device's heads, see `moex.layers.attention.attend`."""
        return self.read(x_BSD, tokens, fold, meter_N=meter_N)[0]

    def read(self, x_BSD, tokens: Tokens, fold: Fold, *, meter_N=None) -> tuple[jax.Array, Memory]:
        """The result, and what later tokens need of these: latents [B, S / cp, R] and the rotated key of all heads."""
        q, latent, shared = self._project(x_BSD, tokens, fold)
        k, v = self._keys_and_values(latent, shared)
        mixed = mix(q, k, v, tokens, fold.dense.cp, **self.exchange._asdict(), meter_N=meter_N, **self._rule)
        return self._out(mixed, fold), (latent, shared)

    def recall(self, x_BSD, tokens: Tokens, memory: Memory, layer, fold: Fold) -> tuple[jax.Array, Memory]:
        """The next token of each of S texts, in a row of its own making: see `moex.layers.recall`.

        Latents stand for keys and values: the projection up from them joins the query and the result instead, so that no
        key of an earlier token is made again (arXiv 2405.04434 section 2.1.2). A quantised projection can't be split so;
        with one, all keys and values are.
        """
        q, *kept = self._project(x_BSD, tokens, fold)
        memory = remember(memory, kept, tokens, layer)
        latent, shared = recalled(memory, layer)
        where = places(tokens, latent.shape[1])
        if is_quantised(up := self.kv_up[...]):
            k, v = self._keys_and_values(latent, shared)
            return self._out(texts(attend(texts(q), k, v, *where, **self._rule)), fold), memory
        nope, width = self.config.head_dim, self.config.kv_latent_dim
        narrow_q = jnp.einsum("bsnh,rnh->bsnr", q[..., :nope], up[..., :nope])
        k = jnp.concatenate([latent, shared], axis=-1)[:, :, None]
        mixed = attend(texts(jnp.concatenate([narrow_q, q[..., nope:]], axis=-1)), k, k, *where, **self._rule)
        return self._out(jnp.einsum("bsnr,rnh->bsnh", texts(mixed)[..., :width], up[..., nope:]), fold), memory

    @property
    def _rule(self) -> dict:
        config = self.config
        scale = softmax_scale(config.head_dim + config.rope_dim, config.rope)
        return dict(scale=scale, window=config.sliding_window, soft_cap=config.soft_cap)

    def _project(self, x_BSD, tokens: Tokens, fold: Fold):
        """Queries of this device's heads, latents and the rotated key, of all tokens of its context-parallel part."""
        config = self.config
        nope = config.head_dim
        x_BSD = named("attn_norm", collectives.all_gather(x_BSD, fold.dense.tp, dim=1))
        down = lambda weight: named("mla_down_proj", linear(x_BSD, weight[...]))
        latent = self.query_norm(down(self.query_down)) if config.q_latent_dim else x_BSD
        q = named("mla_up_proj", linear(latent, self.query_up[...]))
        q = jnp.concatenate([q[..., :nope], rotate(q[..., nope:], tokens.positions, config.rope)], axis=-1)
        narrow = down(self.kv_down)
        shared = rotate(narrow[:, :, None, config.kv_latent_dim :], tokens.positions, config.rope)
        return q, self.kv_norm(narrow[..., : config.kv_latent_dim]), shared[:, :, 0]

    def _keys_and_values(self, latent, shared):
        config = self.config
        kv = named("mla_up_proj", linear(latent, self.kv_up[...]))
        shared = jnp.broadcast_to(shared[:, :, None], (*kv.shape[:3], config.rope_dim))
        k, v = jnp.concatenate([kv[..., : config.head_dim], shared], axis=-1), kv[..., config.head_dim :]
        more = config.head_dim + config.rope_dim - config.value_dim  # attention kernels want values as wide as keys
        return k, jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, more)))

    def _out(self, mixed, fold: Fold):
        y_BSD = linear(mixed[..., : self.config.value_dim], self.out[...], contracted=2)
        return collectives.psum_scatter(y_BSD, fold.dense.tp, dim=1)
