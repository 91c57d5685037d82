"""The block-scaled grouped matmul and its gradients against NumPy in float64; the Hopper kernels in the interpreter."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.grouped_matmul.specs import PATTERNS, Spec, pattern
from pallas_kernels.scaled_grouped_matmul import (
    Config,
    GradConfig,
    dgrad,
    implementations,
    scaled_grouped_matmul,
    transposed,
    wgrad,
)
from pallas_kernels.scaled_grouped_matmul import specs as shapes
from pallas_kernels.scaled_grouped_matmul.specs import E4M3, E5M2
from tests.pallas_kernels.interpreter import interpreted

SPEC = Spec(rows=384, groups=4, inner=384, outer=128)  # 3 steps of the summed dim, more than the ring's 2 slots
SMALL = Config(columns=128, stages=2, num_sms=2)
SMALL_GRAD = GradConfig(stages=2, num_sms=2)
EXACT, ROUNDED = 1e-5, 4e-3  # of the largest: float32 and bfloat16 results


def numbers(codes, scales, dims):
    """float64: codes times the scales of their blocks."""
    for dim in dims:
        scales = np.repeat(scales, 128, axis=dim)
    return np.asarray(codes).astype(np.float64) * np.asarray(scales, np.float64)


def expected(args, sizes):
    lhs, lhs_scales, rhs, rhs_scales, _ = args
    lhs, rhs = numbers(lhs, lhs_scales, (1,)), numbers(rhs, rhs_scales, (1, 2))
    out, ends = np.zeros((lhs.shape[0], rhs.shape[1])), np.cumsum(sizes)
    for e, size in enumerate(sizes):
        rows = slice(ends[e] - size, ends[e])
        out[rows] = lhs[rows] @ rhs[e].T
    return out


def expected_wgrad(args, sizes):
    grad, grad_scales, lhs, lhs_scales, _ = args
    grad, lhs, ends = numbers(grad, grad_scales, (1,)), numbers(lhs, lhs_scales, (1,)), np.cumsum(sizes)
    parts = [slice(ends[e] - size, ends[e]) for e, size in enumerate(sizes)]
    return np.stack([grad[:, rows] @ lhs[:, rows].T for rows in parts])


def off(got, want):
    """The largest error, of the largest value."""
    return np.abs(np.asarray(got, np.float64) - want).max() / max(np.abs(want).max(), 1e-30)


@functools.cache
def drawn(lhs=E4M3, rhs=E4M3):
    s = SPEC
    return shapes.draw(shapes.arguments(s.rows, s.inner, s.outer, s.groups, lhs, rhs), 0)


@functools.cache
def drawn_wgrad(grad=E4M3, lhs=E4M3):
    return shapes.draw(shapes.wgrad_arguments(SPEC.rows, 128, 128, SPEC.groups, grad, lhs), 1)


def with_nan(x, used, axis=0):
    """The array on the host, from `used` on replaced."""
    x = np.array(x)
    x[(slice(None),) * axis + (slice(used, None),)] = np.nan
    return x


def poisoned(args, used):
    """Codes and scales of the rows past the groups replaced by NaN."""
    lhs, lhs_scales, rhs, rhs_scales, sizes = args
    return with_nan(lhs, used), with_nan(lhs_scales, used), np.asarray(rhs), np.asarray(rhs_scales), sizes


def poisoned_wgrad(args, used):
    """Codes of the rows past the groups, and the scales of blocks of such rows only, replaced by NaN."""
    grad, grad_scales, lhs, lhs_scales, sizes = args
    codes, scales = (lambda x: with_nan(x, used, 1)), (lambda x: with_nan(x, -(-used // 128), 1))
    return codes(grad), scales(grad_scales), codes(lhs), scales(lhs_scales), sizes


@functools.partial(jax.jit, static_argnames=("implementation", "out_dtype", "config"))
def multiply(*args, implementation, out_dtype=jnp.float32, config=SMALL):
    return scaled_grouped_matmul(*args, implementation=implementation, out_dtype=out_dtype, config=config)


@functools.partial(jax.jit, static_argnames=("implementation", "aligned"))
def multiply_wgrad(*args, total=None, implementation, aligned=False):
    return wgrad(*args, total=total, implementation=implementation, aligned=aligned, config=SMALL_GRAD)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("name", PATTERNS)
def test_plain_implementations_equal_float64(name, implementation):
    sizes = pattern(name, SPEC)
    args = poisoned((*drawn()[:4], sizes), sizes.sum())
    out = multiply(*args, implementation=implementation)
    assert off(out, expected((*drawn()[:4], sizes), sizes)) < EXACT
    args = poisoned_wgrad((*drawn_wgrad()[:4], sizes), sizes.sum())
    assert off(multiply_wgrad(*args, implementation=implementation), expected_wgrad(drawn_wgrad(), sizes)) < EXACT


def test_the_kernel_equals_float64_for_every_pattern_from_one_program():
    """Rows past the groups hold NaN, in codes and scales; no pattern compiles anew; races are looked for."""
    traced = []

    @jax.jit
    def run(*args):
        traced.append(args)
        return scaled_grouped_matmul(*args, implementation="mosaic", out_dtype=jnp.float32, config=SMALL)

    with interpreted():
        for name in ("one_row", *PATTERNS):
            sizes = pattern(name, SPEC)
            out = run(*poisoned((*drawn()[:4], sizes), sizes.sum()))
            assert off(out, expected(drawn(), sizes)) < EXACT, name
            assert not np.asarray(out)[sizes.sum() :].any(), name
    assert len(traced) <= 2  # the interpreter's first call in a process changes JAX's context, hence a second trace


def test_the_gradient_kernel_equals_float64_for_every_pattern_from_one_program():
    traced = []

    @jax.jit
    def run(*args):
        traced.append(args)
        return wgrad(*args, implementation="mosaic", config=SMALL_GRAD)

    with interpreted():
        for name in ("one_row", *PATTERNS):
            sizes = pattern(name, SPEC)
            out = run(*poisoned_wgrad((*drawn_wgrad()[:4], sizes), sizes.sum()))
            assert off(out, expected_wgrad(drawn_wgrad(), sizes)) < EXACT, name
            assert not np.asarray(out)[sizes == 0].any(), name
    assert len(traced) <= 2  # the interpreter's first call in a process changes JAX's context, hence a second trace


@pytest.mark.parametrize("lhs, rhs", [(E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)])
def test_both_formats_mix(lhs, rhs):
    sizes = np.array([100, 0, 129, 27], np.int32)
    args = (*drawn(lhs, rhs)[:4], sizes)
    grads = (*drawn_wgrad(lhs, rhs)[:4], sizes)
    with interpreted():
        assert off(multiply(*args, implementation="mosaic"), expected(args, sizes)) < EXACT
        assert off(multiply_wgrad(*grads, implementation="mosaic"), expected_wgrad(grads, sizes)) < EXACT


def test_the_wide_tile_and_a_bfloat16_result():
    args = shapes.draw(shapes.arguments(256, 384, 256, 2), 2)
    sizes = np.array([127, 65], np.int32)
    with interpreted():
        out = scaled_grouped_matmul(
            *args[:4], sizes, implementation="mosaic", config=Config(columns=256, stages=2, num_sms=1)
        )
    assert out.dtype == jnp.bfloat16
    assert off(out.astype(jnp.float32), expected(args, sizes)) < ROUNDED


def test_the_gradient_in_the_rows_is_the_product_with_the_transposed_weights():
    sizes = np.array([127, 130], np.int32)
    _, _, rhs, rhs_scales, _ = shapes.draw(shapes.arguments(0, 128, 384, 2), 3)
    grad, grad_scales, *_ = shapes.draw(shapes.arguments(264, 384, 128, 2, E5M2), 3)
    codes, scales = transposed(rhs, rhs_scales)
    want = np.zeros((264, 128))
    weights, gradient, start = numbers(rhs, rhs_scales, (1, 2)), numbers(grad, grad_scales, (1,)), 0
    for e, size in enumerate(sizes):
        want[start : start + size] = gradient[start : start + size] @ weights[e]
        start += size
    with interpreted():
        for dtype, limit in ((jnp.float32, EXACT), (jnp.bfloat16, ROUNDED)):
            got = dgrad(grad, grad_scales, codes, scales, sizes, implementation="mosaic", config=SMALL, out_dtype=dtype)
            assert off(got.astype(jnp.float32), want) < limit


@pytest.mark.parametrize("implementation", ["mosaic", "xla", "reference"])
@pytest.mark.parametrize("sizes, aligned", [([256, 0, 128, 0], True), ([100, 0, 200, 65], False)])
def test_weight_gradients_add_to_a_total(implementation, sizes, aligned):
    """An empty group's total stays as it was, bit by bit."""
    sizes = np.array(sizes, np.int32)
    total = jnp.asarray(np.random.default_rng(0).normal(size=(4, 128, 128)) * 1e6, jnp.float32)
    with interpreted():
        args = (*drawn_wgrad()[:4], sizes)
        out = multiply_wgrad(*args, total=total, implementation=implementation, aligned=aligned)
    assert off(out, expected_wgrad(args, sizes) + np.asarray(total, np.float64)) < EXACT
    np.testing.assert_array_equal(np.asarray(out)[sizes == 0], np.asarray(total)[sizes == 0])


