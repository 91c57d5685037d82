"""Measurements of quantised operands against counts by NumPy, and the same on every mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moex.config import ParallelConfig, PrecisionConfig
from moex.precision.recipes import RECIPES
from moex.precision.statistics import measure, summary
from moex.train.measure import make_measure_step
from moex.train.program import build
from moex.validate import resolve_fold
from tests.quick import quick_jit
from tests.train.tiny import MODELS, packed_rows, put, tiny_config

ROWS = RECIPES["fp8_block"].x


def test_counts_are_those_of_numbers_put_there():
    """One tile of 448s makes the scale 1: what is below half of the least code, 2^-10, becomes zero."""
    x = np.zeros((3, 256), np.float32)
    x[0, :128] = 448
    x[0, :3] = 2.0**-11, -(2.0**-12), 2.0**-9
    x[1, 128:] = 448 * 2.0**-20
    x[1, 130], x[2, 0] = np.inf, np.nan
    found = summary(measure(jnp.asarray(x), ROWS))
    assert found.numbers == 128 + 128 + 1
    assert found.not_finite == 2
    assert found.vanished == 2 / found.numbers
    assert (found.scale_low, found.scale_high) == (0, 0), "a tile with an infinity has no scale"


def test_a_scale_that_was_rounded_down_cuts_the_largest_of_its_tile():
    """NVFP4: the tile's E4M3 scale is 6 times 1 / 16 steps apart, so some tiles' largest number lies above 6 of them."""
    x = np.asarray(jax.random.normal(jax.random.key(0), (64, 256)))
    found = summary(measure(jnp.asarray(x), RECIPES["nvfp4"].x))
    assert 0 < found.saturated < 1 / 16
    assert 0.02 < found.vanished < 0.15


@pytest.mark.parametrize("name", RECIPES)
def test_scales_and_shares_are_those_of_the_quantised_array(name):
    format = dataclasses.replace(RECIPES[name].w, stochastic=False)
    x = jax.random.normal(jax.random.key(1), (128, 128)) * 2.0 ** jnp.arange(-64, 64).reshape(-1, 1)
    found = summary(measure(x, format))
    assert found.numbers == np.count_nonzero(np.asarray(x))
    assert found.scale_low <= found.scale_high
    assert summary(2 * measure(x, format)) == found._replace(numbers=2 * found.numbers)


def test_zeros_have_no_scale():
    assert summary(measure(jnp.zeros((4, 128)), ROWS)) == (0, 0, 0, 0, None, None)


@functools.cache
def measured(num_devices: int, **parallel):
    model = dataclasses.replace(MODELS["gqa"], d_model=128, expert_width=128)
    precision = PrecisionConfig(compute_dtype="float32", recipe="fp8_block")
    config = tiny_config(model, parallel=ParallelConfig(**parallel), precision=precision)
    fold = resolve_fold(config.parallel, num_devices)
    program = build(config, fold, jax.devices()[:num_devices])
    state = program.initial_state()
    step = quick_jit(make_measure_step(config, program.decoder, fold, program.mesh))
    return jax.device_get(step(state.params, state.router_bias, put(program, packed_rows(config))))


def test_a_model_is_measured_alike_on_a_mesh_and_alone():
    alone, here = measured(1), measured(8, ep=4, zero=3, transport="alltoall")
    products = {name.rpartition(".")[2] for name in alone}
    assert products == {"query", "key", "value", "out", "gate_up", "down"}
    for name, vectors_Lo in alone.items():
        for layer in range(len(vectors_Lo)):
            for operand in range(3):
                ours, theirs = summary(here[name][layer, operand]), summary(vectors_Lo[layer, operand])
                np.testing.assert_allclose(ours.numbers, theirs.numbers, rtol=1e-2)
                assert ours.not_finite == theirs.not_finite == 0
                assert abs(ours.vanished - theirs.vanished) < 2e-3
                assert abs(ours.scale_high - theirs.scale_high) <= 1
