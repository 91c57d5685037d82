"""A sampler to see what a model has learned, on one device or any mesh: `python -m moex.generate RUN --prompt "def "`.

It reads a prompt in one pass and remembers every layer's keys and values (latents, for MLA), so that each further token
costs one token's work. T places of a text.
"""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from moex.generate.decode import continuing, nucleus, shortest, texts_at_once
from moex.generate.run import program_of, restored
from moex.train.program import Program
from moex.train.state import TrainState

__all__ = ["generate", "nucleus", "program_of", "restored"]


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
    share of the probability (arXiv 1904.09751); 1 among all.  A text that fills the model's sequence length goes on from
    its last half, which is read anew. A prompt's continuation doesn't depend on the others, but for the random numbers,
    which are drawn by its place among them, and for recipes that scale a whole tensor at once.
    Raises ValueError for no prompt, an empty one or one longer than the sequence length, and for other arguments out of
    range.
    """
    if num_tokens < 1 or not 0 <= temperature < np.inf or not 0 <= seed < 2**32 or not 0 < top_p <= 1:
        raise ValueError(
            f"num_tokens={num_tokens} must be at least 1, temperature={temperature} at least 0 and finite, top_p={top_p} "
            f"above 0 and at most 1, seed={seed} in [0, 2^32)"
        )
    seq_len, vocab_size = program.config.train.seq_len, program.config.model.vocab_size
    if not prompts:
        raise ValueError("no prompt is given")
    for prompt in prompts:
        if not 1 <= len(prompt) <= seq_len:
            raise ValueError(f"the prompt has {len(prompt)} tokens; it needs 1 to {seq_len}, the sequence length")
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            raise ValueError(f"prompt ids must lie in [0, {vocab_size})")
    unit = math.lcm(shortest(program.fold), 64)  # so that texts of any length need few programs
    num_places = min(seq_len, -(-(max(map(len, prompts)) + num_tokens - 1) // unit) * unit)
    everywhere = NamedSharding(program.mesh, PartitionSpec())
    run = jax.jit(continuing(program, num_places), out_shardings=everywhere)
    seen, found = [list(prompt) for prompt in prompts], [[] for _ in prompts]
    while (done := len(found[0])) < num_tokens:
        steps = min(num_tokens - done, num_places - max(map(len, seen)) + 1)
        options = np.int32(steps), np.int32(done), np.float32(temperature), np.float32(top_p), np.uint32(seed)
        given = [
            jax.make_array_from_callback(np.shape(x), everywhere, lambda at, x=x: np.asarray(x)[at])
            for x in (*_filled(seen, num_places, texts_at_once(program.fold)), *options)
        ]
        out = np.asarray(jax.device_get(run(state.params, state.router_bias, *given)))
        for text, more, new in zip(seen, found, out[: len(prompts), :steps].tolist(), strict=True):
            text += new
            more += new
            if len(text) > num_places:  # by the token that was chosen last, which no place is left for
                del text[: len(text) - max(num_places // 2, 1)]
    return found


def _filled(texts: Sequence[Sequence[int]], num_places: int, multiple: int) -> tuple[np.ndarray, np.ndarray]:
    """The texts as int32 [rows, T], with zeros behind them and rows without any up to the multiple, and their lengths."""
    rows = -(-len(texts) // multiple) * multiple
    ids, lengths = np.zeros((rows, num_places), np.int32), np.zeros((rows,), np.int32)
    for row, text in enumerate(texts):
        ids[row, : len(text)], lengths[row] = text, len(text)
    return ids, lengths
