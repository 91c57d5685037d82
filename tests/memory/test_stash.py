"""The activation stash against plain autodiff of the same layers: the same bits, and memory for what is used."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from mesh import build_mesh, collectives, fold, sharded
from moex.memory.stash import empty, sink, stashed
from pallas_kernels.grouped_matmul import grouped_matmul

LAYERS, ROWS, D, F, E = 5, 96, 16, 24, 3
USED = np.array(
    [[31, 60, 7], [0, 0, 0], [1, 0, 0], [90, 3, 3], [20, 20, 20]], np.int32
)  # rows of each expert, by layer
ALL_USED = int(USED.sum())


def expert(ints, rows, others):
    """Two grouped matmuls and an activation, as experts are."""
    (sizes,), (x, w), (up, down) = ints, rows, others
    hidden = grouped_matmul(x, up, sizes)
    return grouped_matmul(jax.nn.silu(hidden) * w[:, None], down, sizes)


@jax.custom_vjp
def in_float8(x, w):
    return x @ w


def _rounded(x, w):
    codes = x.astype(jnp.float8_e4m3fn)
    return codes.astype(jnp.float32) @ w, (codes, w)


in_float8.defvjp(_rounded, lambda kept, g: (g @ kept[1].T, kept[0].astype(jnp.float32).T @ g))


def float8_expert(ints, rows, others):
    """Keeps its input as FP8 codes."""
    (sizes,), (x, w), (up, down) = ints, rows, others
    in_use = (jnp.arange(x.shape[0]) < sizes.sum())[:, None]
    return jnp.where(in_use, in_float8(in_float8(x, up[0]) * w[:, None], down[0]), 0)


def loss(weights, x, sizes, *, function, capacity, checkpoint, axes=()):
    """A scan over layers that each put some rows of x through the experts. capacity 0: without a stash."""
    ints, others = (sizes[0],), tuple(w[0] for w in weights)
    rows = lambda x: (x, jnp.cos(x.sum(axis=1)))
    stash = empty(function, capacity, ints, rows(x), others, axes) if capacity else None

    def layer(carry, one):
        x, stash = carry
        sizes, *others = one
        # The grouped matmul takes no notice of what stands past its last row.
        real = jnp.where((jnp.arange(ROWS) < sizes.sum())[:, None], x, jnp.nan if function is expert else 0)
        if stash is None:
            y = function((sizes,), rows(real), tuple(others))
        else:
            y, stash = stashed(function, capacity)(stash, sizes.sum(), (sizes,), rows(real), tuple(others))
        return (jnp.tanh(x + y), stash), None

    (x, stash), _ = lax.scan(jax.checkpoint(layer) if checkpoint else layer, (x, stash), (sizes, *weights))
    x = x if stash is None else sink(x, stash)
    return collectives.psum((x @ jnp.arange(1.0, D + 1)).sum(), axes)


def arguments(seed=0):
    up, down, x = (
        jax.random.normal(jax.random.key(seed + i), s)
        for i, s in enumerate([(LAYERS, E, D, F), (LAYERS, E, F, D), (ROWS, D)])
    )
    return (up / 4, down / 4), x, jnp.array(USED)


@functools.cache
def gradients(function, capacity, checkpoint):
    program = jax.jit(
        jax.value_and_grad(
            functools.partial(loss, function=function, capacity=capacity, checkpoint=checkpoint), argnums=(0, 1)
        )
    )
    return jax.device_get(program(*arguments()))


@pytest.mark.parametrize("checkpoint", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("function", [expert, float8_expert], ids=["float32", "float8"])
@pytest.mark.parametrize("capacity", [ALL_USED, LAYERS * ROWS], ids=["tight", "worst"])
def test_gradients_have_the_bits_of_plain_autodiff(function, checkpoint, capacity):
    ours, theirs = gradients(function, capacity, checkpoint), gradients(function, 0, checkpoint)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert all(np.isfinite(g).all() and np.abs(g).max() > 0 for g in jax.tree.leaves(ours))


def test_pools_hold_each_array_once_and_arguments_not_at_all():
    def squared(ints, rows, others):
        (x, _), (up, down) = rows, others
        hidden = grouped_matmul(x, up, ints[0])
        return grouped_matmul(hidden, down, ints[0]) + grouped_matmul(hidden, 2 * down, ints[0])

    weights, x, sizes = arguments()
    ints, rows, others = (sizes[0],), (x, x[:, 0]), tuple(w[0] for w in weights)
    stash = empty(squared, ALL_USED, ints, rows, others, ())
    height = ALL_USED + ROWS
    assert {key: p.shape for key, p in stash.pool.items()} == {
        ("float32", (D,)): (height, D),
        ("float32", (F,)): (height, F),
    }
    codes = empty(float8_expert, ALL_USED, ints, rows, others, ())
    assert {key[0] for key in codes.pool} == {"float32", "float8_e4m3fn"}


def test_nothing_of_a_buffers_size_is_kept_in_every_layer():
    for checkpoint in (False, True):
        function = functools.partial(loss, function=expert, capacity=ALL_USED, checkpoint=checkpoint)
        text = str(jax.make_jaxpr(jax.grad(function))(*arguments()))
        assert f"[{ROWS},{F}]" in text and f"[{LAYERS},{ROWS},{F}]" not in text, "hidden rows"
        for number in range(1, 5):
            assert f"[{LAYERS},{number * (ALL_USED + ROWS)}," not in text, "a pool"
    plain = functools.partial(loss, function=expert, capacity=0, checkpoint=False)
    assert f"[{LAYERS},{ROWS},{F}]" in str(jax.make_jaxpr(jax.grad(plain))(*arguments()))


def test_a_stash_too_small_says_so_and_spoils_only_gradients():
    weights, x, sizes = arguments()

    def run(stash_rows):
        def layer(carry, one):
            x, stash = carry
            sizes, *others = one
            y, stash = stashed(expert, stash_rows)(stash, sizes.sum(), (sizes,), (x, x[:, 0]), tuple(others))
            return (jnp.tanh(x + y), stash), None

        stash = empty(expert, stash_rows, (sizes[0],), (x, x[:, 0]), tuple(w[0] for w in weights), ())
        (y, stash), _ = lax.scan(layer, (x, stash), (sizes, *weights))
        return y, stash.at

    (y, at), (y_small, at_small) = (
        jax.jit(run, static_argnums=0)(ALL_USED),
        jax.jit(run, static_argnums=0)(ALL_USED - 1),
    )
    assert at == at_small == ALL_USED and at_small > ALL_USED - 1
    np.testing.assert_array_equal(y, y_small)


def test_every_device_has_offsets_of_its_own():
    """Eight devices whose experts are used unevenly; weights are replicated, so their gradients are sums over devices."""
    folded = fold(dict(dp=8), dict(edp=8))
    mesh = build_mesh(folded, jax.devices())
    weights, x, _ = arguments()
    rng = np.random.default_rng(3)
    sizes = rng.integers(0, ROWS // E + 1, (8, LAYERS, E)).astype(np.int32)
    most = int(sizes.sum(axis=(1, 2)).max())
    x = jax.random.normal(jax.random.key(5), (8, ROWS, D))

    def gradients(capacity):
        def local(weights, x, sizes):
            options = dict(function=expert, capacity=capacity, checkpoint=True, axes=folded.names)
            return jax.value_and_grad(functools.partial(loss, **options), argnums=(0, 1))(weights, x[0], sizes[0])

        spec = P(folded.names)
        program = sharded(local, mesh, (P(), spec, spec), (P(), (P(), spec)))
        return jax.device_get(jax.jit(program)(weights, x, sizes))

    jax.tree.map(np.testing.assert_array_equal, gradients(most), gradients(0))
