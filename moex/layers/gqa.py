"""Grouped-query attention over the dense view.

B rows of this device, S its part of a sequence, N query heads, K key-value heads, H head width, D model width. tp splits
heads, cp and tp split the sequence.
"""

import jax
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
from moex.precision.weight import is_quantised


class GroupedQueryAttention(nnx.Module):
    """Attention with N query heads that share K key-value heads (arXiv 2305.13245), optional per-head QK norm (Qwen3).

    In and out: activations [B, S / (cp tp), D]. Where tp exceeds K, key-value weights are equal on the devices that
    share a head.
    """

    def __init__(self, d_model: int, config: AttentionConfig, norm_eps: float, *, context: str = "gather"):
        n, k, h = config.num_heads, config.num_kv_heads, config.head_dim
        self.config, self.context = config, context
        self.query = declare(d_model, n, h, axes=(None, "tp", None), product="attention")
        self.key = declare(d_model, k, h, axes=(None, "tp", None), may_replicate=True, product="attention")
        self.value = declare(d_model, k, h, axes=(None, "tp", None), may_replicate=True, product="attention")
        self.out = declare(
            n, h, d_model, axes=("tp", None, None), init="output", product="attention", contracted=2
        )  # fmt: skip
        if config.qk_norm:
            self.query_norm = RMSNorm(h, norm_eps)
            self.key_norm = RMSNorm(h, norm_eps)

    def __call__(self, x_BSD, tokens: Tokens, fold: Fold):
        config, tp = self.config, fold.dense.tp
        x_BSD = collectives.all_gather(x_BSD, tp, dim=1)
        q = linear(x_BSD, self.query[...])
        k, v = (self._own_heads(x_BSD, weight[...], fold) for weight in (self.key, self.value))
        if config.qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k = rotate(q, tokens.positions, config.rope), rotate(k, tokens.positions, config.rope)
        mixed = mix(
            q, k, v, tokens, fold.dense.cp, method=self.context,
            scale=softmax_scale(config.head_dim, config.rope), window=config.sliding_window,
        )  # fmt: skip
        y_BSD = linear(mixed, self.out[...], contracted=2)
        return collectives.psum_scatter(y_BSD, tp, dim=1)

    def _own_heads(self, x_BSD, weight_DKH, fold: Fold):
        """The key-value heads that this device's query heads use: all it holds, or the one of several it shares."""
        tp, num_kv = fold.dense.tp, self.config.num_kv_heads
        if fold.size(tp) <= num_kv:
            return linear(x_BSD, weight_DKH)
        head = collectives.axis_index(tp) * num_kv // fold.size(tp)
        one_head = lambda x, dim: jax.lax.dynamic_slice_in_dim(x, head, 1, axis=dim)
        if is_quantised(weight_DKH):  # a head is no whole number of tiles
            return one_head(linear(x_BSD, weight_DKH), 2)
        return linear(x_BSD, one_head(weight_DKH, 1))
