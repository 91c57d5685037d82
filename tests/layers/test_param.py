"""Declarations: one tree gives shapes, placements and initial values, and values don't depend on the mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from mesh import build_mesh, fold
from moex.layers import param
from moex.layers.param import declare


class Toy(nnx.Module):
    """One parameter of each kind."""

    def __init__(self):
        self.plain = declare(16, 32, axes=(None, "tp"))
        self.out = declare(32, 16, axes=("tp", None), init="output")
        self.experts = declare(8, 16, 4, axes=("ep", None, None), slices=1)
        self.scale = declare(16, axes=(None,), init="ones", float32=True, decays=False)
        self.shift = declare(16, axes=(None,), init="zeros")
        self.table = declare(24, 8, axes=("tp", None), valid_rows=21)


DECLARED = dict(toy=param.declarations(Toy(), stacked=3), one=param.declarations(Toy()))


def test_shapes_and_names():
    shapes = jax.tree.map(lambda x: x.shape, param.abstract(DECLARED))
    assert shapes["toy"]["experts"] == (3, 8, 16, 4)
    assert shapes["one"]["plain"] == (16, 32)
    names = []
    param.named_map(lambda name, _: names.append(name), DECLARED)
    assert {"toy.experts", "one.scale"} <= set(names)
    assert len(set(names)) == 12


@pytest.mark.parametrize(
    "dense, expert",
    [
        (dict(dp=8), dict(edp=8)),
        (dict(dp=2, cp=2, tp=2), dict(ep=8)),
        (dict(dp=2, tp=4), dict(edp=2, ep=4)),
        (dict(tp=8), dict(edp=2, ep=2, etp=2)),
    ],
)
def test_initial_bits_are_the_same_on_every_mesh(dense, expert, devices):
    alone = param.initial_values(DECLARED, 7, 0.02, 12)
    folded = fold(dense, expert)
    mesh = build_mesh(folded, devices)
    shardings = jax.tree.map(lambda p: NamedSharding(mesh, p.spec), param.placements(DECLARED, folded))
    split = param.initial_values(DECLARED, 7, 0.02, 12, shardings)
    jax.tree.map(np.testing.assert_array_equal, alone, split)
    assert jax.tree.map(lambda x: x.sharding, split) == shardings


def test_slices_layers_and_parameters_differ():
    values = param.initial_values(DECLARED, 7, 0.02, 12)
    experts = np.asarray(values["toy"]["experts"]).reshape(24, -1)
    assert len({row.tobytes() for row in experts}) == 24
    assert len({np.asarray(x).tobytes() for x in values["toy"]["plain"]}) == 3
    assert not np.array_equal(values["toy"]["plain"][0], values["one"]["plain"])
    other = param.initial_values(DECLARED, 8, 0.02, 12)
    assert not np.array_equal(values["one"]["plain"], other["one"]["plain"])


def test_deviations_ones_zeros_and_padding_rows():
    values = param.initial_values(DECLARED, 0, 0.02, 8)
    assert np.std(values["toy"]["plain"]) == pytest.approx(0.02, rel=0.05)
    assert np.std(values["toy"]["out"]) == pytest.approx(0.02 / 4, rel=0.05)  # 1 / sqrt(2 x 8 layers)
    np.testing.assert_array_equal(values["one"]["scale"], 1)
    np.testing.assert_array_equal(values["one"]["shift"], 0)
    np.testing.assert_array_equal(values["one"]["table"][21:], 0)
    assert (np.abs(values["one"]["table"][:21]).max(axis=1) > 0).all()
    assert {x.dtype for x in jax.tree.leaves(values)} == {jnp.dtype(jnp.float32)}


def test_materialised_modules_hold_the_same_values():
    module = param.materialise(Toy(), seed=5)
    want = param.initial_values(param.declarations(Toy()), 5, 0.02, 1)
    np.testing.assert_array_equal(module.plain[...], want["plain"])


def test_a_split_that_does_not_divide_names_the_parameter():
    tree = dict(stack=dict(key=param.Declaration(shape=(16, 3), axes=(None, "tp"))))
    with pytest.raises(ValueError, match=r"stack\.key: a dim of 3 doesn't divide by tp=2"):
        param.placements(tree, fold(dict(tp=2), dict(edp=2)))
