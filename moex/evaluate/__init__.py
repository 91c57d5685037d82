"""Loss on held-out text, every predictable token once, weighed alike: in a run, and by `python -m moex.evaluate RUN`."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax

from moex.data import Batches
from moex.train.placing import place_batch
from moex.train.program import Program
from moex.train.state import TrainState


class Evaluation(NamedTuple):
    """loss: nats a token. tokens: how many were predicted."""

    loss: float
    tokens: int


def evaluate(programs: Sequence[Program], state: TrainState, batches: Batches, *, max_rows: int) -> Evaluation:
    """Mean -log p of the held-out tokens in the first rows of `batches`, as many as `max_rows` and the batch size allow.

    The rows read are always the same ones, so values of one run compare.

    programs: with rising buffer sizes, the last of which cannot overflow; a batch is read again with the next where one
    does. Raises ValueError when no token is predictable.
    """
    num = min(batches.num_eval_batches, max(1, max_rows // batches.rows_per_step))

    def summed(by: Program, i: int):
        batch = place_batch(lambda rows: batches.eval_batch(i, rows), 0, by.batch, by.config.parallel.deal)
        return by.eval(state.params, state.router_bias, batch)

    sums = jax.device_get([summed(programs[0], i) for i in range(num)])
    for larger in programs[1:]:
        sums = [jax.device_get(summed(larger, i)) if one[2] else one for i, one in enumerate(sums)]
    losses, counts, overflows = zip(*sums, strict=True)
    assert not any(overflows), "the last program cannot overflow"
    tokens = sum(int(c) for c in counts)
    if not tokens:
        raise ValueError("the held-out text has no token to predict")
    return Evaluation(math.fsum(float(x) for x in losses) / tokens, tokens)
