"""The program that continues texts: one pass over what is there, then one token of every text at a time from memory.

B texts of a data-parallel rank, S those of them that a device keeps the memory of, T places of a text, L layers, D model
width, V vocabulary. In the pass, a text's tokens are split over cp and tp as in training. After it, texts are: cp splits
texts in place of tokens, tp splits heads, and what the layers between attentions see is one token of each text.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from mesh import Fold, collectives, sharded
from mesh.vma import vary
from moex.layers import param
from moex.layers.context import zigzag_order
from moex.layers.tokens import Tokens, own_part
from moex.train.loss import logits
from moex.train.program import Program
from moex.train.step import entry


def texts_at_once(fold: Fold) -> int:
    """The number of texts must be a multiple of this."""
    return fold.size("dp") * fold.size("cp") * fold.size("tp")


def shortest(fold: Fold) -> int:
    """Places of a text must be a multiple of this."""
    return fold.size("cp") * fold.size("tp") * (2 if fold.size("cp") > 1 else 1)


def continuing(program: Program, num_places: int) -> Callable:
    """The function of whole arrays (params, router bias, ids, lengths, steps, first, temperature, top_p, seed) -> tokens.

    ids: int32 [texts, num_places], of which the first `lengths` int32 [texts] are text; 0 for a text that is none.
    steps: int32, tokens to add, at most num_places - max(lengths) + 1.  first: int32, how many were added before, which
    the random numbers go by.  temperature, top_p: float32.  seed: uint32.  tokens: int32 [texts, num_places], of which the
    first `steps` are filled.
    """
    config, decoder, fold = program.config, program.decoder, program.fold
    dtype = jnp.dtype(config.precision.compute_dtype)
    dense, vocab_size = fold.dense, config.model.vocab_size
    order = zigzag_order(num_places, fold.size("cp"))

    def run(shards, bias_LE, ids_BT, index_BT, length_B, steps, first, temperature, top_p, seed):
        params, enter = entry(config, decoder, fold, shards)
        everywhere = lambda tree: jax.tree.map(lambda x: vary(x, fold.names), tree)
        num_own = ids_BT.shape[0] // fold.size("cp")
        own = lambda x: lax.dynamic_slice_in_dim(x, collectives.axis_index(dense.cp) * num_own, num_own)
        length_S = own(length_B)
        texts_S = (collectives.axis_index(dense.dp) * fold.size("cp") + collectives.axis_index(dense.cp)) * num_own
        texts_S += jnp.arange(num_own)

        def chosen(last_SD, number):
            """The next token of each text, from the activations of the last."""
            scores = logits(last_SD, decoder.head(params, enter), fold, vocab_size=vocab_size)
            scores_SV = collectives.all_gather(scores, dense.tp, dim=1)[:, :vocab_size]
            return everywhere(sampled(scores_SV, texts_S, first + number, temperature, top_p, seed))

        with jax.named_scope("read"):
            x_BTD, memory = decoder.remembering(
                params, bias_LE, ids_BT, Tokens((index_BT < length_B[:, None]).astype(jnp.int32), index_BT, index_BT),
                fold, dtype, enter,
            )  # fmt: skip
            last_BD = _last(x_BTD, own_part(index_BT, fold), length_B, fold)
            memory = tuple(_whole_texts(x, order, fold) for x in memory)
        tokens_S = chosen(own(last_BD), 0)
        out_ST = jnp.zeros((num_own, num_places), jnp.int32).at[:, 0].set(tokens_S)

        def step(number, carry):
            tokens_S, memory, out_ST = carry
            place_S = length_S + number - 1
            known = Tokens(*(x[None] for x in ((length_S > 0).astype(jnp.int32), place_S, place_S)))
            x_SD, memory = decoder.remembering(
                params, bias_LE, tokens_S[None], known, fold, dtype, enter, memory=memory
            )
            tokens_S = chosen(collectives.all_gather(x_SD[0], dense.tp, dim=0), number)
            return everywhere((tokens_S, memory, out_ST.at[:, number].set(tokens_S)))

        out_ST = lax.fori_loop(1, steps, step, everywhere((tokens_S, memory, out_ST)))[2]
        return collectives.pmax(out_ST, dense.pp + dense.tp)  # equal already; this lets the type say so

    rows, nothing = PartitionSpec(dense.dp, dense.cp), PartitionSpec()
    specs = jax.tree.map(lambda p: p.spec, param.placements(decoder.declarations, fold))
    in_specs = (specs, nothing, rows, rows, PartitionSpec(dense.dp), *[nothing] * 5)
    inner = sharded(run, program.mesh, in_specs, PartitionSpec(dense.dp + dense.cp))

    def call(params, bias, ids, lengths, *options):
        index = jnp.broadcast_to(jnp.asarray(order, jnp.int32)[None], ids.shape)
        return inner(params, bias, ids[:, order], index, lengths, *options)

    return call


def _last(x_BTD, index_BT, length_B, fold: Fold):
    """Activations of each text's last token, [B, D], from all devices' parts of it; 0 where there is none."""
    is_last_BT = index_BT == length_B[:, None] - 1
    return collectives.psum(jnp.where(is_last_BT[..., None], x_BTD, 0).sum(axis=1), fold.dense.sequence)


def _whole_texts(x, order, fold: Fold):
    """Memory [L, B, T / cp, ...] of some tokens of all texts -> [L, S, T, ...], of all tokens of some, in order."""
    whole = collectives.all_to_all(x, fold.dense.cp, split_dim=1, concat_dim=2)
    return whole[:, :, np.argsort(order)] if fold.size("cp") > 1 else whole


def sampled(scores_SV, texts_S, number, temperature, top_p, seed):
    """One token of each text, int32 [S]; a text's random number is of the seed, its own number and that of the token."""
    cooled_SV = scores_SV / jnp.where(temperature > 0, temperature, 1)
    kept_SV = jnp.where(temperature > 0, nucleus(cooled_SV, top_p), cooled_SV)
    key = jax.random.fold_in(jax.random.key(seed), number)
    noise = lambda text: jax.random.gumbel(jax.random.fold_in(key, text), scores_SV.shape[1:])
    noise_SV = jax.vmap(noise)(texts_S)
    return jnp.argmax(kept_SV + jnp.where(temperature > 0, noise_SV, 0), axis=-1).astype(jnp.int32)


def nucleus(scores_BV, top_p):
    """Scores [B, V] with -inf where a token isn't among the likeliest that together reach the share `top_p`.

    The likeliest one always stays.
    """
    order_BV = jnp.argsort(-scores_BV, axis=-1)
    share_BV = jax.nn.softmax(jnp.take_along_axis(scores_BV, order_BV, axis=-1), axis=-1)
    before_BV = jnp.cumsum(share_BV, axis=-1) - share_BV
    kept_BV = jnp.put_along_axis(jnp.zeros(scores_BV.shape, bool), order_BV, before_BV < top_p, axis=-1, inplace=False)
    return jnp.where(kept_BV, scores_BV, -jnp.inf)
