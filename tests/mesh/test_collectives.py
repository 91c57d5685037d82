"""Collectives over views: identity over nothing, exact gradients of parameters, sums in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mesh import build_mesh, collectives, fold, sharded
from mesh.vma import typed, unvary, vary, varying

IDENTITIES = {
    "all_gather": lambda x: collectives.all_gather(x, (), dim=0),
    "psum": lambda x: collectives.psum(x, ()),
    "pmax": lambda x: collectives.pmax(x, ()),
    "psum_scatter": lambda x: collectives.psum_scatter(x, (), dim=1),
    "all_to_all": lambda x: collectives.all_to_all(x, (), split_dim=0, concat_dim=1),
    "gather": lambda x: collectives.gather(x, (), (), 0, jnp.float32),
    "reduce_gradient": lambda x: collectives.reduce_gradient(x, (), (), 0),
}


@pytest.mark.parametrize("name", IDENTITIES)
def test_identity_over_an_empty_view(name):
    x = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(IDENTITIES[name](x), x)
    np.testing.assert_array_equal(jax.grad(lambda x: IDENTITIES[name](x).sum())(x), np.ones((2, 3)))
    assert collectives.axis_size(()) == 1
    assert int(collectives.axis_index(())) == 0


@pytest.fixture(scope="module")
def eight(devices):
    """dp=2 x cp=2 x tp=2 over 8 devices, every axis an atom of its own; ep is cp and tp."""
    folded = fold(dict(dp=2, cp=2, tp=2), dict(edp=2, ep=2, etp=2))
    return folded, build_mesh(folded, devices)


def run(mesh, function, in_specs, out_specs, *arrays):
    return jax.jit(sharded(function, mesh, in_specs, out_specs))(*arrays)


def test_index_counts_the_view_outer_axis_slowest(eight):
    folded, mesh = eight
    axes = folded.dense.cp + folded.dense.tp
    number = lambda: collectives.axis_index(axes)[None] * 10 + collectives.axis_size(axes)
    out = run(mesh, number, (), P(folded.names))
    np.testing.assert_array_equal(out, [4, 14, 24, 34] * 2)


def test_collectives_do_what_they_say(eight):
    folded, mesh = eight
    tp = folded.dense.tp
    x = jnp.arange(64.0).reshape(16, 4)  # 2 rows a device
    whole = np.asarray(x).reshape(4, 2, 2, 4)  # outer, tp, row, column

    def all_of_them(x):
        return (
            collectives.all_gather(x, tp, dim=0),
            collectives.psum(x, tp),
            collectives.pmax(x, tp),
            collectives.psum_scatter(x, tp, dim=1),
            collectives.all_to_all(x, tp, split_dim=1, concat_dim=0),
        )

    outer = folded.dense.dp + folded.dense.cp
    specs = (P(folded.names), P(outer), P(outer), P(outer, tp), P(folded.names))
    gathered, total, largest, scattered, exchanged = run(mesh, all_of_them, P(folded.names), specs, x)
    np.testing.assert_array_equal(np.asarray(gathered).reshape(4, 2, 4, 4)[:, 0], whole.reshape(4, 4, 4))
    np.testing.assert_array_equal(np.asarray(gathered).reshape(4, 2, 4, 4)[:, 1], whole.reshape(4, 4, 4))
    np.testing.assert_array_equal(total, whole.sum(axis=1).reshape(8, 4))
    np.testing.assert_array_equal(largest, whole.max(axis=1).reshape(8, 4))
    np.testing.assert_array_equal(scattered, whole.sum(axis=1).reshape(8, 4))
    want = np.stack([whole.reshape(4, 4, 4)[:, :, :2], whole.reshape(4, 4, 4)[:, :, 2:]], axis=1)
    np.testing.assert_array_equal(np.asarray(exchanged).reshape(4, 2, 4, 2), want)


# Small whole numbers: every float32 sum is exact, so gradients can be compared bit by bit.
W = np.random.default_rng(0).integers(-4, 5, (8, 6)).astype(np.float32)
X = np.random.default_rng(1).integers(-4, 5, (64, 8)).astype(np.float32)


def parameter_gradient(folded, mesh, w_spec, zero, replicated, dtype):
    """d/dw of sum_t (x_t w)^2 / 2 with tokens split over every device; w enters by `gather`."""

    def local(shard, x):
        loss = lambda shard: (
            0.5
            * jnp.square(
                jnp.dot(x.astype(dtype), collectives.gather(shard, zero, replicated, 0, dtype)).astype(jnp.float32)
            ).sum()
        )
        value, grad = jax.value_and_grad(loss)(shard)
        return collectives.psum(value, folded.names), grad

    return run(mesh, local, (w_spec, P(folded.names)), (P(), w_spec), W, X)


@pytest.mark.parametrize("split", ["all", "cp tp", "none"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradient_of_a_gathered_parameter_is_exact(eight, split, dtype):
    folded, mesh = eight
    zero = dict(all=folded.names, none=()).get(split, folded.dense.cp + folded.dense.tp)
    replicated = tuple(a for a in folded.names if a not in zero)
    value, grad = parameter_gradient(folded, mesh, P(zero), zero, replicated, dtype)
    y = X @ W
    if dtype == jnp.float32:
        assert float(value) == 0.5 * np.square(y).sum()
    y = np.asarray(jnp.asarray(y, dtype), np.float32)  # the cotangent is rounded to the compute dtype, nothing else is
    locals_ = [xs.T @ ys for xs, ys in zip(X.reshape(8, 8, 8), y.reshape(8, 8, 6), strict=True)]
    # Each device's product leaves in the compute dtype; the sum over devices is float32, so it is exact here.
    want = sum(np.asarray(jnp.asarray(part, dtype), np.float32) for part in locals_)
    assert grad.dtype == jnp.float32
    np.testing.assert_array_equal(grad, want)


def reductions(jaxpr):
    """(primitive, dtype) of every reducing collective in a jaxpr and those inside it."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name.startswith(("psum", "reduce_scatter")) and eqn.invars:
            yield eqn.primitive.name, eqn.invars[0].aval.dtype
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from reductions(inner)


