"""Quantisation against NumPy written from the definitions, and the promises about edges, bits and neighbours."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.quantize import (
    FORMATS,
    Format,
    Quantised,
    casts,
    dequantize,
    hadamard,
    quantize,
    quantize_both,
    rounding,
    scales,
    transposed,
)
from pallas_kernels.quantize.formats import LARGEST
from tests.pallas_kernels import quantize_oracle as oracle

R, K = 128, 256
SMALLEST = 2.0**-126  # below it XLA's CPU back end may read zero


def variants() -> dict[str, Format]:
    found = dict(FORMATS)
    for name, format in FORMATS.items():
        if format.kind in ("block", "tensor"):
            other = "float32 scales" if format.power_of_two else "powers of two"
            found[f"{name}, {other}"] = dataclasses.replace(format, power_of_two=not format.power_of_two)
    return found


def inputs() -> dict[str, np.ndarray]:
    """float32 [R, K] each; whole tiles are zero, tiny, huge, infinite or NaN in some."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(R, K)).astype(np.float32)
    scaled = (x * 2.0 ** rng.integers(-40, 41, x.shape)).astype(np.float32)
    holes = x.copy()
    holes[:, :128], holes[5], holes[64:80] = 0, 0, 0
    bad = x.copy()
    bad[3, 7], bad[90, 200], bad[17, 140] = np.inf, -np.inf, np.nan
    ties = rng.choice([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 17.0, 19.0, 448.0, 208.0, 216.0], x.shape)
    outliers = np.where(rng.random(x.shape) < 0.01, x * 1e4, x)
    found = {
        "normal": x,
        "80 binades": scaled,
        "outliers": outliers.astype(np.float32),
        "zero tiles": holes,
        "zeros": np.zeros_like(x),
        "1e-36": x * np.float32(1e-36),
        "1e38": np.clip(x, -3, 3) * np.float32(1e38),
        "ties": (ties * rng.choice([-1, 1], x.shape)).astype(np.float32),
        "bfloat16": np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32),
        "infinities and NaN": bad,
    }
    return {name: np.where(np.abs(x) < SMALLEST, np.float32(0), x) for name, x in found.items()}


INPUTS = inputs()


def raw(quantised: Quantised):
    """Codes as values, scales as float64 or bytes, outer."""
    codes, stored, outer = jax.device_get(quantised)
    mx = stored.dtype == jnp.float8_e8m0fnu
    return codes.astype(np.float64), stored.view(np.uint8) if mx else stored.astype(np.float64), outer


def same_bits(a: Quantised, b: Quantised) -> None:
    for got, want in zip(jax.device_get(a), jax.device_get(b), strict=True):
        if want is not None:
            np.testing.assert_array_equal(*(np.atleast_1d(x).view(np.uint8) for x in (got, want)))


@functools.partial(jax.jit, static_argnums=(1, 2))
def compiled(x, format, implementation):
    return quantize(x, format, implementation=implementation)


@pytest.mark.parametrize("name", variants())
def test_equals_numpy_compiled_and_eager(name):
    format = variants()[name]
    eager = functools.partial(quantize, implementation="xla")
    for case, x in INPUTS.items():
        want = oracle.quantize(x, format.kind, format.dtype, format.rows, format.columns, format.power_of_two)
        if want[2] is not None and want[2] < SMALLEST:
            continue
        for implementation in ("xla", "reference"):
            agrees(compiled(x, format, implementation), want, f"{case} by {implementation}")
        if case in ("80 binades", "infinities and NaN"):
            agrees(eager(x, format), want, f"{case}, eager")


def agrees(quantised: Quantised, want, about: str) -> None:
    (codes, stored, outer), (values, scales, outer_want) = raw(quantised), want
    number = ~np.isnan(values)
    np.testing.assert_array_equal(codes, values, err_msg=about)
    np.testing.assert_array_equal(np.signbit(codes)[number], np.signbit(values)[number], err_msg=about)
    normal = (scales == 0) | (np.abs(scales) >= SMALLEST) | ~np.isfinite(scales)
    np.testing.assert_array_equal(stored[normal], scales[normal], err_msg=about)
    assert outer_want is None or (outer == outer_want).all(), about


