"""Loss on held-out text, exact: every predictable token once, weighed alike."""

import math
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


def evaluate(program: Program, state: TrainState, batches: Batches, *, max_rows: int) -> Evaluation:
    """Mean -log p of the held-out tokens in the first rows of `batches`, as many as `max_rows` and the batch size allow.

    The rows read are always the same ones, so values of one run compare. Raises ValueError when no token is predictable.
    """
    num = min(batches.num_eval_batches, max(1, max_rows // batches.windows_per_step))
    sums = []
    for i in range(num):
        batch = place_batch(lambda rows, i=i: batches.eval_batch(i, rows), 0, program.batch)
        sums.append(program.eval(state.params, state.router_bias, batch))
    losses, counts = zip(*jax.device_get(sums), strict=True)
    tokens = sum(int(c) for c in counts)
    if not tokens:
        raise ValueError("the held-out text has no token to predict")
    return Evaluation(math.fsum(float(x) for x in losses) / tokens, tokens)