def test_gradients_are_reduced_in_float32_whatever_the_compute_dtype(eight):
    folded, mesh = eight
    zero, replicated = folded.dense.tp, folded.dense.dp + folded.dense.cp

    def local(shard, x):
        loss = lambda shard: jnp.dot(x, collectives.gather(shard, zero, replicated, 0, jnp.bfloat16)).sum()
        return jax.grad(lambda s: loss(s).astype(jnp.float32))(shard)

    function = sharded(local, mesh, (P(zero), P(folded.names)), P(zero))
    found = list(reductions(jax.make_jaxpr(function)(W, X.astype(jnp.bfloat16)).jaxpr))
    assert any(name.startswith("reduce_scatter") for name, _ in found), found
    assert any(name.startswith("psum") for name, _ in found), found
    assert {dtype for _, dtype in found} == {jnp.dtype(jnp.float32)}, found


def test_float32_sums_keep_what_bfloat16_would_lose(eight):
    """Eight devices' gradients 256, 1, 1, ...: bfloat16 partial sums would stay at 256."""
    folded, mesh = eight
    g = jnp.ones((8, 1), jnp.bfloat16).at[0].set(256)
    out = run(mesh, lambda g: collectives.reduce_gradient(g, (), folded.names, 0), P(folded.names), P(), g)
    assert float(out[0, 0]) == 263.0


def test_activations_are_scattered_and_gathered_back_with_float32_sums(eight):
    """bfloat16 in and out; 256 + 1 + ... + 1 (263) rounds to 264 once, and so does the gradient of an all-gather."""
    folded, mesh = eight
    g = jnp.ones((8, 8), jnp.bfloat16).at[0].set(256)  # a row is one device's

    def local(g):
        scattered = collectives.psum_scatter(g[0], folded.names, dim=0)
        pull = jax.vjp(lambda x: collectives.all_gather(x, folded.names, dim=0), g[0, :1])[1]
        back = jax.vjp(lambda x: collectives.psum_scatter(x, folded.names, dim=0), g[0])[1](scattered)
        return scattered, pull(g[0])[0], back[0][None]

    split = P(folded.names)
    scattered, gradient, back = run(mesh, local, split, (split, split, split), g)
    assert scattered.dtype == gradient.dtype == back.dtype == jnp.bfloat16
    np.testing.assert_array_equal(scattered.astype(jnp.float32), np.full(8, 264))
    np.testing.assert_array_equal(gradient.astype(jnp.float32), np.full(8, 264))
    np.testing.assert_array_equal(back.astype(jnp.float32), np.full((8, 8), 264))


