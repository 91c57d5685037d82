"""Experts in FP8: against products of the quantised numbers in float64, against experts in float32, and over meshes."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from moex.layers.experts import expert_mlp, quantised_expert_mlp
from moex.precision.experts import GATE_UP, ROWS
from moex.precision.linear import KEPT
from moex.precision.recipes import RECIPES
from moex.precision.weight import quantise_here
from tests.quick import quick_jit

D, F, E, R = 256, 128, 3, 640
PATTERNS = dict(
    uneven=[100, 0, 28],
    one_row=[0, 1, 0],
    all_to_one=[0, 0, 384],
    none=[0, 0, 0],
    aligned=[128, 128, 128],
    two=[130, 9, 0],
)
"""Rows of each expert; its first stands at a multiple of 128."""
NAMES = ("out", "rows", "weights", "gate_up", "down")


def expert_of_rows(counts):
    """The expert of each of R rows, or -1 where none stands, and the sizes with their padding."""
    sizes = [-(-count // 128) * 128 for count in counts]
    expert = np.full(R, -1)
    for e, (count, size) in enumerate(zip(counts, sizes, strict=True)):
        start = sum(sizes[:e])
        expert[start : start + count] = e
        assert start + size <= R
    return expert, sizes


def arguments(counts, dtype=jnp.bfloat16, seed=0, rows=R):
    """Rows with zeros where no expert's stand."""
    keys = jax.random.split(jax.random.key(seed), 5)
    draw = lambda key, *shape: jax.random.normal(key, shape, jnp.float32)
    real_R = jnp.asarray(expert_of_rows(counts)[0] >= 0)[:rows]
    weights_R = jnp.where(real_R, jax.random.uniform(keys[3], (R,))[:rows], 0)
    matrices = draw(keys[1], E, D, 2 * F).astype(dtype) / 16, draw(keys[2], E, F, D).astype(dtype) / 11
    there = lambda key: jnp.where(real_R[:, None], draw(key, R, D)[:rows], 0).astype(dtype)
    return there(keys[0]), weights_R, *matrices, there(keys[4])


@functools.cache
def in_recipe(name):
    """`expert_mlp` with both weights in the recipe."""

    def call(rows, weights, sizes, gate_up, down):
        quantised = (quantise_here(w, RECIPES[name], slices=1) for w in (gate_up, down))
        return quantised_expert_mlp(rows, weights, sizes, *quantised)

    return call


BLOCKS = in_recipe("fp8_block")


@functools.partial(quick_jit, static_argnums=0)
def gradients(function, rows, weights, sizes, gate_up, down, cotangent):
    call = lambda rows, weights, gate_up, down: function(rows, weights, sizes, gate_up, down)
    out, pull = jax.vjp(call, rows, weights, gate_up, down)
    return out, *pull(cotangent)


def run(function, counts, given=None, **options):
    rows, weights, gate_up, down, cotangent = given or arguments(counts, **options)
    sizes = jnp.array(expert_of_rows(counts)[1], jnp.int32)
    out = gradients(function, rows, weights, sizes, gate_up, down, cotangent)
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


def by_hand(counts, rows, weights, gate_up, down):
    """The forward pass on numbers rounded as the recipe says, sums in float64."""
    rows, weights = fp8(rows, (1, 128)), np.asarray(weights, np.float64)
    gate_up, down = (np.stack([fp8(w, (128, 128)) for w in matrices]) for matrices in (gate_up, down))
    out = np.zeros((len(rows), D))
    for row, e in enumerate(expert_of_rows(counts)[0]):
        if e < 0:
            continue
        both = bf16(rows[row] @ gate_up[e])
        gate, up = both[:F], both[F:]
        hidden = gate / (1 + np.exp(-gate)) * up * weights[row]
        out[row] = fp8(hidden[None], (1, 128))[0] @ down[e]
    return out


@pytest.mark.parametrize("name", PATTERNS)
def test_forward_is_that_of_the_rounded_numbers(name):
    rows, weights, gate_up, down, _ = arguments(PATTERNS[name])
    got = run(BLOCKS, PATTERNS[name])[0]
    want = by_hand(PATTERNS[name], rows, weights, gate_up, down)
    largest = np.abs(want).max(initial=1e-9)
    off = np.abs(got - want) / largest
    assert np.mean(off > 4e-3) < 1e-3, "a code of the hidden row may fall to its neighbour"
    assert off.max() < 3e-2
    np.testing.assert_array_equal(got[expert_of_rows(PATTERNS[name])[0] < 0], 0)