def test_a_row_does_not_depend_on_the_buffer_nor_its_neighbours():
    lhs, lhs_scales, rhs, rhs_scales, _ = drawn()
    run = functools.partial(multiply, implementation="mosaic")
    with interpreted():
        out = run(lhs, lhs_scales, rhs, rhs_scales, np.array([10, 200, 0, 100], np.int32))
        some = slice(10, 210)
        alone = run(lhs[some], lhs_scales[some], rhs, rhs_scales, np.array([0, 200, 0, 0], np.int32))
    np.testing.assert_array_equal(out[some], alone)


@pytest.mark.parametrize("rows", [0, 1, 50, 131])
def test_any_number_of_rows(rows):
    """Fewer than a tile, and no multiple of the eight that shared memory is swizzled in."""
    lhs, lhs_scales, rhs, rhs_scales, _ = drawn()
    args = lhs[:rows], lhs_scales[:rows], rhs, rhs_scales, np.array([0, rows, 0, 0], np.int32)
    with interpreted():
        out = multiply(*args, implementation="mosaic")
    assert out.shape == (rows, SPEC.outer)
    assert rows == 0 or off(out, expected(args, args[-1])) < EXACT


@pytest.mark.parametrize("implementation", ["xla", "reference", "mosaic"])
def test_no_rows_give_no_weight_gradient(implementation):
    args = shapes.draw(shapes.wgrad_arguments(0, 128, 128, 4), 0)
    with interpreted():
        out = wgrad(*args, implementation=implementation, config=SMALL_GRAD)
    assert out.shape == (4, 128, 128)
    assert not np.asarray(out).any()


