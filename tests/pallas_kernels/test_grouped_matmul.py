"""The grouped matmul against float64, group by group, and its promises about bits, padding and types."""

import functools
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.grouped_matmul import Tiles, check_sizes, grouped_matmul, implementations, xla
from pallas_kernels.grouped_matmul.specs import PATTERNS, PRODUCTION, SMALL, Spec, pattern

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "grouped_matmul.py"


def arrays(spec: Spec, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    return draw(spec.rows, spec.inner), draw(spec.groups, spec.inner, spec.outer), draw(spec.rows, spec.outer)


def oracle(lhs, rhs, sizes, g):
    """Output and both gradients in float64, one group at a time."""
    lhs, rhs, g = (np.asarray(x, np.float64) for x in (lhs, rhs, g))
    out, dlhs, drhs = np.zeros(g.shape), np.zeros(lhs.shape), np.zeros(rhs.shape)
    start = 0
    for e, size in enumerate(sizes):
        rows = slice(start, start + size)
        out[rows], dlhs[rows], drhs[e] = lhs[rows] @ rhs[e], g[rows] @ rhs[e].T, lhs[rows].T @ g[rows]
        start += size
    return out, dlhs, drhs


@functools.partial(jax.jit, static_argnames=("implementation", "tiles"))
def all_three(lhs, rhs, sizes, g, implementation="xla", tiles=None):
    out, pull = jax.vjp(lambda a, b: grouped_matmul(a, b, sizes, implementation=implementation, tiles=tiles), lhs, rhs)
    return out, *pull(g)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", PATTERNS)
def test_equals_float64(name, dtype, implementation):
    sizes, (lhs, rhs, g) = pattern(name, SMALL), arrays(SMALL, dtype)
    tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
    for got, want in zip(all_three(lhs, rhs, sizes, g, implementation), oracle(lhs, rhs, sizes, g), strict=True):
        assert got.dtype == dtype
        np.testing.assert_allclose(np.asarray(got, np.float64), want, atol=tolerance * max(np.abs(want).max(), 1.0))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["holes", "one_row", "trailing_empty", "none"])
def test_what_lies_past_the_groups_neither_shows_nor_learns(name, poison):
    sizes, (lhs, rhs, g) = pattern(name, SMALL), arrays(SMALL)
    used = int(sizes.sum())
    clean = all_three(lhs, rhs, sizes, g)
    dirty = all_three(lhs.at[used:].set(poison), rhs, sizes, g.at[used:].set(poison))
    for got, want in zip(dirty, clean, strict=True):
        np.testing.assert_array_equal(got, want)
    assert not np.asarray(dirty[0][used:]).any()
    assert not np.asarray(dirty[1][used:]).any()
    assert not np.asarray(dirty[2])[sizes == 0].any()  # a group without rows


