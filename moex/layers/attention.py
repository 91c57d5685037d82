"""Causal attention within documents, on one device's arrays.

B rows, S and T query and key tokens, N query heads, K key-value heads, H head width.
"""

import jax

from moex.layers.tokens import Tokens


def attend(q_BSNH, k_BTKH, v_BTKH, queries: Tokens, keys: Tokens, *, scale: float, window: int = 0):
    """softmax(scale q k^T) v over the keys that a query may see; scores and softmax in float32.

    A query sees keys of its own document at or before its place, with `window` > 0 only the last `window` of them.
    A padding token (segment 0) sees padding only, so it never yields NaN and never reaches a real token.

    Args: q, k, v in compute dtype, N a multiple of K; queries, keys: what is known of their tokens.
    Returns: [B, S, N, H] like q.
    """
    distance = queries.index[:, :, None] - keys.index[:, None, :]
    seen = (distance >= 0) & (queries.segments[:, :, None] == keys.segments[:, None, :])
    if window:
        seen &= distance < window
    return jax.nn.dot_product_attention(q_BSNH, k_BTKH, v_BTKH, mask=seen[:, None], scale=scale)
