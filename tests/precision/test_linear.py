"""The quantised product: against float64 of the rounded numbers, against float32, over foldings, kept bytes, bad numbers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from mesh import build_mesh, fold, place, sharded
from mesh.vma import vary
from moex.precision import linear as linear_module
from moex.precision.gathered import gathered_in_codes
from moex.precision.linear import KEPT, linear
from moex.precision.matrix import bits
from moex.precision.products import hardware, missing_hardware
from moex.precision.recipes import RECIPES, GemmRecipe
from moex.precision.weight import enter, ports, quantise_here, with_ports
from pallas_kernels.quantize import FORMATS
from tests.foldings import sizes
from tests.quick import quick_jit
from tests.train.tiny import equations

T, K, N = 256, 256, 384
TILES = dict(fp8_block=128, mxfp8=32)
"""Recipes whose scales are powers of two of a tile, which NumPy can follow in a few lines, and the tile."""


def arrays(seed=0, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(seed), 3)
    draw = lambda key, *shape: jax.random.normal(key, shape).astype(dtype)
    return draw(keys[0], T, K), draw(keys[1], K, N) / 16, draw(keys[2], T, N)


@functools.partial(quick_jit, static_argnums=0)
def three_products(name: str, x, w, g):
    """y, dx, dw."""
    y, pull = jax.vjp(lambda x, w: linear(x, quantise_here(w, RECIPES[name])), x, w)
    return y, *pull(g.astype(y.dtype))


def rounded(x, tile):
    """Float64 values of E4M3 codes with a power-of-two scale a tile, by ml_dtypes."""
    rows, columns = tile
    blocks = np.asarray(x, np.float64).reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns)
    largest = np.abs(blocks).max(axis=(1, 3), keepdims=True)
    scale = 2.0 ** np.ceil(np.log2(largest / 448))
    codes = (blocks / scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    return (codes.astype(np.float64) * scale).reshape(x.shape)


@pytest.mark.parametrize("name", TILES)
def test_each_product_is_that_of_numbers_rounded_along_its_sum(name):
    x, w, g = arrays()
    n = TILES[name]
    along, across, square = (1, n), (n, 1), (128, 128) if name == "fp8_block" else None
    want = (
        rounded(x, along) @ rounded(w, square or across),
        rounded(g, along) @ rounded(w, square or along).T,
        rounded(x, across).T @ rounded(g, across),
    )
    for got, exact in zip(three_products(name, x, w, g), want, strict=True):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, exact, rtol=0, atol=1e-5 * np.abs(exact).max())


# Bounds for numbers from a normal distribution: the root of the summed squares of both factors' rounding errors.
ERRORS = dict(fp8_block=(0.03, 0.045), fp8_tensor=(0.03, 0.07), mxfp8=(0.03, 0.045), nvfp4=(0.09, 0.2))


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_errors_are_those_of_the_format(name, dtype):
    """Neither larger, nor so small that nothing was quantised."""
    x, w, g = arrays(dtype=dtype)
    exact = [np.asarray(a, np.float64) for a in (x @ w, g @ w.T, x.astype(jnp.float32).T @ g.astype(jnp.float32))]
    low, high = ERRORS[name]
    got = three_products(name, x, w.astype(jnp.float32), g)
    assert [a.dtype for a in got] == [dtype, dtype, jnp.float32]
    for a, want in zip(got, exact, strict=True):
        assert low < np.linalg.norm(np.asarray(a, np.float64) - want) / np.linalg.norm(want) < high


@pytest.mark.parametrize("name", RECIPES)
def test_widths_and_tokens_that_fill_no_tile(name):
    """Zeros fill them up, which changes nothing where the tiles are the same."""
    x, w, g = arrays()
    cut = lambda x, w, g: (x[:100, :200], w[:200, :72], g[:100, :72])
    padded = [jnp.zeros_like(a).at[: b.shape[0], : b.shape[1]].set(b) for a, b in zip((x, w, g), cut(x, w, g))]  # noqa: B905
    got, want = three_products(name, *cut(x, w, g)), three_products(name, *padded)
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == ((100, 72), (100, 200), (200, 72))[index]
        b = b[: a.shape[0], : a.shape[1]]
        if RECIPES[name].dy.stochastic and index:  # other shapes, other random bits
            assert np.linalg.norm(a - b) < 0.25 * np.linalg.norm(b)
        else:
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.abs(b).max())


def test_dims_are_summed_as_declared():
    """A weight [heads, width, D] is summed over two dims, by a plain array and by codes alike."""
    x, w, _ = arrays()
    x, w = x.reshape(2, 128, 4, 64), w.reshape(4, 64, 3, 128)
    plain = linear(x, w, contracted=2)
    np.testing.assert_allclose(plain, jnp.einsum("bsnh,nhgf->bsgf", x, w), rtol=1e-5, atol=1e-5)
    coded = linear(x, quantise_here(w, RECIPES["mxfp8"], contracted=2), contracted=2)
    assert coded.shape == plain.shape
    assert 0.01 < np.linalg.norm(coded - plain) / np.linalg.norm(plain) < 0.05


# --- on meshes

FOLDINGS = [((8, 1, 1), (1, 8, 1)), ((2, 2, 2), (1, 8, 1)), ((1, 4, 2), (2, 2, 2)), ((2, 1, 4), (1, 4, 2))]


D, F = 128, 512


def two_layers(x_TK, w_KN, w_NK, target_TK, psum=lambda y: y):
    return (psum(linear(jax.nn.relu(linear(x_TK, w_KN)), w_NK)) * target_TK).sum()


def inputs():
    keys = jax.random.split(jax.random.key(5), 4)
    draw = lambda key, *shape: jax.random.normal(key, shape)
    return draw(keys[0], 1024, D), draw(keys[1], D, F) / 11, draw(keys[2], F, D) / 20, draw(keys[3], 1024, D)


@functools.cache
def alone(name: str, tokens: int, tp: int):
    """The gradients, device by device on one: each quantises its own tokens and its part of the weights."""
    x, up, down, target = inputs()

    @quick_jit
    def one(x, up, down, target):
        def loss(x, up, down):
            shape = dict(contracted=1)
            return two_layers(x, *(quantise_here(w, RECIPES[name], **shape) for w in (up, down)), target)

        return jax.grad(loss, argnums=(0, 1, 2))(x, up, down)

    dx, dup, ddown = [], [[0.0] * tp], [[0.0] * tp]
    for rows, goal in zip(jnp.split(x, tokens), jnp.split(target, tokens), strict=True):
        parts = [one(rows, u, d, goal) for u, d in zip(jnp.split(up, tp, 1), jnp.split(down, tp, 0), strict=True)]
        dx.append(sum(p[0] for p in parts))
        dup[0] = [a + p[1] for a, p in zip(dup[0], parts, strict=True)]
        ddown[0] = [a + p[2] for a, p in zip(ddown[0], parts, strict=True)]
    return jnp.concatenate(dx), jnp.concatenate(dup[0], 1), jnp.concatenate(ddown[0], 0)


def on_mesh(name: str, folded, gather: str):
    """The same inside shard_map: tokens over dp and cp, the hidden dim over tp, storage over all that is left."""
    mesh, dense = build_mesh(folded, jax.devices()), folded.dense
    places = place((D, F), (None, "tp"), folded), place((F, D), ("tp", None), folded)

    def run(x, up, down, target):
        def loss(x, shards):
            go = lambda shard, p: enter(
                shard, p, RECIPES[name], slices=0, contracted=1, gather=gather, dtype=jnp.float32
            )
            weights = tuple(map(go, shards, places))
            psum = lambda y: jax.lax.psum(y, dense.tp) if dense.tp else y
            total = two_layers(vary(x, dense.tp), *weights, target, psum)
            return jax.lax.psum(total, dense.dp + dense.cp) if dense.dp + dense.cp else total

        return jax.grad(loss, argnums=(0, 1))(x, (up, down))

    rows, specs = PartitionSpec(dense.dp + dense.cp), tuple(p.spec for p in places)
    call = sharded(run, mesh, in_specs=(rows, *specs, rows), out_specs=(rows, specs))
    dx, grads = quick_jit(call)(*inputs())
    return dx, *grads


@pytest.mark.parametrize("gather", ["compute", "codes"])
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("sizes_of", FOLDINGS, ids=str)
def test_gradients_on_a_mesh_are_those_of_its_devices_one_by_one(name, sizes_of, gather, monkeypatch):
    monkeypatch.setattr(linear_module, "_place", lambda axes: 0)  # the random bits of one device
    folded = fold(*sizes(*sizes_of))
    want = alone(name, folded.size("dp") * folded.size("cp"), folded.size("tp"))
    for got, exact in zip(on_mesh(name, folded, gather), want, strict=True):
        np.testing.assert_allclose(got, exact, rtol=0, atol=1e-6 * np.abs(exact).max())


@pytest.mark.parametrize("name", ["fp8_block", "fp8_tensor", "nvfp4"])
def test_a_weight_gathered_in_codes_takes_a_byte_a_number_and_its_gradient_four(name):
    """Read off the program: what is gathered are bytes, what is summed over devices float32."""
    folded, dtype = fold(dict(dp=8), dict(edp=8)), jnp.bfloat16
    where, spec = place((1024, 128), (None, None), folded), PartitionSpec("dp_edp")

    def run(x, shard):
        def loss(x, shard):
            w = enter(shard, where, RECIPES[name], slices=0, contracted=1, gather="codes", dtype=dtype)
            return jax.lax.psum(linear(x, w).astype(jnp.float32).sum(), "dp_edp")

        return jax.grad(loss, argnums=1)(x, shard)

    call = sharded(run, build_mesh(folded, jax.devices()), in_specs=(spec, spec), out_specs=spec)
    shape = lambda *dims, dtype: jax.ShapeDtypeStruct(dims, dtype)
    jaxpr = jax.make_jaxpr(call)(shape(1024, 1024, dtype=dtype), shape(1024, 128, dtype=jnp.float32))
    found = [(e.primitive.name, e.outvars[0].aval) for e in equations(jaxpr)]
    gathered = [a for name, a in found if name.startswith("all_gather") and a.size == 1024 * 128]
    assert [a.dtype.itemsize for a in gathered] == [1]
    summed = [a for name, a in found if "scatter" in name and a.size == 128 * 128]
    assert [a.dtype for a in summed] == [jnp.float32]


# --- what is kept, and bad numbers


def kept_bits(x) -> float:
    return 4 if x.dtype == jnp.uint4 else 8 * x.dtype.itemsize


@pytest.mark.parametrize(("name", "most"), dict(fp8_block=1.04, fp8_tensor=1.01, mxfp8=1.04, nvfp4=0.57).items())
def test_what_is_kept_of_x_and_that_a_checkpoint_changes_no_bit(name, most):
    """Bytes for each number of x beside the weight's own codes; by the name of its codes a checkpoint keeps just them."""
    x, w, g = (jnp.tile(a, (4, 1)) if len(a) == T else a for a in arrays(dtype=jnp.bfloat16))
    x, g = x[: 3 * T], g[: 3 * T]
    weight = quantise_here(w[:128].astype(jnp.float32), RECIPES[name])
    x = x[:, :128]
    of_x = lambda a: (
        a.shape[:1] == (128,) and a.size not in {w[:128].size, *(s.size for s in weight.backward if s is not None)}
    )

    def gradients(wrap):
        call = wrap(lambda x, port: linear(x, with_ports(weight, port)))
        _, pull = jax.vjp(call, x, ports(weight))
        return pull(g), [a for a in jax.tree.leaves(pull) if of_x(a) or a.shape == (1, 1)]

    plain, kept = gradients(lambda f: f)
    bits = sum(a.size * (4 if a.dtype == jnp.uint4 else 8 * a.dtype.itemsize) for a in kept)
    assert 0.5 < bits / 8 / x.size <= most
    policy = jax.checkpoint_policies.save_only_these_names(KEPT)
    for wrap in (jax.checkpoint, functools.partial(jax.checkpoint, policy=policy)):
        jax.tree.map(np.testing.assert_array_equal, gradients(wrap)[0], plain)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("poison", [np.inf, np.nan])
