"""Causal attention within documents, on one device's arrays.

B rows, S and T query and key tokens, N query heads, K key-value heads, H head width.
"""

from moex.layers import blockwise
from moex.layers.blockwise import Places, Rule
from moex.layers.tokens import Tokens

BLOCK_SIZE = 64
"""Queries of a block. On two CPU cores at S = 256 and 512, one block of all queries takes 1.5 to 2 times as long."""


def attend(
    q_BSNH, k_BTKH, v_BTKH, queries: Tokens, keys: Tokens, *,
    scale: float, window: int = 0, soft_cap: float = 0.0, sinks_N=None, meter_N=None, ordered: bool = False,
):  # fmt: skip
    """softmax(scale q k^T) v over the keys that a query may see; scores and softmax in float32.

    A query sees keys of its own document at or before its place, with `window` > 0 only the last `window` of them.
    A padding token (segment 0) sees padding only, so it never yields NaN and never reaches a real token.

    Args: q, k, v in compute dtype, N a multiple of K; queries, keys: what is known of their tokens.
      soft_cap: logits x become soft_cap tanh(x / soft_cap); 0 leaves them (arXiv 2408.00118).
      sinks_N: float32, a logit for each head that joins its softmax and brings no value (gpt-oss).
      meter_N: float32 zeros, never read, whose cotangent is each head's largest logit of these tokens, at least 0; or None.
        It must vary over all mesh axes that the others do, so that no sum is taken of it.
      ordered: promises that queries and keys are the same tokens in the order of their index; half the work is left out.
    Returns: [B, S, N, H] like q. Kept for the backward pass: inputs, output and one number a query and head.
    """
    return blockwise.attention(
        q_BSNH, k_BTKH, v_BTKH, Places(queries.segments, queries.index), Places(keys.segments, keys.index),
        Rule(scale, window, soft_cap), sinks_N=sinks_N, meter_N=meter_N, ordered=ordered, block_size=BLOCK_SIZE,
    )  # fmt: skip
