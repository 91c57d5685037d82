"""Loss on held-out text, every predictable token once, weighed alike: in a run, and by `python -m moex.evaluate RUN`."""

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import tyro

from moex import cli
from moex.config import ParallelConfig
from moex.data import Batches, Packed, Rows, Split, Windows, check_mixture, open_corpus
from moex.generate import program_of, restored
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
        batch = place_batch(lambda rows: batches.eval_batch(i, rows), 0, by.batch)
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Evaluates a checkpoint on held-out text: loss, perplexity, bits per byte."""

    run: tyro.conf.Positional[Path]
    """The run folder."""
    step: int | None = None
    """Checkpoint to read, by its step; the newest otherwise."""
    weights: Literal["params", "ema"] = "params"
    """The parameters as trained, or their average over steps."""
    corpus: tuple[str, ...] = ()
    """Corpora to read; those of the run otherwise. Each must be made by the run's tokenizer."""
    split: Literal["held_out", "train"] = "held_out"
    """Which of a corpus's documents."""
    max_rows: int = 0
    """Rows to read of each corpus, at most; 0 for all."""
    devices: int = 1
    """Local devices to use, split as --parallel says."""
    parallel: ParallelConfig = ParallelConfig()  # noqa: RUF009 (frozen)
    """How the devices are split; any way, whatever the run was trained on."""
    json: bool = False
    """Print one JSON object a corpus."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line a corpus; exit code 2 with the reason when run, corpora or arguments don't fit."""
    args = tyro.cli(Arguments, args=arguments, prog="python -m moex.evaluate")
    try:
        for result in evaluate_run(args):
            print(json.dumps(result) if args.json else _line(result))
    except ValueError as error:
        return cli.fail(error)
    return 0


def evaluate_run(args: Arguments) -> list[dict]:
    """corpus, loss (nats a token), perplexity, bits_per_byte and tokens of each corpus.  Raises ValueError."""
    if args.max_rows < 0:
        raise ValueError(f"max_rows={args.max_rows} must not be negative")
    program = program_of(args.run, args.devices, args.parallel)
    own = [open_corpus(location) for location in program.config.data.corpus]
    corpora = [open_corpus(location) for location in args.corpus] or own
    for corpus in corpora:
        check_mixture([corpus], program.config.model.vocab_size)
        if corpus.tokenizer.digest != own[0].tokenizer.digest:
            raise ValueError(f"{corpus.name} was made with another tokenizer than the run's corpus {own[0].name}")
    state = restored(program, args.run, args.step, weights=args.weights)
    results = []
    for corpus in corpora:
        split: Split = getattr(corpus, args.split)
        if not split.num_tokens:
            raise ValueError(f"{corpus.name} has no documents in its split {args.split}: pass another --split")
        found = evaluate([program], state, _in_order(program, split), max_rows=args.max_rows or sys.maxsize)
        # Bits of what was predicted, over the bytes that as many tokens of this text have in the mean.
        bits_per_byte = found.loss / math.log(2) * split.num_tokens / split.num_bytes
        measures = dict(loss=found.loss, perplexity=math.exp(found.loss), bits_per_byte=bits_per_byte)
        results.append(dict(corpus=corpus.name) | measures | dict(tokens=found.tokens))
    return results


def _in_order(program: Program, split: Split) -> Batches:
    config = program.config
    kind = Packed if config.data.packing == "documents" else Windows
    rows: list[Rows] = [kind(split.shards, config.train.seq_len)]
    micro = config.train.batch_size // config.train.accumulation
    return Batches(rows, rows=micro, accumulation=config.train.accumulation, seed=0, shuffle=False)


def _line(result: dict) -> str:
    numbers = f"loss {result['loss']:.4f} nats  perplexity {result['perplexity']:,.3f}"
    return f"{result['corpus']}: {numbers}  bits per byte {result['bits_per_byte']:.4f}  ({result['tokens']:,} tokens)"


if __name__ == "__main__":
    sys.exit(main())