@pytest.mark.parametrize("place", ["x", "w", "g"])
def test_an_infinity_that_codes_would_clip_is_seen(place, poison, name):
    """It reaches the result as NaN, and so the loss or the gradient's norm, which the step looks at."""
    given = dict(zip("xwg", arrays(), strict=True))
    given[place] = given[place].at[5, 7].set(poison)
    y, dx, dw = three_products(name, *given.values())
    spoilt = dict(x=(y, dw), w=(y, dx), g=(dx, dw))
    for result in spoilt[place]:
        assert np.isnan(np.asarray(result)).any()


def test_random_bits_differ_by_gradient_and_device():
    """Rounding errors of devices are independent: their mean over n devices is the root of n times smaller."""
    g = jax.random.normal(jax.random.key(0), (64, 128))
    same, other = linear_module.random_keys(g, ()), linear_module.random_keys(g * 1.01, ())
    assert (jax.random.key_data(same[0]) == jax.random.key_data(linear_module.random_keys(g, ())[0])).all()
    assert (jax.random.key_data(same[0]) != jax.random.key_data(other[0])).any()
    assert (jax.random.key_data(same[0]) != jax.random.key_data(same[1])).any()
    folded = fold(dict(dp=8), dict(edp=8))
    keys = lambda g: jax.random.key_data(linear_module.random_keys(vary(g, ("dp_edp",)), ("dp_edp",))[0])[None]
    mesh = build_mesh(folded, jax.devices())
    found = jax.jit(sharded(keys, mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec("dp_edp")))(g)
    assert len(np.unique(np.asarray(found), axis=0)) == 8