COSINES = dict(fp8_block=0.997, mxfp8=0.997, fp8_tensor=0.994, nvfp4=0.95)


@pytest.mark.parametrize("name", ["uneven", "all_to_one", "two"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_gradient_is_close_to_float32s(recipe, name):
    """What rounding to so few bits of mantissa leaves of the direction; and the size within 2 %, in 4 bits within 4."""
    counts = PATTERNS[name]
    given = arguments(counts, dtype=jnp.float32)
    theirs, ours = (run(function, counts, given) for function in (expert_mlp, in_recipe(recipe)))
    for what, got, want in zip(NAMES, ours, theirs, strict=True):
        cosine = (got * want).sum() / np.linalg.norm(got) / np.linalg.norm(want)
        assert cosine > COSINES[recipe], what
        assert abs(np.linalg.norm(got) / np.linalg.norm(want) - 1) < (0.04 if recipe == "nvfp4" else 0.02), what
        assert np.abs(got - want).max() > 0, "quantised indeed"


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_past_the_last_expert_spoil_nothing(recipe, name):
    counts, function = PATTERNS[name], in_recipe(recipe)
    sizes = expert_of_rows(counts)[1]
    rows, weights, gate_up, down, cotangent = arguments(counts)
    past = jnp.arange(R) >= sum(sizes)
    spoilt = lambda x: jnp.where(past.reshape(-1, *[1] * (x.ndim - 1)), jnp.nan, x)
    clean = run(function, counts)
    dirty = run(function, counts, (spoilt(rows), spoilt(weights), gate_up, down, cotangent))
    used = sum(sizes)
    for got, want in zip(dirty[:3], clean[:3], strict=True):
        np.testing.assert_array_equal(got[:used], want[:used])
    for got, want in zip(dirty[3:], clean[3:], strict=True):
        np.testing.assert_array_equal(got, want)
        assert np.isfinite(got).all()
    for e, count in enumerate(counts):
        assert count or not clean[3][e].any(), "an expert without rows has no gradient"


@pytest.mark.parametrize("recipe", ["fp8_block", "nvfp4"])
def test_rows_that_fill_no_block(recipe):
    """A buffer that ends inside a tile is filled with zeros."""
    counts = PATTERNS["uneven"]
    short, whole = run(in_recipe(recipe), counts, rows=300), run(in_recipe(recipe), counts)
    for got, want in zip(short, whole, strict=True):
        if recipe == "fp8_block":  # at random in the gradients of the other
            np.testing.assert_array_equal(got, want[: got.shape[0]])
    assert [x.shape for x in short][:3] == [(300, D), (300, D), (300,)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_checkpoint_can_keep_what_experts_keep_by_name(recipe):
    """Codes of both products' inputs along tokens; of 128-blocks the rows' codes, gate and up."""
    rows, weights, gate_up, down, cotangent = arguments(PATTERNS["uneven"])
    sizes = jnp.array(expert_of_rows(PATTERNS["uneven"])[1], jnp.int32)
    quantised = [quantise_here(w, RECIPES[recipe], slices=1) for w in (gate_up, down)]
    call = lambda rows, weights: quantised_expert_mlp(rows, weights, sizes, *quantised)
    policy = jax.checkpoint_policies.save_only_these_names(KEPT, ROWS, GATE_UP)

    def kept(function):
        out, pull = quick_jit(functools.partial(jax.vjp, function))(rows, weights)
        return [out, *quick_jit(pull)(cotangent)], jax.tree.leaves(pull)

    (plain, _), (again, leaves) = kept(call), kept(jax.checkpoint(call, policy=policy))
    jax.tree.map(np.testing.assert_array_equal, again[:2], plain[:2])
    np.testing.assert_allclose(again[2], plain[2], rtol=1e-5, atol=1e-5)  # a sum along F, fused with other things
    shapes = {x.shape for x in leaves}
    assert ({(R, D), (R, F)} if recipe == "fp8_block" else {(D, R), (F, R)}) <= shapes
