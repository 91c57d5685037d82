"""Permutation and combination: values against NumPy, index maps against a loop, gradients, and the kernels' own bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from moex.dispatch import local, worst_case
from pallas_kernels.combine import combine
from pallas_kernels.combine import mosaic_sm90 as combine_kernel
from pallas_kernels.permute import block_table, permute, quantize_and_permute, sort_rows
from pallas_kernels.permute import mosaic_sm90 as permute_kernel
from pallas_kernels.permute.specs import PATTERNS, choices
from pallas_kernels.quantize import FORMATS, quantize

T, TOP_K, E, D = 150, 3, 6, 128
ROWS = 512 + 5 * 128


def maps_of(name, num_tokens=T, top_k=TOP_K, num_experts=E, num_rows=ROWS, align=128):
    chosen = choices(name, num_tokens, top_k, num_experts)
    return chosen, jax.device_get(sort_rows(jnp.asarray(chosen), num_experts, num_rows, align=align))


def by_loop(chosen, num_experts, num_rows, align):
    """The maps by a plain walk: expert after expert, token after token, choice after choice."""
    row_of_pair = np.full(chosen.shape, -1, np.int32)
    token_of_row = np.full(num_rows, -1, np.int32)
    row, starts, counts, sizes, lost = 0, [], [], [], 0
    for expert in range(num_experts):
        first = row
        for token, choice in np.argwhere(chosen == expert):
            if row < num_rows:
                row_of_pair[token, choice], token_of_row[row] = row, token
            else:
                lost += 1
            row += 1
        counts.append(max(min(row, num_rows) - min(first, num_rows), 0))
        row = -(-row // align) * align
        starts.append(min(first, num_rows))
        sizes.append(max(min(row, num_rows) - min(first, num_rows), 0))
    return row_of_pair, token_of_row, starts, counts, sizes, lost


def assert_maps(found, want):
    row_of_pair, token_of_row, starts, counts, sizes, lost = want
    np.testing.assert_array_equal(found.row_of_pair_Tk, row_of_pair)
    np.testing.assert_array_equal(found.token_of_row_R, token_of_row)
    assert found.starts_E.tolist() == starts
    assert found.counts_E.tolist() == counts
    assert found.sizes_E.tolist() == sizes
    assert found.overflow == lost
    held = token_of_row >= 0
    top_k = row_of_pair.shape[1]
    np.testing.assert_array_equal(found.pair_of_row_R[held] // top_k, token_of_row[held])
    np.testing.assert_array_equal(row_of_pair.reshape(-1)[found.pair_of_row_R[held]], np.flatnonzero(held))
    assert (found.pair_of_row_R[~held] == -1).all()


@pytest.mark.parametrize("name", PATTERNS)
def test_maps_equal_a_plain_walk(name):
    chosen, found = maps_of(name)
    assert_maps(found, by_loop(chosen, E, ROWS, 128))


@pytest.mark.parametrize("rows", [0, 64, 128, 256])
def test_too_small_a_buffer_is_counted_and_never_left(rows):
    chosen, found = maps_of("even", num_rows=rows, align=64)
    assert_maps(found, by_loop(chosen, E, rows, 64))
    assert found.overflow > 0


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def sorted_rows(chosen, num_experts, num_rows, align):
    rows = sort_rows(chosen, num_experts, num_rows, align=align)
    return rows, block_table(rows, align)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.permutations(range(-1, 6)), min_size=8, max_size=8), st.booleans())
def test_maps_of_any_choices(lists, tight):
    chosen = np.array([c[:3] for c in lists], np.int32)
    num_rows = 16 if tight else 48
    found, (expert_b, real_b) = jax.device_get(sorted_rows(chosen, 5, num_rows, 4))
    assert_maps(found, by_loop(chosen, 5, num_rows, 4))
    for b in range(num_rows // 4):
        inside = found.token_of_row_R[4 * b : 4 * b + 4] >= 0
        assert real_b[b] == inside.sum()
        if inside.any():
            token, choice = divmod(int(found.pair_of_row_R[4 * b]), 3)
            assert chosen[token, choice] == expert_b[b]


def test_maps_are_those_of_the_local_transport():
    chosen = choices("some_elsewhere", T, TOP_K, E)
    budget = worst_case(T, TOP_K, 1, E, 128)
    plan = local.plan(jnp.asarray(chosen), E, budget)
    found = sort_rows(jnp.asarray(chosen), E, budget.rows)
    for name in ("row_of_pair_Tk", "token_of_row_R", "pair_of_row_R"):
        np.testing.assert_array_equal(getattr(found, name), getattr(plan, name))
    np.testing.assert_array_equal(found.sizes_E, plan.sizes_e)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(T, D)), jnp.float32)
    rows = permute(x, found.row_of_pair_Tk, found.token_of_row_R)
    np.testing.assert_array_equal(rows, local.send(x, plan))
    back = combine(rows, found.row_of_pair_Tk, found.token_of_row_R)
    np.testing.assert_array_equal(back, local.combine(rows, plan))


def permuted(x, token_of_row, empty=0):
    return np.where((token_of_row >= 0)[:, None], x[np.maximum(token_of_row, 0)], empty)


def summed(rows, row_of_pair):
    """In float32, one choice after the other."""
    total = np.zeros((row_of_pair.shape[0], rows.shape[1]), np.float32)
    for row in row_of_pair.T:
        total = total + np.where((row >= 0)[:, None], rows[np.maximum(row, 0)], np.float32(0))
    return total


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", PATTERNS)
def test_values(name, dtype, implementation):
    _, m = maps_of(name)
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(T, D)), dtype)
    rows = jnp.asarray(rng.normal(size=(ROWS, D)), dtype).at[m.token_of_row_R < 0].set(jnp.nan)
    maps = m.row_of_pair_Tk, m.token_of_row_R
    got = permute(x, *maps, implementation=implementation)
    assert got.dtype == dtype
    np.testing.assert_array_equal(np.asarray(got, np.float32), permuted(np.asarray(x, np.float32), m.token_of_row_R))
    sums = combine(rows, *maps, implementation=implementation)
    want = jnp.asarray(summed(np.asarray(rows, np.float32), m.row_of_pair_Tk)).astype(dtype)
    np.testing.assert_array_equal(np.asarray(sums, np.float32), np.asarray(want, np.float32))


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("name", ["some_elsewhere", "none_here", "one_row"])
@pytest.mark.parametrize("format", ["e4m3_1x128", "e5m2_1x128"])
def test_quantised_on_the_way(format, name, implementation):
    _, m = maps_of(name)
    x = jnp.asarray(np.random.default_rng(2).normal(size=(T, D)), jnp.bfloat16).at[3, 4].set(jnp.nan)
    found = quantize_and_permute(x, m.row_of_pair_Tk, m.token_of_row_R, format, implementation=implementation)
    once = jax.device_get(quantize(x, format, implementation="reference"))
    np.testing.assert_array_equal(
        np.asarray(found.codes).view(np.uint8), permuted(once.codes.view(np.uint8), m.token_of_row_R)
    )
    np.testing.assert_array_equal(found.scales, permuted(once.scales, m.token_of_row_R, 1))


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_each_is_the_gradient_of_the_other(implementation):
    _, m = maps_of("some_elsewhere")
    maps, rng = (m.row_of_pair_Tk, m.token_of_row_R), np.random.default_rng(3)
    x = jnp.asarray(rng.normal(size=(T, D)), jnp.float32)
    rows = jnp.asarray(rng.normal(size=(ROWS, D)), jnp.float32)
    into = functools.partial(permute, implementation=implementation)
    back = functools.partial(combine, implementation=implementation)
    out, pull = jax.vjp(lambda x: into(x, *maps), x)
    np.testing.assert_array_equal(pull(rows)[0], summed(np.asarray(rows), m.row_of_pair_Tk))
    sums, pull = jax.vjp(lambda r: back(r, *maps), rows)
    np.testing.assert_array_equal(pull(x)[0], permuted(np.asarray(x), m.token_of_row_R))
    # <P x, r> = <x, C r>: the two are transposes, and autodiff of the naive forms agrees.
    np.testing.assert_allclose((out * rows).sum(), (x * sums).sum(), rtol=1e-4)
    naive = lambda x: jnp.concatenate([x, jnp.zeros((1, D))])[m.token_of_row_R]
    np.testing.assert_allclose(
        jax.vjp(lambda x: into(x, *maps), x)[1](rows)[0], jax.vjp(naive, x)[1](rows)[0], atol=1e-5
    )


def test_identity_experts_give_identity():
    _, m = maps_of("even")
    x = jnp.asarray(np.random.default_rng(4).integers(-8, 8, (T, D)), jnp.float32)
    maps = m.row_of_pair_Tk, m.token_of_row_R
    np.testing.assert_array_equal(combine(permute(x, *maps), *maps), TOP_K * x)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_dropped_slots_are_zero_and_the_others_untouched(implementation):
    """Three of sixteen slots go nowhere; NaN stands in every row that holds no token."""
    slots = np.arange(16, dtype=np.int32).reshape(8, 2)
    slots[1, 0] = slots[4, 1] = slots[7, 0] = -1
    token_of_row = np.full(24, -1, np.int32)
    token_of_row[slots[slots >= 0]] = np.argwhere(slots >= 0)[:, 0]
    rows = jnp.full((24, D), jnp.nan).at[slots[slots >= 0]].set(2.0)
    sums = np.asarray(combine(rows, slots, token_of_row, implementation=implementation))
    np.testing.assert_array_equal(sums, np.where((slots >= 0).sum(1) == 1, 2.0, 4.0)[:, None] + np.zeros((8, D)))
    moved = np.asarray(permute(jnp.ones((8, D)), slots, token_of_row, implementation=implementation))
    assert moved[slots[slots >= 0]].all()
    assert not moved[token_of_row < 0].any()


def test_no_program_is_compiled_for_another_pattern():
    run = jax.jit(lambda x, chosen: quantize_and_permute(x, *sort_rows(chosen, E, ROWS)[:2]))
    x = jnp.ones((T, D), jnp.bfloat16)
    for name in PATTERNS:
        run(x, jnp.asarray(choices(name, T, TOP_K, E)))
    assert run._cache_size() == 1


def test_rows_beyond_two_to_the_31st_value_keep_their_places():
    """The kernels address rows by lines, which stay small where an offset in values would wrap."""
    row, width = 299_594, 7168
    assert row * width == 2_147_489_792 > 2**31
    line = permute_kernel.line_width(width)
    assert (row + 1) * (width // line) < 2**31
    lines_of_rows = 1_048_576 * (16384 // 128)  # the largest buffer and width that kernels take
    assert lines_of_rows < 2**31


def test_gradients_on_two_devices_are_those_of_one():
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    chosen = jnp.asarray(choices("some_elsewhere", 2 * T, TOP_K, E))
    x = jnp.asarray(np.random.default_rng(5).integers(-4, 5, (2 * T, D)), jnp.float32)
    w = jnp.asarray(np.random.default_rng(6).integers(-4, 5, (1, D)), jnp.float32)

    def local_loss(w, x, chosen):
        maps = sort_rows(chosen, E, ROWS)[:2]
        return (combine(permute(x * w, *maps) ** 2, *maps) * x).sum()

    def split(w, x, chosen):
        return jax.grad(lambda w: jax.lax.psum(local_loss(w, x, chosen), "x"))(w)

    got = jax.jit(jax.shard_map(split, mesh=mesh, in_specs=(P(), P("x"), P("x")), out_specs=P()))(w, x, chosen)
    halves = [jax.grad(local_loss)(w, x[i:][:T], chosen[i:][:T]) for i in (0, T)]
    np.testing.assert_array_equal(got, halves[0] + halves[1])
    assert np.abs(got).max() > 0


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_no_tokens_and_no_choices(implementation):
    none = jnp.zeros((0, 2), jnp.int32)
    rows = permute(jnp.zeros((0, D)), none, jnp.full((8,), -1, jnp.int32), implementation=implementation)
    assert rows.shape == (8, D)
    assert not np.asarray(rows).any()
    assert combine(jnp.ones((8, D)), none, jnp.full((8,), -1, jnp.int32), implementation=implementation).shape == (0, D)
    nobody = combine(
        jnp.ones((8, D)), jnp.zeros((4, 0), jnp.int32), jnp.full((8,), -1, jnp.int32), implementation=implementation
    )
    assert nobody.shape == (4, D)
    assert not np.asarray(nobody).any()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x, p, t: permute(x[:3], p, t), ValueError, r"got shapes \(\(3, 128\)"),
        (lambda x, p, t: permute(x, p.astype(jnp.float32), t), ValueError, "row_of_pair must be int32, got float32"),
        (combine, ValueError, "combine takes rows"),
        (lambda x, p, t: quantize_and_permute(x, p, t, "e4m3_128x128"), ValueError, "tiles of one row"),
        (lambda x, p, t: quantize_and_permute(x, p, t, "mx_e4m3"), ValueError, "tiles of one row"),
        (lambda x, p, t: quantize_and_permute(x[:, :100], p, t), ValueError, "don't fill"),
        (lambda x, p, t: permute(x, p, t, implementation="mosaic"), NotImplementedError, "for Hopper GPUs"),
        (lambda x, p, t: sort_rows(p, 4, 100), ValueError, "num_rows=100 must be a multiple of align=128"),
        (lambda x, p, t: block_table(sort_rows(p, 4, 256), 100), ValueError, "don't fill 256"),
    ],
)
def test_what_does_not_fit_is_named(call, error, message):
    _, m = maps_of("even")
    with pytest.raises(error, match=message):
        call(jnp.zeros((T, D)), jnp.asarray(m.row_of_pair_Tk), jnp.asarray(m.token_of_row_R))


def test_what_the_kernels_do_not_do_is_told():
    block = FORMATS["e4m3_1x128"]
    assert "multiples of 64" in permute_kernel.why_not((8, 100), jnp.bfloat16, None)
    assert "multiples of 1024" in permute_kernel.why_not((8, 1536), jnp.bfloat16, block)
    assert "not float16" in permute_kernel.why_not((8, 1024), jnp.float16, block)
    assert "needs a row" in permute_kernel.why_not((0, 1024), jnp.bfloat16, None)
    assert "multiples of 256" in combine_kernel.why_not((8, 128), jnp.bfloat16, 2)
    assert "32 choices" in combine_kernel.why_not((8, 256), jnp.bfloat16, 33)
    assert (
        permute_kernel.why_not((8, 2880), jnp.bfloat16, None) == combine_kernel.why_not((8, 256), jnp.bfloat16, 8) == ""
    )