# --- refusals and hardware


def test_factors_must_be_of_one_kind():
    fields = {f.name: getattr(RECIPES["mxfp8"], f.name) for f in dataclasses.fields(GemmRecipe)}
    with pytest.raises(ValueError, match="x and w are multiplied"):
        GemmRecipe(**fields | dict(w=FORMATS["nvfp4"]))


@pytest.mark.parametrize(
    ("name", "kind", "grouped", "how"),
    [
        ("fp8_tensor", "NVIDIA H100 80GB HBM3", False, "xla"),
        ("fp8_tensor", "NVIDIA A100-SXM4-80GB", False, "emulation"),
        ("fp8_tensor", "NVIDIA B200", True, "emulation"),
        ("fp8_block", "NVIDIA H200", True, "mosaic"),
        ("fp8_block", "NVIDIA B200", False, "emulation"),
        ("mxfp8", "NVIDIA B200", False, "xla"),
        ("mxfp8", "NVIDIA GB200", False, "xla"),
        ("mxfp8", "NVIDIA H100 80GB HBM3", False, "emulation"),
        ("nvfp4", "NVIDIA GB300", False, "xla"),
        ("nvfp4", "cpu", False, "emulation"),
    ],
)
def test_what_multiplies(name, kind, grouped, how):
    assert hardware(RECIPES[name].x, grouped=grouped, kind=kind) == how
    assert bool(missing_hardware(RECIPES[name], kind, grouped=grouped)) == (how == "emulation" and kind != "cpu")


