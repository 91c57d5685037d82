"""Grouped-query attention over the dense view.

B rows of this device, S its part of a sequence, N query heads, K key-value heads, H head width, D model width. tp splits
heads, cp and tp split the sequence.
"""

import jax
from flax import nnx

from mesh import collectives
from mesh.fold import Fold
from moex.config import AttentionConfig
from moex.layers.attention import attend
from moex.layers.context import Exchange, mix
from moex.layers.norm import RMSNorm, rms_norm
from moex.layers.param import declare
from moex.layers.recall import Memory, places, recalled, remember, texts
from moex.layers.rope import rotate, softmax_scale
from moex.layers.tokens import Tokens
from moex.memory.residuals import named
from moex.precision.linear import linear
from moex.precision.weight import is_quantised


class GroupedQueryAttention(nnx.Module):
    """Attention with N query heads that share K key-value heads (arXiv 2305.13245).

    Optional: norm of query and key, a head at a time (Qwen3) or over all heads (OLMoE); biases; sinks; a window; rotation of
    a head's first features only. In and out: activations [B, S / (cp tp), D]. Where tp exceeds K, key-value weights are
    equal on the devices that share a head.
    """

    def __init__(self, d_model: int, config: AttentionConfig, norm_eps: float, exchange: Exchange = Exchange()):
        n, k, h = config.num_heads, config.num_kv_heads, config.head_dim
        self.config, self.norm_eps, self.exchange = config, norm_eps, exchange
        self.query = declare(d_model, n, h, axes=(None, "tp", None), product="attention")
        self.key = declare(d_model, k, h, axes=(None, "tp", None), may_replicate=True, product="attention")
        self.value = declare(d_model, k, h, axes=(None, "tp", None), may_replicate=True, product="attention")
        self.out = declare(
            n, h, d_model, axes=("tp", None, None), init="output", product="attention", contracted=2
        )  # fmt: skip
        vector = dict(init="zeros", decays=False)
        if config.bias:
            self.query_bias = declare(n, h, axes=("tp", None), **vector)
            self.key_bias = declare(k, h, axes=("tp", None), may_replicate=True, **vector)
            self.value_bias = declare(k, h, axes=("tp", None), may_replicate=True, **vector)
        if config.out_bias:
            self.out_bias = declare(d_model, axes=(None,), **vector)
        if config.sinks:
            self.sinks = declare(n, axes=("tp",), float32=True, **vector)
        if config.qk_norm_joint:
            joint = dict(init="ones", float32=True, decays=False)
            self.query_norms = declare(n, h, axes=("tp", None), **joint)
            self.key_norms = declare(k, h, axes=("tp", None), may_replicate=True, **joint)
        elif config.qk_norm:
            self.query_norm = RMSNorm(h, norm_eps)
            self.key_norm = RMSNorm(h, norm_eps)

    def __call__(self, x_BSD, tokens: Tokens, fold: Fold, *, meter_N=None):
        """meter_N: of this device's heads, see `moex.layers.attention.attend`."""
        return self.read(x_BSD, tokens, fold, meter_N=meter_N)[0]

    def read(self, x_BSD, tokens: Tokens, fold: Fold, *, meter_N=None) -> tuple[jax.Array, Memory]:
        """The result, and what later tokens need of these: keys and values of this device's heads, [B, S / cp, K, H]."""
        q, k, v = self._project(x_BSD, tokens, fold)
        mixed = mix(q, k, v, tokens, fold.dense.cp, **self.exchange._asdict(), meter_N=meter_N, **self._rule)
        return self._out(mixed, fold), (k, v)

    def recall(self, x_BSD, tokens: Tokens, memory: Memory, layer, fold: Fold) -> tuple[jax.Array, Memory]:
        """The next token of each of S texts, in a row of its own making: see `moex.layers.recall`."""
        q, *kept = self._project(x_BSD, tokens, fold)
        memory = remember(memory, kept, tokens, layer)
        k, v = recalled(memory, layer)
        mixed = attend(texts(q), k, v, *places(tokens, k.shape[1]), **self._rule)
        return self._out(texts(mixed), fold), memory

    @property
    def _rule(self) -> dict:
        config = self.config
        return dict(
            scale=softmax_scale(config.head_dim, config.rope), window=config.sliding_window, soft_cap=config.soft_cap,
            sinks_N=self.sinks[...] if config.sinks else None,
        )  # fmt: skip

    def _project(self, x_BSD, tokens: Tokens, fold: Fold):
        """Queries, keys and values of this device's heads and all tokens of its context-parallel part."""
        config = self.config
        x_BSD = named("attn_norm", collectives.all_gather(x_BSD, fold.dense.tp, dim=1))
        q = linear(x_BSD, self.query[...])
        k, v = (self._own_heads(x_BSD, weight[...], fold) for weight in (self.key, self.value))
        if config.bias:
            q += self.query_bias[...][None, None]
            k += self._own_part(self.key_bias[...], 0, fold)[None, None]
            v += self._own_part(self.value_bias[...], 0, fold)[None, None]
        q, k, v = named("qkv", (q, k, v))
        if config.qk_norm:
            q, k = self._norms(q, k, fold)
        q, k = (rotate(x, tokens.positions, config.rope, width=config.rope_dim) for x in (q, k))
        return q, k, v

    def _out(self, mixed, fold: Fold):
        y_BSD = collectives.psum_scatter(linear(mixed, self.out[...], contracted=2), fold.dense.tp, dim=1)
        return y_BSD + self.out_bias[...][None, None] if self.config.out_bias else y_BSD

    def _norms(self, q, k, fold: Fold):
        if not self.config.qk_norm_joint:
            return self.query_norm(q), self.key_norm(k)
        weights = self.query_norms[...], self._own_part(self.key_norms[...], 0, fold)
        # Where devices share a key-value head, a sum over all of them counts each head equally often.
        joint = lambda x, w: rms_norm(x.reshape(*x.shape[:2], -1), w.reshape(-1), self.norm_eps, axes=fold.dense.tp)
        return (joint(x, w).reshape(x.shape) for x, w in zip((q, k), weights, strict=True))

    def _own_heads(self, x_BSD, weight_DKH, fold: Fold):
        """Keys or values of the heads that this device's query heads use."""
        if is_quantised(weight_DKH):  # a head is no whole number of tiles
            return self._own_part(linear(x_BSD, weight_DKH), 2, fold)
        return linear(x_BSD, self._own_part(weight_DKH, 1, fold))

    def _own_part(self, x, dim: int, fold: Fold):
        """The key-value heads in `dim` that are this device's: all it holds, or the one of several it shares."""
        tp, num_kv = fold.dense.tp, self.config.num_kv_heads
        if fold.size(tp) <= num_kv:
            return x
        head = collectives.axis_index(tp) * num_kv // fold.size(tp)
        return jax.lax.dynamic_slice_in_dim(x, head, 1, axis=dim)
