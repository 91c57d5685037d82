"""`python -m moex.generate RUN --prompt "def "`: continues texts by a trained model, on one device or any mesh."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import tyro

from moex import cli
from moex.config import ParallelConfig
from moex.data import open_corpus
from moex.generate import generate, program_of, restored
from moex.observe.progress import printable


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Continues texts by a trained model."""

    run: tyro.conf.Positional[Path]
    """The run folder."""
    prompt: tuple[str, ...] = ("def ",)
    """What the texts start from, one or several."""
    num_tokens: int = 200
    """How many tokens to add to each."""
    temperature: float = 0.8
    """Of the choice of a token; 0 takes the likeliest."""
    top_p: float = 1.0
    """Choose among the likeliest tokens that together have this probability; 1 among all."""
    seed: int = 0
    """Of the choice; the same seed gives the same texts."""
    step: int | None = None
    """Checkpoint to read, by its step; the newest otherwise."""
    weights: Literal["params", "ema"] = "params"
    """The parameters as trained, or their average over steps."""
    devices: int = 1
    """Local devices to use, split as --parallel says."""
    parallel: ParallelConfig = ParallelConfig()  # noqa: RUF009 (frozen)
    """How the devices are split; any way, whatever the run was trained on."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints each prompt and its continuation; exit code 2 with the reason when the run or the arguments don't fit."""
    args = tyro.cli(Arguments, args=arguments, prog="python -m moex.generate", config=(tyro.conf.AvoidSubcommands,))
    try:
        program = program_of(args.run, args.devices, args.parallel)
        state = restored(program, args.run, args.step, weights=args.weights)
        tokenizer = open_corpus(program.config.data.corpus[0]).tokenizer
        prompts = [ids.tolist() for ids in tokenizer.encode(args.prompt)]
        options = dict(temperature=args.temperature, top_p=args.top_p, seed=args.seed)
        texts = [tokenizer.decode(ids) for ids in generate(program, state, prompts, args.num_tokens, **options)]
    except ValueError as error:
        return cli.fail(error)
    for number, (prompt, text) in enumerate(zip(args.prompt, texts, strict=True)):
        print(("\n" if number else "") + printable(prompt + text, sys.stdout.encoding))
    return 0


if __name__ == "__main__":
    sys.exit(main())
