"""A sampler to see what a model has learned: `python -m moex.generate RUN --prompt "def "`, on one device or any mesh.

It reads a window of the model's own sequence length for every token, without a key-value cache. B texts, S window, V
vocabulary, T tokens to add.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from mesh import collectives, sharded
from moex import cli
from moex.checkpoint import open_step
from moex.config import ParallelConfig
from moex.data import open_corpus
from moex.layers import param
from moex.layers.context import zigzag_order
from moex.layers.tokens import Tokens
from moex.observe.progress import printable
from moex.train.loss import logits
from moex.train.program import Program, build
from moex.train.reading import for_reading
from moex.train.rungs import ladder
from moex.train.state import TrainState
from moex.train.step import entering, hidden
from moex.validate import ConfigError, check_on, resolve_fold


def generate(
    program: Program,
    state: TrainState,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    *,
    temperature: float = 0.8,
    top_p: float = 1.0,
    seed: int = 0,
) -> list[list[int]]:
    """Continues each prompt by `num_tokens` token ids, all at once, on the program's mesh.

    temperature: of the choice; 0 takes the likeliest.  top_p: choose among the likeliest tokens that together have this
    share of the probability (arXiv 1904.09751); 1 among all.  A text longer than the window loses its start; a prompt's
    continuation doesn't depend on the others, but for the random numbers, which are drawn by its place among them.
    Raises ValueError for no prompt, an empty one or one longer than the window, and for other arguments out of range.
    """
    if num_tokens < 1 or not temperature >= 0 or not 0 <= seed < 2**32 or not 0 < top_p <= 1:
        raise ValueError(
            f"num_tokens={num_tokens} must be at least 1, temperature={temperature} at least 0, top_p={top_p} above 0 and at "
            f"most 1, seed={seed} in [0, 2^32)"
        )
    seq_len, vocab_size = program.config.train.seq_len, program.config.model.vocab_size
    if not prompts:
        raise ValueError("no prompt is given")
    for prompt in prompts:
        if not 1 <= len(prompt) <= seq_len:
            raise ValueError(f"the prompt has {len(prompt)} tokens; it needs 1 to {seq_len}, the sequence length")
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            raise ValueError(f"prompt ids must lie in [0, {vocab_size})")
    rows = -(-len(prompts) // program.fold.size("dp")) * program.fold.size("dp")
    filled = [list(prompts[min(row, len(prompts) - 1)]) for row in range(rows)]
    window = np.array([prompt + [0] * (seq_len - len(prompt)) for prompt in filled], np.int32)
    lengths = np.array([len(prompt) for prompt in filled], np.int32)
    everywhere = NamedSharding(program.mesh, PartitionSpec())
    values = (window, lengths, np.float32(temperature), np.float32(top_p), np.uint32(seed))
    arguments = [
        jax.make_array_from_callback(np.shape(v), everywhere, lambda at, v=v: np.asarray(v)[at]) for v in values
    ]
    run = jax.jit(_sample_loop(program, num_tokens), out_shardings=everywhere)
    out = np.asarray(jax.device_get(run(state.params, state.router_bias, *arguments)))
    return out[: len(prompts)].tolist()


def nucleus(scores_BV, top_p):
    """Scores [B, V] with -inf where a token isn't among the likeliest that together reach the share `top_p`.

    The likeliest one always stays.
    """
    order_BV = jnp.argsort(-scores_BV, axis=-1)
    share_BV = jax.nn.softmax(jnp.take_along_axis(scores_BV, order_BV, axis=-1), axis=-1)
    before_BV = jnp.cumsum(share_BV, axis=-1) - share_BV
    kept_BV = jnp.put_along_axis(jnp.zeros(scores_BV.shape, bool), order_BV, before_BV < top_p, axis=-1, inplace=False)
    return jnp.where(kept_BV, scores_BV, -jnp.inf)


def _sample_loop(program: Program, num_tokens: int):
    next_logits = _next_logits(program)
    vocab_size = program.config.model.vocab_size

    def run(params, bias, window_BS, length_B, temperature, top_p, seed):
        key, rows = jax.random.key(seed), jnp.arange(window_BS.shape[0])

        def body(i, carry):
            window_BS, length_B, out_BT = carry
            scores_BV = next_logits(params, bias, window_BS, length_B)[:, :vocab_size]
            cooled_BV = scores_BV / jnp.where(temperature > 0, temperature, 1)
            kept_BV = jnp.where(temperature > 0, nucleus(cooled_BV, top_p), cooled_BV)
            noise_BV = jax.random.gumbel(jax.random.fold_in(key, i), scores_BV.shape)
            token_B = jnp.argmax(kept_BV + jnp.where(temperature > 0, noise_BV, 0), axis=-1).astype(jnp.int32)
            full_B = length_B == window_BS.shape[1]
            window_BS = jnp.where(full_B[:, None], jnp.roll(window_BS, -1, axis=1), window_BS)
            length_B = jnp.where(full_B, length_B, length_B + 1)
            return window_BS.at[rows, length_B - 1].set(token_B), length_B, out_BT.at[:, i].set(token_B)

        empty = jnp.zeros((window_BS.shape[0], num_tokens), jnp.int32)
        return lax.fori_loop(0, num_tokens, body, (window_BS, length_B, empty))[2]

    return run


def _next_logits(program: Program):
    """(params, bias, window [B, S], lengths [B]) -> float32 scores [B, V] of the token after each row's first ones."""
    config, decoder, fold = program.config, program.decoder, program.fold
    entry = entering(config, decoder, fold)

    def run(shards, bias_LE, ids_BS, index_BS, length_B):
        params, enter = for_reading(config, entry, shards)
        tokens = Tokens((index_BS < length_B[:, None]).astype(jnp.int32), index_BS, index_BS)
        x_BSD, _ = hidden(config, decoder, fold, params, bias_LE, ids_BS, tokens, enter)
        x_BSD = collectives.all_gather(collectives.all_gather(x_BSD, fold.dense.tp, dim=1), fold.dense.cp, dim=1)
        index_BS = collectives.all_gather(index_BS, fold.dense.cp, dim=1)
        last_BD = (x_BSD * (index_BS == length_B[:, None] - 1)[..., None]).sum(axis=1)
        scores_BV = logits(last_BD, decoder.head(params, enter), fold, vocab_size=config.model.vocab_size)
        return collectives.pmax(scores_BV, fold.dense.pp + fold.dense.cp)  # equal already; this lets the type say so

    dense = fold.dense
    rows, sequence = PartitionSpec(dense.dp, dense.cp), PartitionSpec(dense.dp, dense.tp)
    specs = jax.tree.map(lambda p: p.spec, param.placements(decoder.declarations, fold))
    inner = sharded(run, program.mesh, (specs, PartitionSpec(), rows, rows, PartitionSpec(dense.dp)), sequence)

    def call(params, bias, window_BS, length_B):
        order = zigzag_order(window_BS.shape[1], fold.size("cp"))
        index_BS = jnp.broadcast_to(jnp.asarray(order, jnp.int32)[None], window_BS.shape)
        return inner(params, bias, window_BS[:, order], index_BS, length_B)

    return call


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