def test_codes_refuse_to_be_differentiated():
    lhs, lhs_scales, rhs, rhs_scales, sizes = drawn()
    loss = lambda scales: scaled_grouped_matmul(lhs, scales, rhs, rhs_scales, sizes).astype(jnp.float32).sum()
    with pytest.raises(TypeError, match="use dgrad and wgrad"):
        jax.grad(loss)(lhs_scales)


def test_what_does_not_fit_is_named():
    lhs, lhs_scales, rhs, rhs_scales, sizes = drawn()
    with pytest.raises(ValueError, match=r"lhs_scales must be float32 \[384, 3\], got float32 \[3, 384\]"):
        scaled_grouped_matmul(lhs, lhs_scales.T, rhs, rhs_scales, sizes)
    with pytest.raises(ValueError, match="lhs' K = 384"):
        scaled_grouped_matmul(lhs, lhs_scales, rhs.swapaxes(1, 2), rhs_scales, sizes)
    with pytest.raises(ValueError, match="got bfloat16 and float8_e4m3fn"):
        scaled_grouped_matmul(lhs.astype(jnp.bfloat16), lhs_scales, rhs, rhs_scales, sizes)
    with pytest.raises(ValueError, match="bfloat16 or float32, got float16"):
        scaled_grouped_matmul(lhs, lhs_scales, rhs, rhs_scales, sizes, out_dtype=jnp.float16)
    grad, grad_scales, other, other_scales, _ = drawn_wgrad()
    with pytest.raises(ValueError, match="same rows, got 384 and 256"):
        wgrad(grad, grad_scales, other[:, :256], other_scales[:, :2], sizes)
    with pytest.raises(ValueError, match="multiple of 128, got 300"):
        wgrad(grad[:, :300], grad_scales, other[:, :300], other_scales, sizes)
    with pytest.raises(ValueError, match="fewer stages"):
        Config(columns=256, stages=5)
    with pytest.raises(ValueError, match="fewer stages"):
        GradConfig(stages=8)


def test_the_kernel_runs_where_it_says_so():
    assert "this device is 'cpu'" in implementations()["mosaic"]
    with pytest.raises(NotImplementedError, match="Hopper GPUs, this device is 'cpu'"):
        scaled_grouped_matmul(*drawn(), implementation="mosaic")
    with interpreted():
        assert implementations()["mosaic"] == ""
        with pytest.raises(NotImplementedError, match="doesn't divide N = 128"):
            scaled_grouped_matmul(*drawn(), implementation="mosaic", config=Config(columns=256))


def test_codes_are_the_formats_of_ml_dtypes():
    """What NumPy reads as a code's value is what the oracle multiplies."""
    assert np.asarray(drawn()[0]).dtype == ml_dtypes.float8_e4m3fn
    assert np.asarray(drawn(E5M2)[0]).dtype == ml_dtypes.float8_e5m2