def test_denormals_read_as_themselves_or_as_zero():
    """The contract's one loose end: what XLA's CPU back end flushes. Nothing else in the array may change."""
    x = INPUTS["normal"].copy()
    clean = raw(compiled(x, FORMATS["e4m3_1x128"], "xla"))
    x[9, :128] = np.float32(1e-40)
    dirty = raw(compiled(x, FORMATS["e4m3_1x128"], "xla"))
    assert set(np.unique(dirty[0][9, :128])) <= {
        0.0,
        float(oracle.nearest(np.float32(1e-40) * np.float32(2.0**127), oracle.E4M3)),
    }
    rest = np.ones(x.shape, bool)
    rest[9, :128] = False
    np.testing.assert_array_equal(dirty[0][rest], clean[0][rest])


@pytest.mark.parametrize("dtype", [oracle.E4M3, oracle.E5M2, oracle.E2M1], ids=str)
def test_codes_of_every_16_bit_number_are_those_of_ml_dtypes(dtype):
    """Each half and each bfloat16: all ties, all subnormals of a code, both zeros, and NaN where the code has one."""
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    bfloats = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)
    for x in (halves, bfloats):
        x = np.where(np.isnan(x), 0 if dtype == oracle.E2M1 else np.nan, np.clip(x, -LARGEST[dtype], LARGEST[dtype]))
        ours = np.asarray(jax.jit(functools.partial(casts.to_codes, dtype=dtype))(x.astype(np.float32)))
        numbers = ~np.isnan(x)
        np.testing.assert_array_equal(ours.view(np.uint8)[numbers], x.astype(dtype).view(np.uint8)[numbers])
        assert np.isnan(ours.astype(np.float32)[~numbers]).all()


@pytest.mark.parametrize(
    ("value", "code"),
    [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0), (5.1, 6.0), (100.0, 6.0)],
)
def test_ties_of_e2m1(value, code):
    run = functools.partial(rounding.round_to_codes, dtype=jnp.float4_e2m1fn)
    for call in (run, jax.jit(run)):
        x = jnp.array([value, -value], jnp.float32)
        assert call(x).astype(jnp.float32).tolist() == [code, -code]


@pytest.mark.parametrize(
    ("name", "amax", "byte"),
    [
        ("mx_e4m3", 0.0, 0x00),
        ("mx_e4m3", 448.0, 127),
        ("mx_e4m3", np.nextafter(np.float32(448), np.float32(449)), 128),
        ("mx_e4m3", 1.4 * 448, 128),
        ("mx_e4m3", 2.0**-125, 0),
        ("mx_e4m3", np.inf, 0xFE),
        ("mx_e4m3", np.nan, 0xFF),
        ("mx_e5m2", 57344.0, 127),
        ("mx_e5m2", 57345.0, 128),
        ("mx_e5m2", np.finfo(np.float32).max, 240),
    ],
)
def test_bytes_of_e8m0(name, amax, byte):
    x = jnp.zeros((1, 64), jnp.float32).at[0, 3].set(amax).at[0, 40].set(1.0)
    found = quantize(x, name)
    stored = np.asarray(found.scales).view(np.uint8)
    assert stored.tolist() == [[byte, 127 - (8 if "e4m3" in name else 15)]]
    values = np.asarray(dequantize(found))
    assert values[0, 40] == 1.0  # the next tile
    if not np.isfinite(amax):
        assert np.isnan(values[0, 3])


@pytest.mark.parametrize(("dtype", "largest"), [(jnp.float8_e4m3fn, 448), (jnp.float8_e5m2, 57344)])
def test_the_exponent_is_right_for_every_mantissa(dtype, largest):
    """All 2^23 of them in one binade: the least power of two p with amax <= largest p."""
    mantissa = np.arange(2**23, dtype=np.int32)
    amax = (mantissa | (130 << 23)).view(np.float32)
    byte = np.asarray(jax.jit(functools.partial(scales.mx_scales, dtype=dtype))(mantissa | (130 << 23))[1])
    fits = lambda b: amax.astype(np.float64) <= largest * 2.0 ** (b.astype(np.float64) - 127)
    assert fits(byte).all()
    assert not fits(byte - 1).any()
    encode, decode = scales.block_scales(jnp.asarray(mantissa[::64] | (130 << 23)), dtype, True)
    assert (np.asarray(encode) * np.asarray(decode) == 1).all()
    np.testing.assert_array_equal(np.asarray(decode).view(np.int32) >> 23, byte[::64])