@pytest.mark.parametrize("name", ["uneven", "around_128", "holes"])
def test_every_tile_is_right(name):
    sizes, (lhs, rhs, g) = pattern(name, SMALL), arrays(SMALL)
    first = all_three(lhs, rhs, sizes, g)
    for rows in (1, 7, 32, 128, 300, 1000):
        for got, want in zip(all_three(lhs, rhs, sizes, g, tiles=Tiles(rows=rows)), first, strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
            assert not np.asarray(got)[np.asarray(want) == 0].any()


def test_a_row_does_not_depend_on_the_buffer_nor_its_neighbours():
    lhs, rhs, _ = arrays(SMALL)
    multiply = jax.jit(grouped_matmul)
    sizes = np.array([10, 20, 0, 30, 40, 50], np.int32)
    out = multiply(lhs, rhs, sizes)
    alone = multiply(lhs[30:60], rhs, np.array([0, 0, 0, 30, 0, 0], np.int32))
    np.testing.assert_array_equal(out[30:60], alone)
    longer = multiply(jnp.concatenate([lhs, lhs]), rhs, sizes)
    np.testing.assert_array_equal(longer[:150], out[:150])


def test_the_static_list_of_other_back_ends_equals_the_loops_of_cpus(monkeypatch):
    sizes, (lhs, rhs, g) = pattern("uneven", SMALL), arrays(SMALL)
    loops = all_three(lhs, rhs, sizes, g)
    monkeypatch.setattr(xla.lax, "platform_dependent", lambda *xs, cpu, default: default(*xs))
    static = jax.vjp(lambda a, b: xla.grouped_matmul(a, b, sizes, 64, jnp.dtype(jnp.float32)), lhs, rhs)
    np.testing.assert_array_equal(static[0], loops[0])
    dlhs, drhs = static[1](g)
    np.testing.assert_array_equal(dlhs, loops[1])
    np.testing.assert_allclose(drhs, loops[2], atol=1e-4)


def test_no_rows_and_fewer_rows_than_a_tile():
    _, rhs, _ = arrays(SMALL)
    none = all_three(jnp.zeros((0, 40)), rhs, np.zeros(6, np.int32), jnp.zeros((0, 24)))
    assert none[0].shape == (0, 24)
    assert not np.asarray(none[2]).any()
    lhs, _, g = (x[:3] for x in arrays(SMALL))
    sizes = np.array([1, 0, 1, 0, 0, 1], np.int32)
    for got, want in zip(all_three(lhs, rhs, sizes, g), oracle(lhs, rhs, sizes, g), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4)


def test_bfloat16_sums_in_float32_and_returns_what_is_preferred():
    spec = Spec(rows=8, groups=1, inner=4096, outer=8)
    lhs, rhs = jnp.full((8, 4096), 1.0, jnp.bfloat16), jnp.full((1, 4096, 8), 1.0, jnp.bfloat16)
    out = grouped_matmul(lhs, rhs, jnp.array([8]), preferred_element_type=jnp.float32)
    assert out.dtype == jnp.float32
    assert float(out[0, 0]) == spec.inner  # a bfloat16 sum of ones stops at 256


def test_gradients_of_replicated_weights_are_exact_on_two_devices():
    sizes = np.array([[40, 0, 30, 10, 5, 15], [0, 100, 0, 0, 20, 30]], np.int32)
    lhs, rhs, g = arrays(SMALL)
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))

    def local(lhs, rhs, sizes, g):
        out, pull = jax.vjp(lambda a, b: grouped_matmul(a, b, sizes[0]), lhs, rhs)
        return out, *pull(g)

    run = jax.shard_map(
        local, mesh=mesh, in_specs=(P("x"), P(), P("x"), P("x")), out_specs=(P("x"), P("x"), P()), check_vma=True
    )
    out, dlhs, drhs = jax.jit(run)(lhs, rhs, sizes, g)
    parts = [oracle(lhs[i * 150 :][:150], rhs, sizes[i], g[i * 150 :][:150]) for i in (0, 1)]
    np.testing.assert_allclose(out, np.concatenate([p[0] for p in parts]), atol=1e-4)
    np.testing.assert_allclose(dlhs, np.concatenate([p[1] for p in parts]), atol=1e-4)
    np.testing.assert_allclose(drhs, parts[0][2] + parts[1][2], atol=1e-3)


def test_lowered_for_cuda_at_production_size_it_stays_small_and_never_dense():
    s = PRODUCTION
    shapes = [((s.rows, s.inner), jnp.bfloat16), ((s.groups, s.inner, s.outer), jnp.bfloat16), ((s.groups,), jnp.int32)]
    structs = [jax.ShapeDtypeStruct(*x) for x in shapes]
    loss = lambda lhs, rhs, sizes: grouped_matmul(lhs, rhs, sizes, implementation="xla").astype(jnp.float32).sum()
    text = jax.jit(jax.grad(loss, (0, 1))).trace(*structs).lower(lowering_platforms=("cuda",)).as_text()
    assert len(text) < 100_000
    assert f"tensor<{s.groups}x{s.rows}x" not in text  # rows times all groups
    tiles = s.rows // Tiles().rows + s.groups
    assert f"tensor<{tiles}x{s.inner}x{s.outer}x" not in text  # a matrix for every tile
    bounds = re.findall(r"stablehlo\.compare\s+LT, %iterArg\w*, %(\w+)", text)
    assert bounds, "the loops over tiles"
    constants = set(re.findall(r"%(\w+) = stablehlo\.constant dense<\d+> : tensor<i32>", text))
    assert set(bounds) <= constants  # every loop's length is known when the program is compiled


