"""Log-likelihood of given tokens, one by one: what a ranking of answers needs.

B rows of this device, S its part of a sequence, D model width, V vocabulary of this device (over tp), C chunks of T tokens.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from mesh import collectives, sharded
from moex.layers import param
from moex.layers.tokens import Tokens
from moex.train.loss import logits
from moex.train.placing import place_batch
from moex.train.program import Program
from moex.train.reading import reading_specs
from moex.train.state import TrainState
from moex.train.step import Batch, entry, hidden


class Scored(NamedTuple):
    """logp: sum over a continuation's tokens.  greedy: each of them was the likeliest."""

    logp: float
    greedy: bool


def score(program: Program, state: TrainState, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Scored]:
    """Log-likelihood of continuations, given what precedes them.

    pairs: (context, continuation) in token ids, neither empty. What doesn't fit into the model's sequence length loses its
    start. Raises ValueError for an empty part, or a continuation longer than a sequence.
    """
    seq_len = program.config.train.seq_len
    accumulation, num_rows = program.batch.ids.shape[:2]
    for context, continuation in pairs:
        if not context or not 1 <= len(continuation) <= seq_len:
            raise ValueError(
                f"a context of {len(context)} and a continuation of {len(continuation)} tokens: both need one, the second "
                f"at most {seq_len}"
            )
    step, found = jax.jit(make_score_step(program)), []
    size = accumulation * num_rows
    for first in range(0, len(pairs), size):
        some = pairs[first : first + size]
        rows = _rows(some, size, seq_len)
        shaped = {name: array.reshape(accumulation, num_rows, seq_len) for name, array in rows.items()}
        batch = place_batch(lambda part, shaped=shaped: {n: x[:, part] for n, x in shaped.items()}, 0, program.batch)
        logp, greedy, index = (np.asarray(jax.device_get(x)).reshape(size, seq_len) for x in step(state, batch))
        for row in range(len(some)):
            wanted = rows["mask"][row][index[row]]  # places as they lie on the mesh
            found.append(Scored(float(logp[row][wanted].sum()), bool(greedy[row][wanted].all())))
    return found


def _rows(pairs: Sequence[tuple[Sequence[int], Sequence[int]]], num_rows: int, seq_len: int) -> dict[str, np.ndarray]:
    """Each pair as a row; the mask is true where the label belongs to the continuation."""
    names = ("tokens", "labels", "segments", "positions")
    rows = {name: np.zeros((num_rows, seq_len), np.int32) for name in names} | {
        "mask": np.zeros((num_rows, seq_len), bool)
    }
    for row, (context, continuation) in enumerate(pairs):
        ids = np.asarray([*context, *continuation][-(seq_len + 1) :], np.int32)
        size = len(ids) - 1
        rows["tokens"][row, :size], rows["labels"][row, :size] = ids[:-1], ids[1:]
        rows["segments"][row, :size], rows["positions"][row, :size] = 1, np.arange(size)
        rows["mask"][row, size - len(continuation) : size] = True
    return rows


def make_score_step(program: Program) -> Callable:
    """(state, batch) -> (log p of each label, whether it is the likeliest, its place in the row), [A, B, S] each."""
    config, decoder, fold = program.config, program.decoder, program.fold
    tp = fold.dense.tp

    def chunk(x_TD, labels_T, head_VD):
        logits_TV = logits(x_TD, head_VD, fold, vocab_size=config.model.vocab_size)
        top_T = collectives.pmax(logits_TV.max(axis=-1), tp)
        total_T = collectives.psum(jnp.exp(logits_TV - top_T[:, None]).sum(axis=-1), tp)
        own_T = labels_T - collectives.axis_index(tp) * head_VD.shape[0]
        here_T = (own_T >= 0) & (own_T < head_VD.shape[0])
        at_T = jnp.take_along_axis(logits_TV, jnp.clip(own_T, 0, head_VD.shape[0] - 1)[:, None], axis=-1)[:, 0]
        label_T = collectives.psum(jnp.where(here_T, at_T, 0), tp)
        return label_T - top_T - jnp.log(total_T), label_T >= top_T

    def run(shards, bias_LE, batch: Batch):
        params, enter = entry(config, decoder, fold, shards)
        head_VD = decoder.head(params, enter)

        def one(_, micro: Batch):
            tokens = Tokens(micro.segments, micro.positions, micro.index)
            x_BSD, _ = hidden(config, decoder, fold, params, bias_LE, micro.ids, tokens, enter)
            x_BSD = collectives.all_gather(x_BSD, tp, dim=1)
            # A row at a time: logits of all would be the largest array by far.
            rows = lax.map(lambda row: chunk(row[0], row[1], head_VD), (x_BSD, micro.labels))
            return None, (*rows, micro.index)

        return lax.scan(one, None, batch._replace(step=None))[1]

    specs = jax.tree.map(lambda p: p.spec, param.placements(decoder.declarations, fold))
    split = PartitionSpec(fold.dense.pp, fold.dense.dp, fold.dense.cp)
    inner = sharded(run, program.mesh, in_specs=(specs, PartitionSpec(), reading_specs(fold)), out_specs=(split,) * 3)
    return lambda state, batch: inner(state.params, state.router_bias, batch)
