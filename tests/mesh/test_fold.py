"""fold: groups of ranks against a brute-force reference and the published ones, and what it refuses."""

import itertools
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh import ALONE, fold
from mesh.axes import DENSE_AXES, EXPERT_AXES

SIXTEEN = dict(pp=2, dp=2, cp=2, tp=2)

# (dense, expert): dense rank = tp + TP (cp + CP (dp + DP pp)), expert rank = etp + ETP (ep + EP (edp + EDP pp)).
FOLDS = [
    (dict(dp=1), dict(edp=1)),
    (dict(dp=8), dict(ep=8)),
    (dict(tp=8), dict(ep=8)),
    (dict(cp=8), dict(edp=8)),
    (dict(dp=2, tp=4), dict(ep=4, etp=2)),
    (dict(dp=2, tp=4), dict(edp=4, ep=2)),
    (dict(dp=2, cp=2, tp=2), dict(ep=8)),
    (dict(dp=4, tp=2), dict(edp=2, ep=2, etp=2)),
    (SIXTEEN, dict(pp=2, edp=2, ep=4)),
    (SIXTEEN, dict(pp=2, edp=2, ep=2, etp=2)),
    (dict(pp=4, dp=8, cp=2, tp=4), dict(pp=4, ep=64)),
    (dict(dp=6, tp=2), dict(edp=3, ep=4)),
    (dict(pp=3, dp=5, cp=2), dict(pp=3, edp=5, etp=2)),
]
NAMES = [" ".join(f"{n}{s}" for n, s in {**d, **e}.items()) for d, e in FOLDS]


def reference_groups(sizes, axis, order):
    """Ranks that differ in `axis` only, by counting ranks out with the innermost (last) axis fastest."""
    groups = {}
    for rank, place in enumerate(itertools.product(*(range(sizes.get(name, 1)) for name in order))):
        others = tuple(p for name, p in zip(order, place, strict=True) if name != axis)
        groups.setdefault(others, []).append(rank)
    return sorted(groups.values())


def mesh_groups(folded, axes):
    """Ranks along the mesh axes of a view, for every place on the other axes; ranks in the view's own order."""
    ranks = np.arange(folded.num_devices).reshape(folded.shape)
    at = [folded.names.index(name) for name in axes]
    rest = [i for i in range(ranks.ndim) if i not in at]
    return sorted(ranks.transpose(rest + at).reshape(-1, folded.size(axes)).tolist())


def assert_groups_match(folded, dense, expert):
    for sizes, order in ((dense, DENSE_AXES), (expert, EXPERT_AXES)):
        for axis in order:
            assert mesh_groups(folded, folded.view(axis)) == reference_groups(sizes, axis, order), axis


@pytest.mark.parametrize("dense, expert", FOLDS, ids=NAMES)
def test_groups_are_those_of_the_rank_formulas(dense, expert):
    assert_groups_match(fold(dense, expert), dense, expert)


# Groups of 16 ranks at TP2 CP2 PP2, as Megatron-Core's order of ranks gives them.
PUBLISHED_DENSE = dict(
    tp=[[r, r + 1] for r in range(0, 16, 2)],
    cp=[[r, r + 2] for r in (0, 1, 4, 5, 8, 9, 12, 13)],
    dp=[[r, r + 4] for r in (0, 1, 2, 3, 8, 9, 10, 11)],
    pp=[[r, r + 8] for r in range(8)],
)
PUBLISHED_EXPERT = {
    "EP4 ETP1": (
        dict(pp=2, edp=2, ep=4, etp=1),
        dict(ep=[[r, r + 1, r + 2, r + 3] for r in (0, 4, 8, 12)], edp=PUBLISHED_DENSE["dp"]),
    ),
    "EP2 ETP2": (
        dict(pp=2, edp=2, ep=2, etp=2),
        dict(ep=PUBLISHED_DENSE["cp"], etp=PUBLISHED_DENSE["tp"], edp=PUBLISHED_DENSE["dp"]),
    ),
}


@pytest.mark.parametrize("case", PUBLISHED_EXPERT)
def test_sixteen_ranks_have_the_published_groups(case):
    expert, groups = PUBLISHED_EXPERT[case]
    folded = fold(SIXTEEN, expert)
    for axis, want in {**PUBLISHED_DENSE, **groups}.items():
        assert mesh_groups(folded, folded.view(axis)) == want, axis


