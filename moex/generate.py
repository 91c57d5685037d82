"""A small sampler to see what a model has learned: `python -m moex.generate RUN --prompt "def "`.

It reads a window of the model's own sequence length for every token, without a key-value cache: `generate` on the mesh of
its program, the command on one device, whatever mesh the run was trained on.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from mesh import collectives, fold, sharded
from moex import cli
from moex.checkpoint import open_step
from moex.config import ParallelConfig, RunConfig
from moex.data import decode_bytes
from moex.layers import param
from moex.layers.context import zigzag_order
from moex.layers.tokens import Tokens
from moex.observe.progress import printable
from moex.train.loss import logits
from moex.train.program import Program, build
from moex.train.state import TrainState
from moex.train.step import entered, entering, hidden
from moex.validate import ConfigError


def generate(
    program: Program,
    state: TrainState,
    prompt: Sequence[int],
    num_tokens: int,
    *,
    temperature: float = 0.8,
    seed: int = 0,
) -> list[int]:
    """Continues `prompt` by `num_tokens` token ids; temperature 0 takes the likeliest.

    A text longer than the window loses its start. Raises ValueError for an empty prompt or one longer than the window, and
    for other arguments out of range.
    """
    if num_tokens < 1 or not temperature >= 0 or not 0 <= seed < 2**32:
        raise ValueError(
            f"num_tokens={num_tokens} must be at least 1, temperature={temperature} at least 0, seed={seed} in [0, 2^32)"
        )
    seq_len, rows = program.config.train.seq_len, program.fold.size("dp")
    if not 1 <= len(prompt) <= seq_len:
        raise ValueError(f"the prompt has {len(prompt)} tokens; it needs 1 to {seq_len}, the sequence length")
    if not prompt or min(prompt) < 0 or max(prompt) >= program.config.model.vocab_size:
        raise ValueError(f"prompt ids must lie in [0, {program.config.model.vocab_size})")
    window = np.zeros((rows, seq_len), np.int32)
    window[:, : len(prompt)] = np.asarray(prompt, np.int32)
    everywhere = NamedSharding(program.mesh, PartitionSpec())
    values = (window, np.int32(len(prompt)), np.float32(temperature), np.uint32(seed))
    arguments = [
        jax.make_array_from_callback(np.shape(v), everywhere, lambda at, v=v: np.asarray(v)[at]) for v in values
    ]
    run = jax.jit(_sample_loop(program, num_tokens), out_shardings=everywhere)
    return np.asarray(jax.device_get(run(state.params, state.router_bias, *arguments))).tolist()


def _sample_loop(program: Program, num_tokens: int):
    next_logits = _next_logits(program)
    vocab_size = program.config.model.vocab_size

    def run(params, bias, window_BS, length, temperature, seed):
        key = jax.random.key(seed)

        def body(i, carry):
            window_BS, length, out = carry
            scores_V = next_logits(params, bias, window_BS, length)[0, :vocab_size]
            noise = jax.random.gumbel(jax.random.fold_in(key, i), scores_V.shape)
            token = jnp.argmax(scores_V + noise * temperature).astype(jnp.int32)
            full = length == window_BS.shape[1]
            window_BS = jnp.where(full, jnp.roll(window_BS, -1, axis=1), window_BS)
            length = jnp.where(full, length, length + 1)
            return window_BS.at[:, length - 1].set(token), length, out.at[i].set(token)

        return lax.fori_loop(0, num_tokens, body, (window_BS, length, jnp.zeros((num_tokens,), jnp.int32)))[2]

    return run


def _next_logits(program: Program):
    """(params, bias, window [B, S], length) -> float32 scores [B, V] of the token after the first `length` ones."""
    config, decoder, fold = program.config, program.decoder, program.fold
    enter = entering(config, decoder, fold)

    def run(shards, bias_LE, ids_BS, index_BS, length):
        params = entered(enter, shards)
        tokens = Tokens((index_BS < length).astype(jnp.int32), index_BS, index_BS)
        x_BSD, _ = hidden(config, decoder, fold, params, bias_LE, ids_BS, tokens)
        x_BSD = collectives.all_gather(collectives.all_gather(x_BSD, fold.dense.tp, dim=1), fold.dense.cp, dim=1)
        index_BS = collectives.all_gather(index_BS, fold.dense.cp, dim=1)
        last_BD = (x_BSD * (index_BS == length - 1)[..., None]).sum(axis=1)
        scores_BV = logits(last_BD, decoder.head(params), fold, vocab_size=config.model.vocab_size)
        return collectives.pmax(scores_BV, fold.dense.cp)  # equal already; this lets the type say so

    dense = fold.dense
    rows, sequence = PartitionSpec(dense.dp, dense.cp), PartitionSpec(dense.dp, dense.tp)
    specs = jax.tree.map(lambda p: p.spec, param.placements(decoder.declarations, fold))
    inner = sharded(run, program.mesh, (specs, PartitionSpec(), rows, rows, PartitionSpec()), sequence)

    def call(params, bias, window_BS, length):
        order = zigzag_order(window_BS.shape[1], fold.size("cp"))
        index_BS = jnp.broadcast_to(jnp.asarray(order, jnp.int32)[None], window_BS.shape)
        return inner(params, bias, window_BS[:, order], index_BS, length)

    return call


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Continues a text by a trained model."""

    run: tyro.conf.Positional[Path]
    """The run folder."""
    prompt: str = "def "
    """What the text starts from."""
    num_tokens: int = 200
    """How many tokens to add."""
    temperature: float = 0.8
    """Of the choice of a token; 0 takes the likeliest."""
    seed: int = 0
    """Of the choice; the same seed gives the same text."""
    step: int | None = None
    """Checkpoint to read, by its step; the newest otherwise."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the prompt and its continuation; exit code 2 with the reason when the run or the arguments don't fit."""
    args = tyro.cli(Arguments, args=arguments, prog="python -m moex.generate")
    try:
        config = read_config(args.run)
        program = build(config, fold({}, {}), jax.local_devices()[:1])
        state = restored(program, args.run, args.step)
        prompt, options = list(args.prompt.encode()), dict(temperature=args.temperature, seed=args.seed)
        text = args.prompt + decode_bytes(generate(program, state, prompt, args.num_tokens, **options))
    except ValueError as error:
        return cli.fail(error)
    print(printable(text, sys.stdout.encoding))
    return 0


def read_config(run: Path) -> RunConfig:
    """A run folder's configuration, for one device.  Raises ConfigError when it isn't a run folder."""
    if not (run / "config.json").is_file():
        raise ConfigError(f"{run} is no run folder: it has no config.json")
    return dataclasses.replace(cli.load(run / "config.json"), parallel=ParallelConfig())


def restored(program: Program, run: Path, step: int | None = None) -> TrainState:
    """What generation needs of a checkpoint: parameters and router biases; the rest of the state stays abstract."""
    saved = open_step(run, step)
    place = lambda values, like: jax.tree.map(lambda x, to: jax.device_put(x, to.sharding), values, like)
    return program.state._replace(
        params=place(saved["params"], program.state.params),
        router_bias=place(saved["router_bias"], program.state.router_bias),
    )


if __name__ == "__main__":
    sys.exit(main())