SHARDED = [
    # shape [*experts, *K, *N], experts' dims, K's dims, dim that eight devices split, view of the rest
    ((256, 384), 0, 1, 0), ((1024, 256), 0, 1, 0), ((256, 384), 0, 1, 1), ((2, 192, 256), 0, 2, 1), ((256, 4, 96), 0, 1, 2),
    ((256, 8, 96), 0, 1, 1), ((8, 256, 128), 1, 1, 0), ((3, 256, 256), 1, 1, 1), ((3, 200, 2, 104), 1, 1, 3),
]  # fmt: skip


@pytest.mark.parametrize("name", ["fp8_block", "fp8_tensor", "nvfp4"])
@pytest.mark.parametrize(("shape", "slices", "contracted", "dim"), SHARDED, ids=str)
def test_gathered_codes_are_those_of_the_whole_weight(name, shape, slices, contracted, dim):
    """Bit for bit, wherever shards begin in tiles; beside codes travel few bytes."""
    weight = jax.random.normal(jax.random.key(1), shape) * jnp.exp(jax.random.normal(jax.random.key(2), shape))
    weight = weight.at[(0,) * len(shape)].set(jnp.nan) if name == "fp8_block" else weight
    folded, recipe = fold(dict(dp=8), dict(edp=8)), RECIPES[name]
    spec = PartitionSpec(*[("dp_edp" if i == dim else None) for i in range(len(shape))])

    def run(shard):
        found = gathered_in_codes(shard, ("dp_edp",), dim, recipe, slices, contracted)
        return jax.tree.map(lambda x: vary(x, ("dp_edp",))[None], bits(found))

    call = sharded(run, build_mesh(folded, jax.devices()), in_specs=(spec,), out_specs=PartitionSpec("dp_edp"))
    got, want = quick_jit(call)(weight), quantise_here(weight, recipe, slices=slices, contracted=contracted).backward
    for everywhere, one in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        for here in np.asarray(everywhere.astype(jnp.float32)):
            np.testing.assert_array_equal(here, np.asarray(one.astype(jnp.float32)))
    gathered = [e.outvars[0].aval for e in equations(jax.make_jaxpr(call)(weight)) if "all_gather" in e.primitive.name]
    sent = sum(a.size * kept_bits(a) / 8 for a in gathered)
    assert sent <= dict(fp8_block=1.04, fp8_tensor=1.01, nvfp4=0.82)[name] * 1.35 * weight.size
