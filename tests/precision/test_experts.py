"""Experts in FP8: against products of the quantised numbers in float64, against experts in float32, and over meshes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from moex.config import MemoryConfig, ParallelConfig, PrecisionConfig
from moex.layers.experts import expert_mlp
from moex.precision.experts import fp8_expert_mlp
from tests.quick import quick_jit
from tests.train.tiny import MODELS, Harness, one_step, tiny_config

D, F, E = 256, 128, 3
PATTERNS = dict(uneven=[100, 0, 28], one_row=[0, 1, 0], all_to_one=[0, 0, 384], none=[0, 0, 0], aligned=[128, 128, 128])


def arguments(rows=384, dtype=jnp.bfloat16, seed=0):
    keys = jax.random.split(jax.random.key(seed), 5)
    draw = lambda key, *shape: jax.random.normal(key, shape, jnp.float32).astype(dtype)
    weights_R = jax.random.uniform(keys[3], (rows,))
    matrices = draw(keys[1], E, D, 2 * F) / 16, draw(keys[2], E, F, D) / 11
    return draw(keys[0], rows, D), weights_R, *matrices, draw(keys[4], rows, D)


@functools.partial(quick_jit, static_argnums=0)
def gradients(function, rows, weights, sizes, gate_up, down, cotangent):
    call = lambda rows, weights, gate_up, down: function(rows, weights, sizes, gate_up, down)
    out, pull = jax.vjp(call, rows, weights, gate_up, down)
    return out, *pull(cotangent)


def run(function, sizes, given=None, **options):
    rows, weights, gate_up, down, cotangent = given or arguments(**options)
    out = gradients(function, rows, weights, jnp.array(sizes, jnp.int32), gate_up, down, cotangent)
    return [np.asarray(x, np.float64) for x in jax.device_get(out)]


def fp8(x, axis_tiles):
    """Float64 values of an array after E4M3 with a power-of-two scale a tile, by ml_dtypes."""
    tiles = np.asarray(x, np.float64)
    shape = [n for dim, tile in zip(tiles.shape, axis_tiles, strict=True) for n in (dim // tile, tile)]
    blocks = tiles.reshape(shape)
    inside = tuple(range(1, len(shape), 2))
    largest = np.abs(blocks).max(axis=inside, keepdims=True)
    scale = np.where(largest > 0, 2.0 ** np.ceil(np.log2(np.where(largest > 0, largest, 1) / 448.0)), 1)
    codes = (blocks / scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    return (codes.astype(np.float64) * scale).reshape(tiles.shape)


bf16 = lambda x: np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def by_hand(sizes, rows, weights, gate_up, down):
    """The forward pass on numbers rounded as the recipe says, sums in float64."""
    rows, weights = fp8(rows, (1, 128)), np.asarray(weights, np.float64)
    gate_up, down = (np.stack([fp8(w, (128, 128)) for w in matrices]) for matrices in (gate_up, down))
    expert = np.repeat(np.arange(E), sizes)
    out = np.zeros((len(rows), D))
    for row, e in enumerate(expert):
        both = bf16(rows[row] @ gate_up[e])
        gate, up = both[:F], both[F:]
        hidden = gate / (1 + np.exp(-gate)) * up * weights[row]
        out[row] = fp8(hidden[None], (1, 128))[0] @ down[e]
    return out


@pytest.mark.parametrize("name", PATTERNS)
def test_forward_is_that_of_the_rounded_numbers(name):
    rows, weights, gate_up, down, _ = arguments()
    got = run(fp8_expert_mlp, PATTERNS[name])[0]
    want = by_hand(PATTERNS[name], rows, weights, gate_up, down)
    largest = np.abs(want).max(initial=1e-9)
    off = np.abs(got - want) / largest
    assert np.mean(off > 4e-3) < 1e-3, "a code of the hidden row may fall to its neighbour"
    assert off.max() < 3e-2
    np.testing.assert_array_equal(got[sum(PATTERNS[name]) :], 0)


@pytest.mark.parametrize("name", ["uneven", "all_to_one", "aligned"])
def test_every_gradient_is_close_to_float32s(name):
    """Cosine above 0.997, size within 2 %: what rounding to 3 bits of mantissa leaves."""
    sizes, given = PATTERNS[name], arguments(dtype=jnp.float32)
    theirs = run(expert_mlp, sizes, given)
    ours = run(fp8_expert_mlp, sizes, given)
    for what, got, want in zip(("out", "rows", "weights", "gate_up", "down"), ours, theirs, strict=True):
        cosine = (got * want).sum() / np.linalg.norm(got) / np.linalg.norm(want)
        assert cosine > 0.997, what
        assert abs(np.linalg.norm(got) / np.linalg.norm(want) - 1) < 0.02, what
        assert np.abs(got - want).max() > 0, "in FP8 indeed"


@pytest.mark.parametrize("name", PATTERNS)
def test_rows_past_the_last_expert_spoil_nothing(name):
    sizes = PATTERNS[name]
    rows, weights, gate_up, down, cotangent = arguments()
    past = jnp.arange(len(rows)) >= sum(sizes)
    spoilt = lambda x: jnp.where(past.reshape(-1, *[1] * (x.ndim - 1)), jnp.nan, x)
    clean = run(fp8_expert_mlp, sizes)
    dirty = run(fp8_expert_mlp, sizes, (spoilt(rows), spoilt(weights), gate_up, down, cotangent))
    used = sum(sizes)
    for got, want in zip(dirty[:3], clean[:3], strict=True):
        np.testing.assert_array_equal(got[:used], want[:used])
    for got, want in zip(dirty[3:], clean[3:], strict=True):
        np.testing.assert_array_equal(got, want)
        assert np.isfinite(got).all()
    for e, size in enumerate(sizes):
        assert size or not clean[3][e].any(), "an expert without rows has no gradient"


def test_rows_that_fill_no_block():
    given = arguments(rows=200)
    assert [x.shape for x in run(fp8_expert_mlp, [70, 0, 130], given)][:2] == [(200, D), (200, D)]


FP8 = PrecisionConfig(compute_dtype="float32", experts="fp8_block")
FOLDINGS = {
    "ep 8": ParallelConfig(ep=8, transport="alltoall"),
    "ep 4, etp 2, tp 2": ParallelConfig(tp=2, ep=4, etp=2, transport="allgather", zero=3),
}


@functools.cache
def step(name, precision=FP8, memory=MemoryConfig()):  # noqa: B008 (frozen)
    width = 256 if name.startswith("ep 4") else 128
    model = dataclasses.replace(MODELS["gqa"], d_model=128, expert_width=width)
    parallel = FOLDINGS.get(name.removesuffix(" alone"), ParallelConfig())
    config = tiny_config(model, parallel=parallel, precision=precision, memory=memory)
    if name.endswith("alone"):
        return one_step(Harness.on_one_device(config), 1)
    return one_step(config, 8)


@pytest.mark.parametrize("name", FOLDINGS)
def test_a_step_is_that_of_one_device_up_to_rounding(name):
    """Tiles of tokens are an expert's own in one order, so meshes differ by float32 sums that may turn a code: a few 1e-3."""
    here, alone = step(name), step(f"{name} alone")
    assert here.metrics["applied"] == 1
    np.testing.assert_allclose(here.metrics["loss"], alone.metrics["loss"], rtol=1e-4)
    for ours, theirs in zip(jax.tree.leaves(here.change), jax.tree.leaves(alone.change), strict=True):
        error = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
        assert error < 1e-2, error


def test_a_step_in_fp8_is_near_float32s_and_not_it():
    fp8_step, full = step("ep 8"), step("ep 8", PrecisionConfig(compute_dtype="float32"))
    assert 0 < abs(fp8_step.metrics["loss"] / full.metrics["loss"] - 1) < 5e-3
    experts = lambda s: s.change["moe_layers"]["moe"]["experts"]["down"].ravel().astype(np.float64)
    a, b = experts(fp8_step), experts(full)
    assert 0.95 < a @ b / np.linalg.norm(a) / np.linalg.norm(b) < 1


def test_a_stash_keeps_codes():
    """The same bits with rows in a stash, one byte a number."""
    plain, stashed = step("ep 8"), step("ep 8", memory=MemoryConfig(stash=("experts",), stash_factor=0.0))
    jax.tree.map(np.testing.assert_array_equal, stashed.after, plain.after)
