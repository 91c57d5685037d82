"""Stacks of layers: apart where some compute high, together again, and dealt to the layers that they belong to."""

import numpy as np
import pytest

from moex.layers.moe import Steering
from moex.models.pattern import Kind, segments
from moex.models.stacks import Stacks, joined, parted


def layers_of(text: str) -> tuple[Kind, ...]:
    """d, m: a dense or MoE layer in a recipe; D, M: one that computes high."""
    return tuple(Kind(sparse=letter in "mM", window=0, high=letter.isupper()) for letter in text)


@pytest.mark.parametrize("text", ["mmmm", "Mmmm", "MmmM", "MM", "DMmm", "DdmmM", "dmdmdM", "DmM"])
def test_every_layer_gets_its_own_parameters(text):
    layers = layers_of(text)
    number = {
        name: np.array([i for i, k in enumerate(layers) if k.stack == name]) for name in {k.stack for k in layers}
    }
    params = {name: dict(w=at[:, None] * np.ones(3)) for name, at in number.items()} | dict(ends=dict(w=np.ones(2)))
    bias = number.get("moe_layers", np.zeros(0))[:, None] * np.ones(2)
    apart = parted(params, layers)
    assert any(name.endswith("_high") for name in apart) == (text != text.lower())
    together = joined(apart, layers)
    for name, part in params.items():
        np.testing.assert_array_equal(together[name]["w"], part["w"])
    for given in (params, apart):
        stacks, seen = Stacks(given, Steering(bias_E=bias), layers), []
        for segment in segments(layers):
            found = stacks.of(segment)
            for repeat in range(segment.repeats):
                one = {
                    k: (v[0]["w"][repeat], v[1].bias_E[repeat]) if "moe" in k else v["w"][repeat]
                    for k, v in found.items()
                }
                for kind, weights, steering in stacks.each(segment.period, one):
                    assert kind == layers[len(seen)]
                    assert not kind.sparse or steering[0] == len(seen)
                    seen.append(weights[0])
        assert seen == list(range(len(layers)))