def test_codes_belong_to_the_scale_that_is_stored():
    """The fault of a scale rounded up to a power of two beneath codes made with another one gives 448 for 300."""
    x = jnp.zeros((1, 128), jnp.float32).at[0].set(jnp.linspace(-300, 300, 128))
    exact, power = (quantize(x, dataclasses.replace(FORMATS["e4m3_1x128"], power_of_two=p)) for p in (False, True))
    assert float(exact.scales[0, 0]) == pytest.approx(300 / 448, rel=1e-6)
    assert float(power.scales[0, 0]) == 1.0
    for found in (exact, power):
        off = np.abs(np.asarray(dequantize(found)) - np.asarray(x))
        assert (off <= np.abs(np.asarray(x)) / 16 + 2**-9).all()
    fault = dequantize(Quantised(exact.codes, power.scales))
    assert float(fault.max()) == 448.0


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("name", ["e4m3_1x128", "e5m2_128x128", "mx_e4m3", "nvfp4", "nvfp4_16x16"])
def test_a_bad_value_stays_in_its_tile(name, poison):
    format, x = FORMATS[name], np.concatenate([INPUTS["normal"]] * 2)
    dirty = x.copy()
    dirty[37, 20] = poison
    outer = dict(outer_amax=np.float32(4.0)) if format.kind == "nvfp4" else {}
    rows, columns = format.rows, format.columns
    clean, found = (quantize(jnp.asarray(a), format, **outer) for a in (x, dirty))
    outside = np.ones((x.shape[0] // rows, x.shape[1] // columns), bool)
    outside[37 // rows, 20 // columns] = False
    values = np.kron(outside, np.ones((rows, columns), bool))
    np.testing.assert_array_equal(np.asarray(dequantize(found))[values], np.asarray(dequantize(clean))[values])
    np.testing.assert_array_equal(raw(found)[1][outside], raw(clean)[1][outside])
    if np.isnan(poison):
        assert np.isnan(np.asarray(dequantize(found))[37, 20])


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["e4m3_1x128", "e5m2_128x128", "e4m3_tensor", "mx_e4m3", "nvfp4", "nvfp4_16x16"])
def test_a_loud_format_makes_the_tile_of_an_infinity_nan(name, poison, implementation):
    """Where nothing is bad it is the format itself."""
    quiet, loud = FORMATS[name], dataclasses.replace(FORMATS[name], loud=True)
    x = np.concatenate([INPUTS["normal"]] * 2)
    dirty = x.copy()
    dirty[37, 20] = poison
    outer = dict(outer_amax=np.float32(4.0)) if quiet.kind == "nvfp4" else {}
    call = functools.partial(quantize, implementation=implementation, **outer)
    same_bits(call(jnp.asarray(x), loud), call(jnp.asarray(x), quiet))
    values, clean = (np.asarray(dequantize(call(jnp.asarray(a), loud))) for a in (dirty, x))
    rows, columns = loud.tile(x.shape)
    tile = np.zeros((x.shape[0] // rows, x.shape[1] // columns), bool)
    tile[37 // rows, 20 // columns] = True
    tile = np.kron(tile, np.ones((rows, columns), bool))
    assert np.isnan(values[tile]).all()
    np.testing.assert_array_equal(values[~tile], clean[~tile])


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_parts_that_agree_on_a_scale_have_the_codes_of_the_whole(implementation):
    x = jnp.asarray(INPUTS["normal"])
    call = functools.partial(quantize, format="e4m3_tensor", implementation=implementation)
    whole, parts = call(x), [call(half, outer_amax=jnp.abs(x).max()) for half in jnp.split(x, 2)]
    np.testing.assert_array_equal(jnp.concatenate([p.codes for p in parts]).view(np.uint8), whole.codes.view(np.uint8))
    assert {float(p.scales[0, 0]) for p in parts} == {float(whole.scales[0, 0])}


def test_nan_in_nvfp4_leaves_the_second_level_alone():
    x = jnp.asarray(INPUTS["infinities and NaN"])
    values = np.asarray(dequantize(quantize(x, "nvfp4")))
    assert values[3, 7] == 2688
    assert values[90, 200] == -2688
    bad = np.isnan(values)
    assert bad[17, 128:144].any()
    bad[17, 128:144] = False
    assert not bad.any()


def test_an_idle_expert_keeps_its_scale():
    """Scales come from the array at hand alone: no history that a pass without rows could shift."""
    w = jax.random.normal(jax.random.key(0), (4, 128, 128))
    busy = quantize(w, "e4m3_128x128")
    idle = quantize(w.at[3].set(0), "e4m3_128x128")
    assert idle.scales[3].tolist() == [[1.0]]
    np.testing.assert_array_equal(idle.scales[:3], busy.scales[:3])
    same_bits(quantize(w, "e4m3_128x128"), busy)


@pytest.mark.parametrize("name", ["e4m3_tensor", "nvfp4"])
def test_ranks_that_share_a_tensor_agree_on_its_scale(name):
    """With the largest magnitude over both devices the codes are those of the whole array on one device."""
    x = jnp.asarray(INPUTS["outliers"]).at[100, 3].set(1e5)
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))

    def local(x):
        top = jax.lax.pmax(jnp.abs(x).max(), "x")
        if name == "nvfp4":
            return quantize(x, name, outer_amax=top)
        return quantize(jnp.concatenate([x, jnp.full_like(x[:1], top)]), name)

    out = Quantised(P("x"), P("x"), P("x") if name == "nvfp4" else None)
    parts = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("x"), out_specs=out))(x)
    whole = raw(quantize(x, name))
    if name == "nvfp4":
        np.testing.assert_array_equal(raw(parts)[1], whole[1])
        assert (parts.outer == whole[2]).all()
    else:
        assert (raw(parts)[1] == whole[1]).all()


@pytest.mark.parametrize("name", ["e4m3_1x128", "e4m3_128x128", "mx_e4m3", "mx_e5m2"])
def test_a_detour_over_bfloat16_loses_nothing(name):
    first = dequantize(quantize(jnp.asarray(INPUTS["80 binades"]), name), jnp.bfloat16)
    again = dequantize(quantize(first, name), jnp.bfloat16)
    np.testing.assert_array_equal(again.astype(jnp.float32), first.astype(jnp.float32))


@pytest.mark.parametrize("name", ["e4m3_1x128", "e5m2_128x128", "e4m3_tensor", "mx_e4m3", "nvfp4", "nvfp4_16x16"])
def test_both_directions(name):
    x = jnp.asarray(np.stack([INPUTS["normal"], INPUTS["outliers"]]))
    rows, columns = quantize_both(x, name)
    same_bits(rows, quantize(x, name))
    same_bits(columns, quantize(x, name, transpose=True))
    same_bits(columns, quantize(x.swapaxes(-1, -2), name))
    if FORMATS[name].square:
        same_bits(columns, transposed(rows))
    else:
        with pytest.raises(ValueError, match="aren't square"):
            transposed(rows)


STOCHASTIC = dataclasses.replace(FORMATS["nvfp4"], stochastic=True)


def test_stochastic_codes_have_the_mean_of_the_values():
    rng = np.random.default_rng(1)
    x = rng.uniform(-6, 6, 64).astype(np.float32)
    draws = jnp.asarray(rng.integers(0, 256, (4096, 64)), jnp.uint8)
    codes = np.asarray(
        rounding.stochastic_e2m1(jnp.broadcast_to(x, draws.shape), draws).astype(jnp.float32), np.float64
    )
    values = np.concatenate([-oracle.grid(oracle.E2M1)[:0:-1], oracle.grid(oracle.E2M1)])
    below = values[np.searchsorted(values, x, side="right") - 1]
    above = values[np.minimum(np.searchsorted(values, x, side="right"), values.size - 1)]
    assert ((codes == below) | (codes == above)).all()
    spread = np.sqrt((x - below) * (above - x) / 4096)
    assert (np.abs(codes.mean(0) - x) <= 4 * spread + (above - below) / 512).all()
    np.testing.assert_allclose(codes.var(0), (x - below) * (above - x), atol=0.08)


def test_every_byte_once_gives_the_value_within_half_a_byte():
    x = np.linspace(-6, 6, 1001).astype(np.float32)
    every = jnp.broadcast_to(jnp.arange(256, dtype=jnp.uint8)[:, None], (256, x.size))
    codes = rounding.stochastic_e2m1(jnp.broadcast_to(x, every.shape), every).astype(jnp.float32)
    off = np.asarray(codes, np.float64).mean(0) - x
    assert np.abs(off).max() <= 2 / 512 + 1e-6
    assert abs(off.mean()) < 1e-4
    on_grid = jnp.asarray(oracle.grid(oracle.E2M1), jnp.float32)[None]
    stays = rounding.stochastic_e2m1(jnp.broadcast_to(on_grid, (256, 8)), every[:, :8]).astype(jnp.float32)
    assert (stays == on_grid).all()


def test_one_key_gives_one_result():
    x, key = jnp.asarray(INPUTS["normal"]), jax.random.key(7)
    eager = quantize(x, STOCHASTIC, key=key)
    same_bits(jax.jit(lambda x, key: quantize(x, STOCHASTIC, key=key))(x, key), eager)
    same_bits(quantize(x, STOCHASTIC, key=key, implementation="reference"), eager)
    given = rounding.random_bytes(key, x.shape)
    same_bits(quantize(x, STOCHASTIC, random_bytes=given), eager)
    other = quantize(x, STOCHASTIC, key=jax.random.key(8))
    assert (raw(other)[0] != raw(eager)[0]).mean() > 0.1
    words = np.asarray(jax.random.bits(key, (R, K // 4), jnp.uint32))
    np.testing.assert_array_equal(given, words.view(np.uint8))  # four a word, the lowest first


def test_the_turn_is_orthogonal_and_leaves_products_alone():
    matrix = oracle.hadamard_matrix(rounding.SIGNS)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(16), atol=1e-15)
    x = INPUTS["normal"]
    turned = np.asarray(hadamard(jnp.asarray(x)))
    np.testing.assert_allclose(turned.reshape(-1, 16), x.reshape(-1, 16) @ matrix, atol=1e-5)
    np.testing.assert_allclose(hadamard(hadamard(jnp.asarray(x)), inverse=True), x, atol=1e-6)
    other = INPUTS["bfloat16"][:64]
    np.testing.assert_allclose(turned @ np.asarray(hadamard(jnp.asarray(other))).T, x @ other.T, atol=1e-3)


def test_a_turned_format_quantises_the_turned_array():
    format, x = dataclasses.replace(FORMATS["nvfp4"], hadamard=True), jnp.asarray(INPUTS["outliers"])
    for implementation in ("xla", "reference"):
        same_bits(quantize(x, format, implementation=implementation), quantize(hadamard(x), "nvfp4"))


def test_there_is_no_gradient_to_get_wrong():
    x = jnp.asarray(INPUTS["normal"])
    for call in (quantize, quantize_both):
        with pytest.raises(NotImplementedError, match="inside the custom VJP"):
            jax.grad(lambda x, call=call: jax.tree.leaves(call(x, "e4m3_128x128"))[1].sum())(x)


def test_types_on_two_devices():
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    x = jnp.asarray(INPUTS["normal"])

    def local(x, w):
        return quantize_both(x, "e4m3_1x128"), dequantize(quantize(w, "nvfp4", outer_amax=jnp.abs(x).max()))

    found = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P("x"), P()), out_specs=(P("x"), P("x"))))(
        jnp.concatenate([x, x]), x
    )
    same_bits(Quantised(*(a[:R] if a is not None else None for a in found[0][0])), quantize(x, "e4m3_1x128"))
    with pytest.raises(ValueError, match="out_specs"):
        jax.shard_map(lambda x: quantize(x, "e4m3_1x128").codes, mesh=mesh, in_specs=P("x"), out_specs=P())(x)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: quantize(x, "fp8"), ValueError, "no format 'fp8': choose one of e4m3_1x128"),
        (lambda x: quantize(x[:100], "e4m3_128x128"), ValueError, r"128x128 don't fill \[R, K\] = \[100, 256\]"),
        (lambda x: quantize(x[:, :40], "mx_e4m3"), ValueError, "1x32 don't fill"),
        (lambda x: quantize(x[0], "mx_e4m3"), ValueError, r"shape \(256,\)"),
        (lambda x: quantize(x, "nvfp4", key=jax.random.key(0)), ValueError, "stochastic=False, key given"),
        (lambda x: quantize(x, STOCHASTIC), ValueError, "stochastic=True, key missing"),
        (lambda x: quantize(x, STOCHASTIC, random_bytes=x), ValueError, "must be uint8"),
        (lambda x: quantize(x, "mx_e4m3", outer_amax=1.0), ValueError, "second level of 'nvfp4'"),
        (lambda x: quantize_both(x, STOCHASTIC), ValueError, "quantize twice"),
        (lambda x: quantize(x, "e4m3_1x128", implementation="cutlass"), ValueError, "choose one of"),
        (lambda x: quantize(x, "e4m3_1x128", implementation="mosaic"), NotImplementedError, "for Hopper GPUs"),
        (lambda x: Format(kind="mx", dtype=jnp.float4_e2m1fn), ValueError, "takes codes"),
        (lambda x: Format(kind="mx", dtype=jnp.float8_e5m2, hadamard=True), ValueError, "for kind 'nvfp4'"),
        (lambda x: Format(kind="block", dtype=jnp.float8_e5m2, rows=16), ValueError, "16x128"),
    ],
)
def test_what_does_not_fit_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call(jnp.zeros((R, K)))
