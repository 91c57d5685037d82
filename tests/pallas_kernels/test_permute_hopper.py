"""The kernels that move and sum rows, in the GPU interpreter with races on, bit for bit those of XLA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.combine import Tiles as CombineTiles
from pallas_kernels.combine import combine
from pallas_kernels.permute import Tiles, permute, quantize_and_permute, sort_rows
from pallas_kernels.permute.specs import PATTERNS, choices
from tests.pallas_kernels.interpreter import interpreted
from tests.pallas_kernels.test_quantize_hopper import same_bits
from tests.replicated import two_devices

T, TOP_K, E, D = 19, 3, 5, 1024  # tokens that no number of tokens a step divides
ROWS = 96


@functools.cache
def arrays(name: str, dtype, num_tokens=T, columns=D, num_rows=ROWS):
    """Tokens with one NaN; expert rows with NaN wherever no token stands; both maps."""
    chosen = choices(name, num_tokens, TOP_K, E)
    maps = sort_rows(jnp.asarray(chosen), E, num_rows, align=8)[:2]
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(num_tokens, columns)), dtype).at[2, 5].set(jnp.nan)
    rows = jnp.asarray(rng.normal(size=(num_rows, columns)), dtype).at[maps[1] < 0].set(jnp.nan)
    return x, rows, maps


def bits(x):
    return np.asarray(x).view(np.uint8)


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns(name):
    """Padding that isn't written, a row of NaN that reaches a neighbour, a wrong order of sums: each shows in the bits."""
    x, rows, maps = arrays(name, jnp.bfloat16)
    with interpreted():
        moved = permute(x, *maps, implementation="mosaic", tiles=Tiles(blocks=3))
        quantised = quantize_and_permute(x, *maps, implementation="mosaic", tiles=Tiles(blocks=3))
        sums = combine(rows, *maps, implementation="mosaic", tiles=CombineTiles(blocks=3))
    np.testing.assert_array_equal(bits(moved), bits(permute(x, *maps, implementation="xla")))
    same_bits(quantised, quantize_and_permute(x, *maps, implementation="xla"))
    np.testing.assert_array_equal(bits(sums), bits(combine(rows, *maps, implementation="xla")))
    assert np.isfinite(np.asarray(sums, np.float32)).all()


def test_experts_around_a_tile():
    """Experts of 127, 128 and 129 rows whose places start at multiples of 128."""
    chosen = jnp.asarray(choices("around_128", 128, TOP_K, E))
    maps = sort_rows(chosen, E, 640)[:2]
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(128, 256)), jnp.bfloat16)
    rows = jnp.asarray(rng.normal(size=(640, 256)), jnp.bfloat16).at[maps[1] < 0].set(jnp.nan)
    with interpreted():
        moved = permute(x, *maps, implementation="mosaic", tiles=Tiles(blocks=4))
        sums = combine(rows, *maps, implementation="mosaic", tiles=CombineTiles(blocks=4))
    np.testing.assert_array_equal(bits(moved), bits(permute(x, *maps, implementation="xla")))
    np.testing.assert_array_equal(bits(sums), bits(combine(rows, *maps, implementation="xla")))


def test_float32():
    x, rows, maps = arrays("some_elsewhere", jnp.float32)
    with interpreted():
        moved = permute(x, *maps, implementation="mosaic", tiles=Tiles(blocks=2))
        quantised = quantize_and_permute(x, *maps, "e5m2_1x128", implementation="mosaic", tiles=Tiles(blocks=2))
        sums = combine(rows, *maps, implementation="mosaic", tiles=CombineTiles(blocks=2))
    np.testing.assert_array_equal(bits(moved), bits(permute(x, *maps, implementation="xla")))
    same_bits(quantised, quantize_and_permute(x, *maps, "e5m2_1x128", implementation="xla"))
    np.testing.assert_array_equal(bits(sums), bits(combine(rows, *maps, implementation="xla")))


@pytest.mark.parametrize("tiles", [Tiles(blocks=1, tokens=1), Tiles(blocks=4, tokens=3), Tiles(blocks=64)])
def test_every_cut_gives_the_same_bits(tiles):
    """One block that does everything; a block a step; several result rows to look after for each token."""
    x, _, maps = arrays("trailing_empty", jnp.bfloat16, num_tokens=10, num_rows=136)
    with interpreted():
        moved = permute(x, *maps, implementation="mosaic", tiles=tiles)
        quantised = quantize_and_permute(x, *maps, implementation="mosaic", tiles=tiles)
    np.testing.assert_array_equal(bits(moved), bits(permute(x, *maps, implementation="xla")))
    same_bits(quantised, quantize_and_permute(x, *maps, implementation="xla"))