def test_vary_adds_types_and_its_transpose_sums(eight):
    folded, mesh = eight
    tp = folded.dense.tp

    def local(w, x):
        assert varying(w) == frozenset()
        assert varying(vary(w, tp)) == frozenset(tp)
        assert varying(w, x) == frozenset(folded.names)
        return jax.grad(lambda w: (vary(w, folded.names) * x).sum())(w)

    grad = run(mesh, local, (P(), P(folded.names)), P(), jnp.float32(2), jnp.arange(8.0))
    assert float(grad) == 28.0


# --- typed and unvary: two devices, a replicated weight, a split input -------------------------------------------------


@pytest.fixture(scope="module")
def two(devices):
    folded = fold(dict(dp=2), dict(edp=2))
    return folded, build_mesh(folded, devices[:2])


def host_matmul(a, b):
    """Stands for a kernel: what comes back is typed as equal on all devices, whatever went in."""
    shape = jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), a.dtype)
    return jax.pure_callback(lambda a, b: np.asarray(a) @ np.asarray(b), shape, a, b)


def as_op(kernel):
    """A matmul whose products, forward and backward, are the kernel's."""
    op = jax.custom_vjp(kernel)
    op.defvjp(
        lambda x, w: (kernel(x, w), (x, w)),
        lambda kept, g: (unvary(kernel(g, kept[1].T), kept[0]), unvary(kernel(kept[0].T, g), kept[1])),
    )
    return op


OPS = {
    "no kernel": jnp.dot,
    "own rule": as_op(jnp.dot),
    "kernel": as_op(typed(host_matmul)),
    "kernel, typed around too": typed(as_op(typed(host_matmul))),
}
BIAS = np.arange(6, dtype=np.float32)


@pytest.mark.parametrize("name", OPS)
def test_replicated_weights_get_the_sum_of_both_devices(two, name):
    """Rows of x over two devices; w before the op and the bias behind it equal on both. Whole numbers: exact."""
    folded, mesh = two
    loss = lambda x, w, b: 0.5 * jnp.square(OPS[name](x, w) + b[None]).sum()
    local = jax.grad(loss, argnums=(0, 1, 2))
    rows = P(folded.names)
    dx, dw, db = run(mesh, local, (rows, P(), P()), (rows, P(), P()), X, W, BIAS)
    y = X @ W + BIAS
    np.testing.assert_array_equal(dx, y @ W.T)
    np.testing.assert_array_equal(dw, X.T @ y)
    np.testing.assert_array_equal(db, y.sum(axis=0))


def test_typed_restores_what_a_kernel_forgot(two):
    folded, mesh = two
    seen = []

    def kernel(x, w):
        seen.append((varying(x), varying(w)))
        return dict(y=jnp.zeros((32, 6)), z=[jnp.zeros((2,))])  # new arrays are invariant: what a kernel's outputs are

    def local(x, w):
        out = typed(kernel)(x, w)
        assert {varying(leaf) for leaf in jax.tree.leaves(out)} == {frozenset(folded.names)}
        return out["y"]

    run(mesh, local, (P(folded.names), P()), P(folded.names), X, W)
    assert seen == [(frozenset(folded.names),) * 2]


def test_unvary_sums_only_what_the_primal_lacks(two):
    folded, mesh = two
    g = jnp.array([1.0, 2.0])
    local = lambda g, x: (unvary(g, jnp.float32(0)), unvary(g, x))
    summed, kept = run(mesh, local, (P(folded.names),) * 2, (P(), P(folded.names)), g, g)
    np.testing.assert_array_equal(summed, [3.0])
    np.testing.assert_array_equal(kept, g)


def test_shard_map_always_checks_types(two):
    """A result that differs between devices cannot be passed off as equal."""
    folded, mesh = two
    with pytest.raises(ValueError, match=r"(?i)replicat|vary|varies|out_specs"):
        run(mesh, lambda x: x[:1], P(folded.names), P(), jnp.arange(2.0))
