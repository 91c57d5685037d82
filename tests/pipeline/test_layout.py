"""Stages of layers: every layer has one slot of its kind, layouts are read as Megatron-Core writes them."""

import itertools

import numpy as np
import pytest

from moex.models.pattern import Kind
from moex.pipeline.layout import layout, read_stages

D, M, W = Kind(False, 0), Kind(True, 0), Kind(True, 4)


@pytest.mark.parametrize(
    "text, stages, layers, mtp, sizes",
    [
        ("Et*3|(tt|)*29m|L", 32, 61, 1, [3, *[2] * 29, 0, 0]),
        ("Et*4|(tttt|)*14tmL", 16, 61, 1, [4, *[4] * 14, 1]),
        ("Et|(tt|)*30L", 32, 61, 0, [1, *[2] * 30, 0]),
        ("Ett|ttL", 2, 4, 0, [2, 2]),
        ("E|(t|)*3tL", 5, 4, 0, [0, 1, 1, 1, 1]),
    ],
)
def test_published_layouts(text, stages, layers, mtp, sizes):
    """Those of DeepSeek-V3 in Megatron-Core's report and guide, and small ones."""
    assert read_stages(text, stages, layers, mtp) == sizes


@pytest.mark.parametrize(
    "text, told",
    [
        ("Ett|tL", "E, 4 t, 0 m and L"),
        ("Ett|ttmL", "E, 4 t, 0 m and L"),
        ("ttE|ttL", "E, 4 t"),
        ("Et|t|ttL", "3 stages, but pp x virtual_pp is 2"),
        ("Exx|ttL", "has 'x'"),
        ("E(tt|ttL", r"reads 'E\(tt\|ttL'"),
        ("E(t*9999)*9999|L", "longer than any model"),
    ],
)
def test_other_layouts_are_refused_with_what_they_should_be(text, told):
    with pytest.raises(ValueError, match=told):
        read_stages(text, 2, 4)


CASES = [
    ([M] * 8, 2, 2, ""),
    ([M] * 7, 2, 1, ""),
    ([D] * 3 + [M] * 5, 4, 1, ""),
    ([D] * 3 + [M] * 58, 16, 2, "Et*3|(tt|)*29|L"),
    ([D, M] * 4, 2, 2, ""),
    ([W, M] * 6, 4, 1, ""),
]


@pytest.mark.parametrize("kinds, ranks, chunks, text", CASES)
def test_every_layer_stands_in_one_slot_of_its_kind(kinds, ranks, chunks, text):
    found, seen = layout(kinds, ranks, chunks, text), []
    for chunk, rank in itertools.product(range(chunks), range(ranks)):  # in the order of stages
        here = [(int(layer), kind) for layer, kind in zip(found.layer_PVN[rank, chunk], found.slots, strict=True)]
        assert all(kinds[layer] == kind for layer, kind in here if layer >= 0)
        seen += [layer for layer, _ in here if layer >= 0]
    assert seen == list(range(len(kinds)))
    assert sum(len(s.period) * s.repeats for s in found.segments) == len(found.slots)
    for stack in {kind.stack for kind in kinds}:
        order = found.order(stack, kinds)
        assert order.shape == (ranks, chunks * found.size(stack))
        assert sorted(order[order >= 0].tolist()) == list(range(sum(kind.stack == stack for kind in kinds)))


def test_equal_stages_have_no_idle_slot_and_the_order_of_interleaving():
    found = layout([M] * 8, 2, 2)
    assert found.stages == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert found.idle == 0
    np.testing.assert_array_equal(found.order("moe_layers", [M] * 8), [[0, 1, 4, 5], [2, 3, 6, 7]])


def test_unequal_stages_have_the_fewest_slots_that_hold_them():
    assert layout([D] * 3 + [M] * 58, 16, 2, "Et*3|(tt|)*29|L").slots == (D, D, D, M, M)
    found = layout([D, M, M, M], 2, 1)
    assert (found.slots, found.idle) == ((D, M, M), pytest.approx(2 / 6))
    np.testing.assert_array_equal(found.parts(), [[[True, True]], [[False, True]]])
    assert layout([W, M] * 3, 2, 1).slots == (W, M, W, M)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ValueError, match="3 layers don't fill 2 x 2 = 4 stages"):
        layout([M] * 3, 2, 2)