@pytest.mark.parametrize(
    "lhs, rhs, sizes, message",
    [
        ((4, 3), (2, 5, 6), (2,), r"\(4, 3\) and \(2, 5, 6\)"),
        ((4, 3, 1), (2, 3, 6), (2,), r"\(4, 3, 1\)"),
        ((4, 3), (2, 3, 6), (3,), r"integers \[2\], got int32\[3\]"),
    ],
)
def test_shapes_that_do_not_fit_are_named(lhs, rhs, sizes, message):
    with pytest.raises(ValueError, match=message):
        grouped_matmul(jnp.zeros(lhs), jnp.zeros(rhs), jnp.zeros(sizes, jnp.int32))


def test_dtypes_and_implementations_that_do_not_fit_are_named():
    lhs, rhs, _ = arrays(SMALL)
    sizes = jnp.zeros((6,), jnp.int32)
    with pytest.raises(ValueError, match="float32 and bfloat16"):
        grouped_matmul(lhs, rhs.astype(jnp.bfloat16), sizes)
    with pytest.raises(ValueError, match="got float32"):
        grouped_matmul(lhs, rhs, sizes.astype(jnp.float32))
    with pytest.raises(ValueError, match="choose one of"):
        grouped_matmul(lhs, rhs, sizes, implementation="cutlass")
    with pytest.raises(NotImplementedError, match="Hopper GPUs"):
        grouped_matmul(lhs, rhs, sizes, implementation="mosaic")
    with pytest.raises(ValueError, match="rows=0"):
        Tiles(rows=0)
    assert implementations()["xla"] == ""


def test_sizes_are_checked_outside_jit():
    check_sizes(jnp.array([3, 4]), 7)
    with pytest.raises(ValueError, match="at most 6 rows"):
        check_sizes(jnp.array([3, 4]), 6)
    with pytest.raises(ValueError, match="not be negative"):
        check_sizes(jnp.array([-1, 4]), 6)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 60), min_size=6, max_size=6))
def test_any_sizes(sizes):
    sizes = np.array(sizes, np.int32)
    sizes = np.minimum(sizes, np.maximum(SMALL.rows - (np.cumsum(sizes) - sizes), 0)).astype(np.int32)
    lhs, rhs, g = arrays(SMALL)
    for got, want in zip(all_three(lhs, rhs, sizes, g), oracle(lhs, rhs, sizes, g), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-4)


@pytest.mark.parametrize("sizes", [[70, 0, 58, 0, 0, 0], [64, 64, 0, 0, 0, 0], [1, 100, 27, 0, 0, 0]], ids=str)
def test_bits_do_not_depend_on_how_far_the_array_reaches(sizes):
    """A buffer that ends with the last row, inside its last tile, against one with room behind: outputs and gradients."""
    keys = jax.random.split(jax.random.key(5), 3)
    x, w, g = (jax.random.normal(k, s) for k, s in zip(keys, ((128, 32), (6, 32, 24), (128, 24)), strict=True))
    sizes, longer = jnp.array(sizes, jnp.int32), lambda a: jnp.pad(a, ((0, 90), (0, 0)))
    y, dx, dw = all_three(x, w, sizes, g)
    far_y, far_dx, far_dw = all_three(longer(x), w, sizes, longer(g))
    np.testing.assert_array_equal(y, far_y[:128])
    np.testing.assert_array_equal(dx, far_dx[:128])
    np.testing.assert_array_equal(dw, far_dw)


def test_the_benchmark_runs():
    done = subprocess.run([sys.executable, BENCHMARK, "--quick"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "ragged_dot" in done.stdout