def program_of(run: Path, num_devices: int = 1, parallel: ParallelConfig = ParallelConfig()) -> Program:  # noqa: B008
    """A run's model on some of this machine's devices.  Raises ConfigError when it isn't a run folder or doesn't fit."""
    if not (run / "config.json").is_file():
        raise ConfigError(f"{run} is no run folder: it has no config.json")
    if not 1 <= num_devices <= jax.local_device_count():
        raise ConfigError(f"devices={num_devices}: this machine has {jax.local_device_count()}")
    config = dataclasses.replace(cli.load(run / "config.json"), parallel=parallel)
    fold = resolve_fold(parallel, num_devices)
    check_on(config, fold, jax.default_backend(), jax.devices()[0].device_kind)
    return build(ladder(config)[-1], fold, jax.local_devices()[:num_devices])  # its buffers cannot overflow


def restored(program: Program, run: Path, step: int | None = None, *, weights: str = "params") -> TrainState:
    """What generation needs of a checkpoint: parameters and router biases; the rest of the state stays abstract.

    weights: `ema` for the average.  Raises ValueError when none was kept.
    """
    saved = open_step(run, step)
    if not saved[weights]:
        raise ValueError(f"{run} kept no average of its parameters (optimizer.ema_decay=0)")
    place = lambda values, like: jax.tree.map(lambda x, to: jax.device_put(x, to.sharding), values, like)
    return program.state._replace(
        params=place(saved[weights], program.state.params),
        router_bias=place(saved["router_bias"], program.state.router_bias),
    )


if __name__ == "__main__":
    sys.exit(main())