@pytest.mark.parametrize("columns", [256, 2816])
def test_widths_of_combine(columns):
    _, rows, maps = arrays("some_elsewhere", jnp.bfloat16, num_tokens=9, columns=columns)
    with interpreted():
        found = [
            combine(rows, *maps, implementation="mosaic", tiles=CombineTiles(blocks=2, columns=c)) for c in (256, 2048)
        ]
    for sums in found:
        np.testing.assert_array_equal(bits(sums), bits(combine(rows, *maps, implementation="xla")))


@pytest.mark.parametrize("columns", [64, 2880])
def test_widths_of_permute(columns):
    x, _, maps = arrays("some_elsewhere", jnp.bfloat16, num_tokens=9, columns=columns)
    with interpreted():
        moved = permute(x, *maps, implementation="mosaic", tiles=Tiles(blocks=2))
    np.testing.assert_array_equal(bits(moved), bits(permute(x, *maps, implementation="xla")))


def test_gradients_run_on_the_kernels():
    """Each is the other's gradient; where the other kernel can't take such rows, XLA does, with the same bits."""
    x, rows, maps = arrays("some_elsewhere", jnp.bfloat16, num_tokens=9)
    rows = jnp.nan_to_num(rows)
    with interpreted():
        _, pull = jax.vjp(lambda x: permute(x, *maps, implementation="mosaic"), jnp.nan_to_num(x))
        _, pull_back = jax.vjp(lambda r: combine(r, *maps, implementation="mosaic"), rows)
        assert "smem" in str(jax.make_jaxpr(pull)(rows))
        assert "smem" in str(jax.make_jaxpr(pull_back)(x))
        dx, drows = pull(rows)[0], pull_back(x)[0]
        narrow = x[:, :192]
        _, pull_narrow = jax.vjp(lambda x: permute(x, *maps, implementation="mosaic"), narrow)
        dnarrow = pull_narrow(rows[:, :192])[0]
    np.testing.assert_array_equal(bits(dx), bits(combine(rows, *maps, implementation="xla")))
    np.testing.assert_array_equal(bits(drows), bits(permute(x, *maps, implementation="xla")))
    np.testing.assert_array_equal(bits(dnarrow), bits(combine(rows[:, :192], *maps, implementation="xla")))


def test_no_program_is_compiled_for_another_pattern():
    x = arrays("even", jnp.bfloat16, num_tokens=9)[0]
    with interpreted():
        run = jax.jit(lambda x, *maps: quantize_and_permute(x, *maps, implementation="mosaic", tiles=Tiles(blocks=2)))
        for name in ("even", "one_row"):
            maps = arrays(name, jnp.bfloat16, num_tokens=9)[2]
            same_bits(run(x, *maps), quantize_and_permute(x, *maps, implementation="xla"))
        assert run._cache_size() == 1


def test_two_devices():
    x, _, _ = arrays("even", jnp.bfloat16, num_tokens=9, num_rows=64)
    w = jnp.asarray(np.random.default_rng(3).integers(1, 4, (1, D)), jnp.bfloat16)
    both = [
        sort_rows(jnp.asarray(choices(name, 9, TOP_K, E)), E, 64, align=8)[:2] for name in ("even", "some_elsewhere")
    ]
    maps = tuple(jnp.concatenate(pair) for pair in zip(*both, strict=True))
    x, mesh = jnp.nan_to_num(jnp.concatenate([x, x[::-1]])), Mesh(np.array(jax.devices()[:2]), ("x",))

    def loss(w, x, maps, implementation):
        call = dict(implementation=implementation)
        moved = permute(x * w, *maps, **call)
        return (combine(moved, *maps, **call) * x).astype(jnp.float32).sum()

    def local(w, x, *maps):
        return jax.grad(lambda w: jax.lax.psum(loss(w, x, maps, "mosaic"), "x"))(w)

    run = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("x"), P("x"), P("x")), out_specs=P())
    with two_devices.interpreted():
        got = jax.jit(run)(w, x, *maps)
    parts = [jax.grad(loss)(w, x[9 * i :][:9], both[i], "xla") for i in (0, 1)]
    np.testing.assert_allclose(
        np.asarray(got, np.float32), np.asarray(parts[0] + parts[1], np.float32), rtol=2e-2, atol=0.5
    )
    assert np.abs(np.asarray(got, np.float32)).max() > 10


def test_tiles_are_checked():
    with pytest.raises(ValueError, match="blocks=0"):
        Tiles(blocks=0)
    with pytest.raises(ValueError, match="columns=100"):
        CombineTiles(columns=100)
