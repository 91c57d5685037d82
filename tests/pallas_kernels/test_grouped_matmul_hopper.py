"""The bfloat16 kernels for Hopper GPUs in the interpreter, forward and both gradients, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import hopper
from pallas_kernels.grouped_matmul import HopperConfig, grouped_matmul, implementations
from pallas_kernels.grouped_matmul.specs import PATTERNS, Spec, forward_and_backward, pattern
from tests.pallas_kernels.interpreter import interpreted
from tests.pallas_kernels.test_grouped_matmul import arrays, oracle

SPEC = Spec(rows=256, groups=4, inner=256, outer=128)  # 4 and 2 steps of the summed dim, 3 slots in the ring
SMALL = HopperConfig(columns=128, stages=3, num_sms=2)
NAMES = ("out", "gradient in lhs", "gradient in rhs")


def on_hopper(*args, **options):
    options = dict(config=SMALL) | options
    return jax.jit(functools.partial(forward_and_backward, implementation="mosaic", **options))(*args)


def with_nan(x, used):
    """The array on the host, rows from `used` on replaced."""
    x = np.array(x)
    x[used:] = np.nan
    return x


def compare(got, want, limit):
    for name, x, y in zip(NAMES, got, want, strict=True):
        error = np.abs(np.asarray(x, np.float64) - y).max() / max(np.abs(y).max(), 1e-30)
        assert error < limit, f"{name}: off by {error} of the largest"


def test_every_pattern_from_one_program_with_nan_past_the_groups():
    lhs, rhs, g = arrays(SPEC, jnp.bfloat16)
    traced = []

    @jax.jit
    def run(*args):
        traced.append(args)
        return forward_and_backward(*args, implementation="mosaic", config=SMALL)

    with interpreted():
        for name in ("one_row", *PATTERNS):
            sizes = pattern(name, SPEC)
            used = int(sizes.sum())
            got = run(with_nan(lhs, used), np.asarray(rhs), sizes, with_nan(g, used))
            compare(got, oracle(lhs, rhs, sizes, g), 4e-3)
            assert not np.asarray(got[0][used:]).any(), name
            assert not np.asarray(got[1][used:]).any(), name
            assert not np.asarray(got[2])[sizes == 0].any(), name
    assert len(traced) <= 2  # the interpreter's first call in a process changes JAX's context, hence a second trace


def test_a_float32_result_is_exact():
    """The sums, that is: the operands are bfloat16, and so are both gradients."""
    lhs, rhs, g = arrays(SPEC, jnp.bfloat16)
    sizes = np.array([127, 1, 0, 100], np.int32)
    with interpreted():
        out = grouped_matmul(lhs, rhs, sizes, implementation="mosaic", config=SMALL, preferred_element_type=jnp.float32)
    compare((out,) * 3, (oracle(lhs, rhs, sizes, g)[0],) * 3, 1e-5)


def test_the_wide_tile():
    spec = Spec(rows=160, groups=2, inner=256, outer=256)
    lhs, rhs, g = arrays(spec, jnp.bfloat16)
    sizes = np.array([30, 129], np.int32)
    with interpreted():
        got = on_hopper(lhs, rhs, sizes, g, config=HopperConfig(stages=2, num_sms=1))
    compare(got, oracle(lhs, rhs, sizes, g), 4e-3)


def test_a_row_does_not_depend_on_the_buffer_nor_its_neighbours():
    lhs, rhs, _ = arrays(SPEC, jnp.bfloat16)
    run = jax.jit(functools.partial(grouped_matmul, implementation="mosaic", config=SMALL))
    with interpreted():
        out = run(lhs, rhs, np.array([10, 0, 200, 30], np.int32))
        alone = run(lhs[10:210], rhs, np.array([0, 0, 200, 0], np.int32))
    np.testing.assert_array_equal(out[10:210], alone)


@pytest.mark.parametrize("rows", [0, 1, 70])
def test_fewer_rows_than_a_tile(rows):
    lhs, rhs, g = (x[:rows] if x.ndim == 2 else x for x in arrays(SPEC, jnp.bfloat16))
    sizes = np.array([0, rows, 0, 0], np.int32)
    with interpreted():
        got = on_hopper(lhs, rhs, sizes, g)
    assert [x.shape for x in got] == [g.shape, lhs.shape, rhs.shape]
    if rows:
        compare(got, oracle(lhs, rhs, sizes, g), 4e-3)
    else:
        assert not np.asarray(got[2]).any()


@pytest.mark.parametrize(
    "change, reason",
    [
        (dict(dtype=jnp.float32), "bfloat16, not float32"),
        (dict(inner=200), "multiples of 128, got K = 200 and N = 128"),
        (dict(config=HopperConfig()), "multiples of 256, got K = 256 and N = 128"),
        (dict(preferred_element_type=jnp.float16), "bfloat16 or float32, not float16"),
    ],
)
def test_what_the_kernels_cannot_do_is_named_and_passed_over(change, reason):
    dtype, inner = change.pop("dtype", jnp.bfloat16), change.pop("inner", SPEC.inner)
    lhs, rhs, _ = arrays(Spec(rows=8, groups=4, inner=inner, outer=128), dtype)
    sizes = np.array([3, 0, 4, 1], np.int32)
    with interpreted():
        with pytest.raises(NotImplementedError, match=reason):
            grouped_matmul(lhs, rhs, sizes, implementation="mosaic", **change)
        change.pop("config", None)
        if dtype == jnp.float32 or inner != SPEC.inner or change:
            out = grouped_matmul(lhs, rhs, sizes, **change)
            np.testing.assert_array_equal(out, grouped_matmul(lhs, rhs, sizes, implementation="xla", **change))


@pytest.mark.parametrize(
    "kind, runs",
    [
        ("NVIDIA H100 80GB HBM3", True),
        ("NVIDIA H200", True),
        ("NVIDIA GH200 480GB", True),
        ("NVIDIA H20", True),
        ("NVIDIA B200", False),
        ("NVIDIA A100-SXM4-80GB", False),
        ("NVIDIA H2000", False),
        ("cpu", False),
    ],
)
def test_the_kernels_are_for_the_device_that_is_compiled_for(kind, runs):
    device = AbstractDevice(device_kind=kind, num_cores=132, platform="cuda")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        assert (implementations()["mosaic"] == "") == runs
        assert runs or kind in hopper.unavailable()


def test_outside_the_interpreter_the_kernels_are_refused_here():
    lhs, rhs, _ = arrays(SPEC, jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="Hopper GPUs, this device is 'cpu'"):
        grouped_matmul(lhs, rhs, pattern("even", SPEC), implementation="mosaic")


def test_configurations_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="columns=192 must be 128 or 256"):
        HopperConfig(columns=192)
    with pytest.raises(ValueError, match="num_sms=0"):
        HopperConfig(num_sms=0)
    with pytest.raises(ValueError, match="fewer stages"):
        HopperConfig(columns=256, stages=5)
    assert HopperConfig.of(768).columns == 256
    assert HopperConfig.of(640).columns == 128
