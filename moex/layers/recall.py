"""What attention remembers of the tokens before, so that a further one costs one token's work (a key-value cache).

While texts are continued, a device holds S of them whole: its context-parallel part of "the sequence" are the next tokens
of those texts, one each, in an array of one row. L layers, T places of a text.
"""

import jax
import jax.numpy as jnp

from mesh.vma import vary, varying
from moex.layers.tokens import Tokens

Memory = tuple[jax.Array, ...]
"""Arrays [L, S, T, ...], each of which is some number of a token; see an attention's `read`."""


def texts(x_BSNH):
    """[1, S, N, H], a token of each text in one row, <-> [S, 1, N, H], each text a row."""
    return x_BSNH.swapaxes(0, 1)


def remember(memory: Memory, kept, tokens: Tokens, layer) -> Memory:
    """The memory with one layer's numbers of the next tokens, [1, S, ...] each, at those tokens' places."""
    places_S = tokens.index[0]
    every = jnp.arange(places_S.shape[0])
    put = lambda old, new: old.at[layer, every, places_S].set(vary(new[0], varying(old)))
    return tuple(put(old, new) for old, new in zip(memory, kept, strict=True))


def recalled(memory: Memory, layer) -> Memory:
    """One layer's part, [S, T, ...]."""
    return tuple(jax.lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in memory)


def places(tokens: Tokens, num_places: int) -> tuple[Tokens, Tokens]:
    """Of the next tokens as queries [S, 1], and of all places as keys [S, T]; what is past a query it doesn't see."""
    queries = jax.tree.map(texts, tokens)
    index = jnp.broadcast_to(jnp.arange(num_places, dtype=jnp.int32)[None], (queries.index.shape[0], num_places))
    return queries, Tokens(jnp.broadcast_to(queries.segments, index.shape), index, index)