def test_ep_may_exceed_dp_and_span_cp_and_tp():
    folded = fold(dict(dp=8, cp=2, tp=4), dict(ep=64))
    assert folded.expert.ep == ("dp_ep", "cp_ep", "tp_ep")
    assert folded.dense.sequence == ("cp_ep", "tp_ep")
    assert folded.dense.tokens == ("dp_ep", "cp_ep", "tp_ep")
    assert folded.atoms == (("dp_ep", 8), ("cp_ep", 2), ("tp_ep", 4))


def test_atoms_are_named_by_their_pair():
    folded = fold(SIXTEEN, dict(pp=2, edp=2, ep=2, etp=2))
    assert folded.atoms == (("pp", 2), ("dp_edp", 2), ("cp_ep", 2), ("tp_etp", 2))
    assert folded.describe() == (
        "dense pp=2 dp=2 cp=2 tp=2 | expert edp=2 ep=2 etp=2 | atoms pp=2 dp_edp=2 cp_ep=2 tp_etp=2"
    )


def test_one_device_has_one_axis_and_alone_has_none():
    assert fold({}, {}).atoms == (("dp_edp", 1),)
    assert fold({}, {}).size("dp") == 1
    assert ALONE.num_devices == 1
    assert all(ALONE.view(axis) == () for axis in DENSE_AXES + EXPERT_AXES)


@st.composite
def factorisations(draw):
    """Both factorisations of one line; their cuts need not divide each other."""
    pp, inner = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 4, 6, 8, 12, 16, 24, 36]))

    def three(names):
        first = draw(st.sampled_from([d for d in range(1, inner + 1) if inner % d == 0]))
        rest = inner // first
        second = draw(st.sampled_from([d for d in range(1, rest + 1) if rest % d == 0]))
        return dict(pp=pp) | dict(zip(names, draw(st.permutations([first, second, rest // second])), strict=True))

    return three(DENSE_AXES[1:]), three(EXPERT_AXES[1:])


def cuts(sizes, order):
    return {math.prod(sizes[name] for name in order[i:]) for i in range(len(order) + 1)}


@given(factorisations())
@settings(max_examples=200, deadline=None)
def test_any_two_factorisations_fold_exactly_when_their_cuts_form_a_chain(sizes):
    dense, expert = sizes
    chain = sorted(cuts(dense, DENSE_AXES) | cuts(expert, EXPERT_AXES))
    if any(outer % inner for inner, outer in itertools.pairwise(chain)):
        with pytest.raises(ValueError, match="cannot fold") as error:
            fold(dense, expert)
        for sizes, names in ((dense, DENSE_AXES), (expert, EXPERT_AXES)):
            assert all(f"{name}={sizes[name]}" in str(error.value) for name in names)
        return
    folded = fold(dense, expert)
    assert math.prod(folded.shape) == math.prod(dense.values()) == folded.num_devices
    assert len(set(folded.names)) == len(folded.names)
    assert len(folded.shape) == max(1, len(chain) - 1)  # the coarsest refinement: one atom between two cuts
    for names, sizes in ((DENSE_AXES, dense), (EXPERT_AXES, expert)):
        assert {name: folded.size(name) for name in names} == sizes
        taken = [atom for name in names for atom in folded.view(name)]
        assert sorted(taken) == sorted(n for n, s in folded.atoms if s > 1 or n in taken)
    assert_groups_match(folded, dense, expert)


@pytest.mark.parametrize(
    "dense, expert, parts",
    [
        (dict(dp=2, ep=2), dict(ep=4), ["dense has no axis ['ep']", "'dp'"]),
        (dict(dp=4), dict(dp=4), ["expert has no axis ['dp']", "'edp'"]),
        (dict(dp=0), dict(edp=1), ["dense", "at least 1", "'dp': 0"]),
        (dict(dp=8), dict(edp=2, ep=-4), ["expert", "at least 1", "'ep': -4"]),
        (dict(pp=2, dp=4), dict(pp=4, edp=2), ["pp must agree", "dense pp=2", "expert pp=4"]),
        (dict(dp=8), dict(edp=2, ep=2), ["dp=8", "is 8 devices", "edp=2 x ep=2", "is 4: make them equal"]),
        (dict(dp=3, tp=2), dict(edp=2, ep=3), ["dp=3", "tp=2", "edp=2", "ep=3", "lie 2", "lie 3", "divides"]),
    ],
)
def test_refusals_name_the_sizes(dense, expert, parts):
    with pytest.raises(ValueError, match=re.escape(parts[0])) as error:
        fold(dense, expert)
    for part in parts:
        assert part in str(error.value)


def test_an_unknown_view_is_named():
    with pytest.raises(KeyError, match="no view axis 'sp'"):
        fold(dict(dp=2), dict(ep=2)).view("sp")
