"""The quantising kernels in the GPU interpreter, races on, bit for bit those of XLA."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.quantize import FORMATS, Quantised, Tiles, quantize, quantize_both
from tests.pallas_kernels.interpreter import interpreted
from tests.replicated import two_devices

FEW = Tiles(blocks=2, stages=2)


def values(rows: int, columns: int, dtype=jnp.bfloat16, seed=0):
    """Tiles of every kind: normal, wide, zero, tiny, huge; one infinity and one NaN."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, columns)) * 2.0 ** rng.integers(-20, 21, (rows, 1))
    x[3], x[5], x[7, :128] = 0, x[5] * 1e-30, x[7, :128] * 1e30
    x[9, 5], x[11, 100], x[rows - 1, columns - 1] = np.inf, np.nan, -np.inf
    return jnp.asarray(x, dtype)


def same_bits(a: Quantised, b: Quantised) -> None:
    for got, want in zip(jax.device_get(a[:2]), jax.device_get(b[:2]), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


@pytest.mark.parametrize(
    ("name", "power_of_two", "dtype"),
    [
        ("e4m3_1x128", True, jnp.bfloat16),
        ("e4m3_1x128", False, jnp.bfloat16),
        ("e5m2_1x128", True, jnp.float32),
        ("e4m3_128x128", True, jnp.float32),
        ("e4m3_128x128", False, jnp.float32),
        ("e5m2_128x128", False, jnp.bfloat16),
    ],
)
def test_equals_xla(name, power_of_two, dtype):
    """Six tiles, twelve of half the height, for two blocks of two stages: more steps than stages."""
    format, x = dataclasses.replace(FORMATS[name], power_of_two=power_of_two), values(256, 384, dtype)
    with interpreted():
        rows, columns = quantize_both(x, format, implementation="mosaic", tiles=FEW)
        alone = quantize(x, format, implementation="mosaic", tiles=FEW)
        turned = quantize(x, format, transpose=True, implementation="mosaic", tiles=FEW)
    for got in (rows, alone):
        same_bits(got, quantize(x, format, implementation="xla"))
    for got in (columns, turned):
        same_bits(got, quantize(x, format, transpose=True, implementation="xla"))


@pytest.mark.parametrize("tiles", [Tiles(blocks=1, stages=1), Tiles(blocks=5, stages=3), Tiles(blocks=7, width=1)])
def test_every_cut_gives_the_same_bits(tiles):
    """Blocks with one tile and with several, one stage and three."""
    x = values(128, 512)
    with interpreted():
        found = quantize_both(x, "e4m3_1x128", implementation="mosaic", tiles=tiles)
    for got, want in zip(found, quantize_both(x, "e4m3_1x128", implementation="xla"), strict=True):
        same_bits(got, want)


@pytest.mark.parametrize("rows", [1, 127, 128, 129])
def test_any_number_of_rows(rows):
    x = values(256, 128)[:rows]
    with interpreted():
        found = quantize(x, "e4m3_1x128", implementation="mosaic", tiles=FEW)
    same_bits(found, quantize(x, "e4m3_1x128", implementation="xla"))


@pytest.mark.parametrize("name", ["e4m3_1x128", "e4m3_128x128"])
def test_arrays_below_each_other(name):
    x = values(512, 256, jnp.float32).reshape(2, 256, 256)
    with interpreted():
        found = quantize_both(x, name, implementation="mosaic", tiles=FEW)
    for got, want in zip(found, quantize_both(x, name, implementation="xla"), strict=True):
        same_bits(got, want)


def test_two_devices():
    """Results vary where the input does, and so do those of a replicated weight, which every device quantises alike."""
    x, w = values(256, 128), values(128, 128, jnp.float32, seed=1)
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))

    def local(x, w):
        return quantize(x, "e4m3_1x128", implementation="mosaic", tiles=FEW), quantize(
            w, "e4m3_128x128", implementation="mosaic", tiles=FEW
        )

    run = jax.shard_map(local, mesh=mesh, in_specs=(P("x"), P()), out_specs=(P("x"), P()))
    with two_devices.interpreted():
        mine, shared = jax.jit(run)(x, w)
    same_bits(mine, quantize(x, "e4m3_1x128", implementation="xla"))
    same_bits(shared, quantize(w, "e4m3_128x128", implementation="xla"))
    wrong = jax.shard_map(local, mesh=mesh, in_specs=(P("x"), P()), out_specs=(P(), P()))
    with two_devices.interpreted(), pytest.raises(ValueError, match="out_specs"):
        jax.eval_shape(wrong, x, w)


@pytest.mark.parametrize(
    ("shape", "dtype", "format", "message"),
    [
        ((128, 128), jnp.float16, "e4m3_1x128", "reads bfloat16 and float32, not float16"),
        ((128, 128), jnp.float32, "mx_e4m3", "not for Format"),
        ((0, 128), jnp.float32, "e4m3_1x128", "a row at least"),
    ],
)
def test_what_the_kernel_does_not_do_is_told_or_passed_over(shape, dtype, format, message):
    x = jnp.ones(shape, dtype)
    with interpreted():
        with pytest.raises(NotImplementedError, match=message):
            quantize(x, format, implementation="mosaic")
        same_bits(quantize(x, format), quantize(x, format, implementation="xla"))


def test_tiles_are_checked():
    with pytest.raises(ValueError, match="width=0"):
        Tiles(width=0)
