"""Gradients of an op inside shard_map over two devices against those of the same op on one device, on the whole batch."""

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from mesh import ALONE, Fold, build_mesh, collectives, fold, sharded
from mesh.vma import varying
from moex.layers import param
from moex.layers.context import zigzag_order
from tests.quick import quick_jit

ROUNDING = 1e-6


class Case(NamedTuple):
    """One op and what it is called with.

    call: (fold, weights, inputs) -> any tree; its arrays are parts of the output, its scalars totals, equal everywhere.
    axis: dp, which splits dim 0 of inputs and outputs, or cp or tp, which split dim 1.
    expert: the other factorisation of the two devices.
    declared: declarations of the weights, by which each device is handed its part of a replicated weight.
    whole: inputs that are never split.
    exact: all values are whole numbers and sums exact in any order, so gradients must be equal bit by bit.
    communicates: devices exchange parts, so two that hold equal inputs would count them twice.
    within: what the op is traced and run in.
    """

    call: Callable[[Fold, Any, Mapping[str, Any]], Any]
    weights: Any
    inputs: Mapping[str, Any]
    axis: str = "dp"
    expert: Mapping[str, int] = dict(edp=2)
    declared: Any = None
    whole: tuple[str, ...] = ()
    exact: bool = False
    communicates: bool = False
    within: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext

    @property
    def dim(self) -> int:
        return 0 if self.axis == "dp" else 1

    @property
    def floats(self) -> dict[str, Any]:
        """The inputs that have a gradient."""
        return {name: x for name, x in self.inputs.items() if jnp.issubdtype(x.dtype, jnp.inexact)}

    def dealt(self, x):
        """The array in the order in which two devices split it: context parallelism deals in zig-zag halves."""
        return x[:, zigzag_order(x.shape[1], 2)] if self.axis == "cp" else x


def part(x, axes, dim: int):
    """This device's part of an array that all devices hold."""
    size = x.shape[dim] // collectives.axis_size(axes)
    return jax.lax.dynamic_slice_in_dim(x, collectives.axis_index(axes) * size, size, dim) if axes else x


def held(case: Case, weights, folded: Fold):
    """The weights as the device's op takes them: whole, or the part that its declared view axes leave it."""
    if case.declared is None:
        return weights

    def cut(x, placement):
        for dim, axes in enumerate(placement.dims):
            x = part(x, axes, dim)
        return x

    return jax.tree.map(cut, weights, param.placements(case.declared, folded))


def gradient_function(case: Case, mode: str):
    """(weights, inputs, cotangents) -> gradients of the sum of outputs times cotangents, in weights and float inputs.

    mode: alone; split, where inputs lie over both devices; replicated, where both hold all of them. Weights are equal on
    both devices in any case.
    """
    folded = ALONE if mode == "alone" else fold({case.axis: 2}, case.expert)
    axes = folded.names
    takes_part = mode == "replicated" and case.communicates
    own = lambda x: part(case.dealt(x), axes, case.dim)

    def local(weights, inputs, cotangents):
        def loss(weights, floats):
            given = dict(inputs) | floats
            if takes_part:
                given = {name: x if name in case.whole else own(x) for name, x in given.items()}
            total = sums = jnp.float32(0)
            out = jax.tree.leaves(case.call(folded, held(case, weights, folded), given))
            for y, c in zip(out, cotangents, strict=True):
                if y.ndim == 0:
                    total += y * c
                else:
                    sums += (y * (own(c) if takes_part else c)).sum()
            if mode == "split" or takes_part:
                return total + collectives.psum(sums, axes)
            assert not varying(sums), f"equal inputs on all devices gave outputs typed as varying over {varying(sums)}"
            return total + sums

        return jax.grad(loss, argnums=(0, 1))(weights, {name: inputs[name] for name in case.floats})

    if mode == "alone":
        return local
    parts = P(axes) if case.dim == 0 else P(None, axes)
    spec = lambda whole: P() if whole or mode == "replicated" else parts
    specs = {name: spec(name in case.whole) for name in case.inputs}
    out_specs = P(), {name: specs[name] for name in case.floats}
    cotangent_specs = [spec(np.ndim(c) == 0) for c in cotangents_of(case)]
    return sharded(local, build_mesh(folded, jax.devices()[:2]), (P(), specs, cotangent_specs), out_specs)


def gradients(case: Case, mode: str):
    """What `gradient_function` gives, tokens in the order of the case's inputs."""
    with case.within():
        inputs, cotangents = dict(case.inputs), cotangents_of(case)
    if mode == "split":
        inputs = {name: x if name in case.whole else case.dealt(x) for name, x in inputs.items()}
        cotangents = [c if np.ndim(c) == 0 else case.dealt(c) for c in cotangents]
    with case.within():
        run = quick_jit(gradient_function(case, mode))
        of_weights, of_inputs = jax.device_get(run(case.weights, inputs, cotangents))
    if mode == "split" and case.axis == "cp":
        back = lambda x: x[:, np.argsort(zigzag_order(x.shape[1], 2))]
        of_inputs = {name: x if name in case.whole else back(x) for name, x in of_inputs.items()}
    return of_weights, of_inputs


def cotangents_of(case: Case) -> list[np.ndarray]:
    """A number for each output: small and whole for exact cases, so that products and sums are exact."""
    out = jax.tree.leaves(jax.eval_shape(functools.partial(case.call, ALONE), case.weights, case.inputs))
    rng = np.random.default_rng(5)
    draw = (lambda shape: rng.integers(-3, 4, shape)) if case.exact else (lambda shape: rng.normal(size=shape))
    return [np.asarray(draw(y.shape), np.float32) for y in out]


def check(case: Case) -> None:
    """Raises AssertionError where a gradient differs from one device's (or is zero throughout and proves nothing)."""
    there = gradients(case, "alone")
    for mode in ("split", "replicated"):

        def same(path, got, want, mode=mode):
            name, largest = f"{mode}, {jax.tree_util.keystr(path)}", np.abs(want).max()
            assert largest > 0, f"{name}: the gradient is zero, so this case shows nothing"
            if case.exact:
                np.testing.assert_array_equal(got, want, err_msg=name)
            else:
                error = np.abs(got - want).max() / largest
                assert error <= ROUNDING, f"{name}: off by {error} of the largest"

        jax.tree_util.tree_map_with_path(same, gradients(case, mode), there)
