"""Texts continued from memory, one token's work each, have the tokens of passes over the whole text.

Tiny public checkpoints of families whose attention differs: sinks, windows and biases (GPT-OSS), latents (DeepSeek), a part
of a head rotated (GLM-4.5), on one device and on meshes.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mesh import collectives, sharded
from moex.config import PrecisionConfig
from moex.generate import generate
from moex.hf.names import ROUTER_BIAS
from moex.hf.params import nested
from moex.layers.tokens import Tokens
from moex.train.step import entered, entering
from tests.models.golden import golden as golden_of
from tests.models.golden import loaded, program_on
from tests.quick import quick_jit

CASES = [("gpt_oss", "ring"), ("deepseek_v3", "gather"), ("glm4_moe", "one"), ("deepseek_v3 in FP8", "one")]
NUM_TOKENS = 7


@functools.cache
def golden(name: str):
    """The checkpoint; in FP8: with the projections of attention quantised, whose latents can't join the query."""
    name, _, quantised = name.partition(" in ")
    g = golden_of(name)
    precision = PrecisionConfig(compute_dtype="float32", attention="fp8_block") if quantised else g.config.precision
    return g._replace(config=dataclasses.replace(g.config, precision=precision))


@functools.cache
def whole_pass(name: str):
    """(params, bias, ids [1, S], length) -> the likeliest token after the text, by one pass over all of it."""
    g, program = golden(name), program_on(golden(name).config, "one")
    decoder, seq_len = program.decoder, g.config.train.seq_len
    enter = entering(g.config, decoder, program.fold)

    def likeliest(params, bias_LE, ids_BS, length):
        index = jnp.arange(seq_len, dtype=jnp.int32)[None]
        tokens = Tokens((index < length).astype(jnp.int32), index, index)
        params = entered(enter, params, decoder)
        x_BSD, _ = decoder.hidden(params, bias_LE, ids_BS, tokens, program.fold, jnp.float32)
        last_D = jnp.where((index == length - 1)[0, :, None], x_BSD[0], 0).sum(axis=0)
        scores_V = last_D @ decoder.head(params)[: g.config.model.vocab_size].T
        return collectives.pmax(scores_V.argmax(), program.fold.names)  # of one device; for the type

    specs = jax.tree.map(lambda x: x.sharding.spec, program.state.params)
    return quick_jit(sharded(likeliest, program.mesh, (specs, P(), P(), P()), P()))


def wanted(name: str, values, prompt: list[int]) -> list[int]:
    """One token after the other; a text that fills the sequence goes on from its last half."""
    params, bias = nested(values), values[ROUTER_BIAS]
    seq_len = golden(name).config.train.seq_len
    text, found = list(prompt), []
    for _ in range(NUM_TOKENS):
        if len(text) > seq_len:
            text = text[-(seq_len // 2) :]
        ids = np.zeros((1, seq_len), np.int32)
        ids[0, : len(text)] = text
        found.append(int(whole_pass(name)(params, bias, ids, np.int32(len(text)))))
        text.append(found[-1])
    return found


@pytest.mark.parametrize("name, folding", CASES)
def test_greedy_tokens_are_those_of_whole_passes(name, folding):
    """Prompts of one token, of several, and one so long that the text outgrows the sequence."""
    g, program = golden(name), program_on(golden(name).config, folding)
    row = g.expected["input_ids"][0].tolist()
    prompts = [row[:1], row[3:9], row[: len(row) - 2]]
    values = loaded(g, program)
    state = program.state._replace(params=nested(values), router_bias=values[ROUTER_BIAS])
    found = generate(program, state, prompts, NUM_TOKENS, temperature=0)
    values = loaded(g, program_on(g.config, "one"))
    assert found == [wanted(name, values, prompt) for prompt in prompts]
