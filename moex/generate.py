"""A small sampler to see what a model has learned: `python -m moex.generate RUN --prompt "def "`.

It reads a window of the model's own sequence length for every token, on the training mesh, without a key-value cache.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from mesh import collectives, distributed, sharded
from moex import cli
from moex.checkpoint import Checkpoints
from moex.config import ParallelConfig, RunConfig
from moex.layers import param
from moex.layers.context import zigzag_order
from moex.layers.tokens import Tokens
from moex.train.loss import logits
from moex.train.program import Program, build
from moex.train.state import TrainState
from moex.validate import ConfigError, check_on, resolve_fold


@dataclasses.dataclass(frozen=True)
class Options:
    """Continues a text by a trained model."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of a run; its newest checkpoint is read."""
    prompt: str
    """Text to continue."""
    num_tokens: int = 200
    """Tokens to add."""
    temperature: float = 0.8
    """Of sampling; 0 takes the likeliest token."""
    seed: int = 0
    """Of sampling."""
    data_parallel: bool = False
    """Lay the model out for the devices here by data parallelism alone, in place of the run's own mesh."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = tyro.cli(Options, args=arguments, prog="python -m moex.generate")
    try:
        config = _config_of(options)
        distributed.initialise()
        text = _continue(options, config)
    except ConfigError as error:
        return cli.fail(error)
    if jax.process_index() == 0:
        print(options.prompt + text)
    return 0


def _config_of(options: Options) -> RunConfig:
    """The run's configuration.  Raises ConfigError for what can be known before devices are touched."""
    folder = options.run
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder: give the folder of a run, such as runs/tiny")
    if not (folder / "checkpoints").is_dir():
        raise ConfigError(f"{folder} has no folder `checkpoints`: give the folder of a run that saved one")
    config = cli.load(folder / "config.json")
    num_tokens, seq_len = len(options.prompt.encode()), config.train.seq_len
    if not 1 <= num_tokens <= seq_len:
        raise ConfigError(f"--prompt has {num_tokens} tokens (bytes); it needs 1 to {seq_len}, the sequence length")
    if options.num_tokens < 1:
        raise ConfigError(f"--num-tokens={options.num_tokens} must be at least 1")
    if not 0 <= options.temperature < float("inf"):
        raise ConfigError(f"--temperature={options.temperature} must be 0 or positive")
    if not 0 <= options.seed < 2**32:
        raise ConfigError(f"--seed={options.seed} must lie between 0 and {2**32 - 1}")
    if options.data_parallel:
        return dataclasses.replace(config, parallel=ParallelConfig(zero=config.parallel.zero))
    return config


def _continue(options: Options, config: RunConfig) -> str:
    """Restores the newest checkpoint and samples from it."""
    try:
        fold = resolve_fold(config.parallel, jax.device_count())
    except ConfigError as error:
        raise ConfigError(f"{error}\nor pass --data-parallel, if the model fits") from error
    batch = dataclasses.replace(config.train, batch_size=fold.size("dp"), accumulation=1)  # any that fits: none is read
    config = dataclasses.replace(config, train=batch)
    check_on(config, fold, jax.default_backend())
    program = build(config, fold)
    with Checkpoints(options.run, config.checkpoint) as checkpoints:
        if checkpoints.latest is None:
            raise ConfigError(f"{options.run / 'checkpoints'} holds no finished checkpoint")
        state = checkpoints.restore(program.state)
    prompt = list(options.prompt.encode())
    tokens = generate(program, state, prompt, options.num_tokens, temperature=options.temperature, seed=options.seed)
    return bytes(t if t < 256 else 0xFF for t in tokens).decode(errors="replace")  # 0xFF is in no UTF-8 text


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

    A text longer than the window loses its start. Raises ValueError for an empty prompt or one longer than the window.
    """
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
    places = param.placements(decoder.declarations, fold)
    dtype = jnp.dtype(config.precision.compute_dtype)

    def run(shards, bias_LE, ids_BS, index_BS, length):
        params = {n: param.enter(decoder.declarations[n], places[n], t, dtype) for n, t in shards.items()}
        tokens = Tokens((index_BS < length).astype(jnp.int32), index_BS, index_BS)
        biases = bias_LE if config.model.router.bias_rate > 0 else None
        hidden, _ = decoder.hidden(params, biases, ids_BS, tokens, fold, dtype)
        hidden = collectives.all_gather(collectives.all_gather(hidden, fold.dense.tp, dim=1), fold.dense.cp, dim=1)
        index_BS = collectives.all_gather(index_BS, fold.dense.cp, dim=1)
        last_BD = (hidden * (index_BS == length - 1)[..., None]).sum(axis=1)
        scores_BV = logits(last_BD, decoder.head(params), fold, vocab_size=config.model.vocab_size)
        return collectives.pmax(scores_BV, fold.dense.cp)  # equal already; this lets the type say so

    dense = fold.dense
    rows, sequence = PartitionSpec(dense.dp, dense.cp), PartitionSpec(dense.dp, dense.tp)
    specs = jax.tree.map(lambda p: p.spec, places)
    inner = sharded(run, program.mesh, (specs, PartitionSpec(), rows, rows, PartitionSpec()), sequence)

    def call(params, bias, window_BS, length):
        order = zigzag_order(window_BS.shape[1], fold.size("cp"))
        index_BS = jnp.broadcast_to(jnp.asarray(order, jnp.int32)[None], window_BS.shape)
        return inner(params, bias, window_BS[:, order], index_BS, length)

    return call


if __name__ == "__main__":
    sys.exit(main())
