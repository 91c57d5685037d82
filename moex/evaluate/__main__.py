"""`python -m moex.evaluate RUN`: loss, perplexity and bits a byte of a checkpoint on held-out text; or tasks of lm-eval."""

import dataclasses
import importlib
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import tyro

from moex import cli
from moex.config import ParallelConfig
from moex.data import Batches, Packed, Rows, Split, Windows, check_mixture, open_corpus
from moex.evaluate import evaluate
from moex.evaluate.harness import harness_model
from moex.generate import program_of, restored
from moex.train.program import Program


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
    """Print one JSON object a corpus, or one for all tasks."""
    tasks: tuple[str, ...] = ()
    """Tasks of lm-evaluation-harness to run in place of reading corpora (extra `eval`)."""
    task_folder: str = ""
    """A folder with tasks of your own, beside those that lm-eval brings."""
    limit: int = 0
    """Examples of each task, at most; 0 for all."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line a corpus; exit code 2 with the reason when run, corpora or arguments don't fit."""
    args = tyro.cli(Arguments, args=arguments, prog="python -m moex.evaluate")
    try:
        if args.tasks:
            print(_run_tasks(args))
            return 0
        if args.limit or args.task_folder:
            raise ValueError("limit and task_folder have no effect without --tasks")
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


def _run_tasks(args: Arguments) -> str:
    """The table that lm-eval makes, or its numbers as JSON.  Raises ValueError when it isn't installed."""
    if args.corpus or args.max_rows:
        raise ValueError("corpus and max_rows have no effect with --tasks, which bring their own text")
    program = program_of(args.run, args.devices, args.parallel)
    state = restored(program, args.run, args.step, weights=args.weights)
    tokenizer = open_corpus(program.config.data.corpus[0]).tokenizer
    model = harness_model(program, state, tokenizer)
    # Not before harness_model has said what is missing.
    lm_eval, known, utils = (importlib.import_module(f"lm_eval{name}") for name in ("", ".tasks", ".utils"))
    tasks = known.TaskManager(include_path=args.task_folder or None)
    options = dict(tasks=list(args.tasks), limit=args.limit or None, task_manager=tasks)
    found = lm_eval.simple_evaluate(model=model, bootstrap_iters=0, **options)  # its error bars fork, JAX has threads
    return json.dumps(found["results"]) if args.json else utils.make_table(found)


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
