"""A model small enough to compile in seconds, a batch of packed documents, and one step of them on any folding."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from moex.config import (
    AttentionConfig,
    MemoryConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RouterConfig,
    RunConfig,
    TrainConfig,
)
from moex.models.families import deepseek_v3
from moex.train.placing import place_batch
from moex.train.program import Program, build
from moex.validate import check, check_on, resolve_fold
from tests.quick import OPTIONS, quickly

# A power of two scales gradients exactly, and changes this large drown the rounding of weights near 1.
SGD = OptimizerConfig(
    name="sgd", peak_lr=1024.0, final_lr=0.0, warmup_steps=0, schedule="constant", weight_decay=0, clip_norm=0
)
ADAMW = OptimizerConfig(peak_lr=1e-2, warmup_steps=0, schedule="constant", clip_norm=1.0)

MODELS = dict(
    gqa=ModelConfig(
        vocab_size=259, vocab_multiple=8, d_model=32, num_layers=2, expert_width=16, init_std=0.1,
        attention=AttentionConfig(num_heads=8, num_kv_heads=2, head_dim=8, qk_norm=True),
        router=RouterConfig(
            num_experts=8, top_k=2, aux_coefficient=0.05, sequence_coefficient=0.03, global_coefficient=0.02,
            z_coefficient=1e-3,
        ),
    ),
    mla=deepseek_v3(
        vocab_size=259, vocab_multiple=8, d_model=32, num_layers=2, num_dense_layers=1, dense_width=32, expert_width=16,
        shared_width=16, init_std=0.1, num_heads=8, nope_dim=8, rope_dim=4, value_dim=8, q_latent_dim=16,
        kv_latent_dim=12, num_experts=8, top_k=2, num_groups=4, top_groups=2, aux_coefficient=0.05,
    ),
)  # fmt: skip
MODELS["windowed"] = dataclasses.replace(
    MODELS["gqa"], attention=dataclasses.replace(MODELS["gqa"].attention, num_kv_heads=4, sliding_window=3)
)
_steered = lambda **fields: dataclasses.replace(
    MODELS["gqa"], router=RouterConfig(num_experts=8, top_k=2, aux_coefficient=0.0, **fields)
)
MODELS["dropping"] = _steered(capacity_factor=1.0, jitter=0.1, pad_to_capacity=True)
MODELS["quantile"] = _steered(selection="quantile", score_function="sqrtsoftplus")
MODELS["sinkhorn"] = _steered(selection="sinkhorn", renormalize=False)


def tiny_config(model: str | ModelConfig = "gqa", *, accumulation: int = 1, **sections) -> RunConfig:
    """32 rows of 16 tokens in float32, plain SGD; `sections` replaces whole sections."""
    base = RunConfig(
        model=MODELS[model] if isinstance(model, str) else model,
        train=TrainConfig(steps=100, batch_size=32, accumulation=accumulation, seq_len=16, loss_chunk_tokens=24),
        optimizer=SGD,
        precision=PrecisionConfig(compute_dtype="float32"),
    )
    config = dataclasses.replace(base, **sections)
    check(config)
    return config


def packed_rows(config: RunConfig, *, seed: int = 0) -> dict[str, np.ndarray]:
    """A step's arrays [A, B, S]: documents of random lengths, then padding; one row is all padding."""
    train, rng = config.train, np.random.default_rng(seed)
    num_rows, seq_len = train.batch_size, train.seq_len
    arrays = {name: np.zeros((num_rows, seq_len), np.int32) for name in ("tokens", "labels", "segments", "positions")}
    arrays["mask"] = np.zeros((num_rows, seq_len), bool)
    for row in range(1, num_rows):
        at, document = 0, 0
        while at < seq_len - row % 4:
            length, document = min(int(rng.integers(1, 10)), seq_len - at), document + 1
            where = (row, slice(at, at + length))
            text = rng.integers(0, config.model.vocab_size, length + 1)
            arrays["tokens"][where], arrays["labels"][where] = text[:-1], text[1:]
            arrays["segments"][where], arrays["positions"][where] = document, np.arange(length)
            arrays["mask"][row, at : at + length - 1] = True
            at += length
    shape = (train.accumulation, num_rows // train.accumulation, seq_len)
    return {name: array.reshape(shape) for name, array in arrays.items()}


def put(program: Program, rows: dict[str, np.ndarray], step: int = 0):
    """The rows as a batch on the program's mesh."""
    read = lambda some: {name: array[:, some] for name, array in rows.items()}
    return place_batch(read, step, program.batch, program.config.parallel.deal)


@functools.lru_cache(maxsize=16)
def program_of(config: RunConfig, num_devices: int) -> Program:
    """The programs of a configuration, the step compiled: without LLVM's optimisations, in half the time.

    Few are kept: each maps about a thousand pages of its own, and a process may have 65,530 mappings.
    """
    fold = resolve_fold(config.parallel, num_devices)
    check_on(config, fold)
    program = build(config, fold, jax.devices()[:num_devices])
    train = program.train.lower(program.state, program.batch).compile(compiler_options=OPTIONS)
    return program._replace(train=train, eval=quickly(program.eval), record=quickly(program.record))


def equations(jaxpr) -> Iterator:
    """All equations of a jaxpr and of those inside it."""
    is_jaxpr = lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for inner in filter(is_jaxpr, jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr)):
            yield from equations(inner)


def place_state(program: Program, values):
    """A tree of numpy arrays as a state on the program's mesh."""
    return jax.tree.map(lambda value, like: jax.device_put(value, like.sharding), values, program.state)


class Step(NamedTuple):
    """One step from initial values: trees of numpy arrays, and the state on its devices."""

    before: Any
    after: Any
    metrics: dict[str, np.ndarray]
    state: Any

    @property
    def change(self):
        return jax.tree.map(lambda a, b: a - b, self.after.params, self.before.params)


@functools.lru_cache(maxsize=64)
def one_step(config: RunConfig, num_devices: int, skewed: bool = False) -> Step:
    """One step on the packed rows of seed 0; skewed: a bias sends every token to expert 1, half of all pairs."""
    program = program_of(config, num_devices)
    state = program.initial_state()
    if skewed:
        assert config.model.router.bias_rate, "without a bias the router cannot be skewed"
        values = jax.device_get(state)
        bias = np.zeros_like(values.router_bias)
        bias[:, 1] = 10
        state = place_state(program, values._replace(router_bias=bias))
    before = jax.device_get(state)
    state, metrics = program.train(state, put(program, packed_rows(config)))
    return Step(before, jax.device_get(state), jax.device_get(metrics), state)


class Harness:
    """What the test files of this folder call."""

    MODELS, SGD, ADAMW = MODELS, SGD, ADAMW
    config, rows, put, place_state = map(staticmethod, (tiny_config, packed_rows, put, place_state))
    program, one_step, equations = map(staticmethod, (program_of, one_step, equations))

    @staticmethod
    def on_one_device(config: RunConfig) -> RunConfig:
        """The same training without any parallelism, ZeRO-1, nothing recomputed."""
        return dataclasses.replace(config, parallel=ParallelConfig(), memory=MemoryConfig())
