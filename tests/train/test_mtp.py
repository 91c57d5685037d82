"""Multi-token prediction: what each depth sees, its loss by its own tokens, its gradients on any split of the sequence."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from mesh import ALONE
from moex.config import ParallelConfig
from moex.layers.mtp import further
from moex.layers.tokens import Tokens
from tests.train.folded import Case, differences
from tests.train.tiny import MODELS, Harness, packed_rows, program_of, put, tiny_config

GQA = dataclasses.replace(MODELS["gqa"], mtp_depth=2, mtp_coefficient=0.3)
QUIET = dataclasses.replace(
    GQA,
    router=dataclasses.replace(
        GQA.router, aux_coefficient=0.0, sequence_coefficient=0.0, global_coefficient=0.0, z_coefficient=0.0
    ),
)


@pytest.mark.parametrize("depth", [1, 3])
def test_tokens_further_on_are_those_of_the_document(depth):
    rows = packed_rows(tiny_config("gqa"))
    flat = {name: x[0] for name, x in rows.items()}
    places = np.broadcast_to(np.arange(flat["tokens"].shape[1], dtype=np.int32), flat["tokens"].shape)
    order = np.random.default_rng(0).permutation(places.shape[1])  # any order of a row
    mixed = {name: x[:, order] for name, x in flat.items()}
    tokens = Tokens(mixed["segments"], mixed["positions"], places[:, order])
    got = further(mixed["tokens"], mixed["labels"], mixed["mask"], tokens, depth, ALONE)
    back = np.argsort(order)
    for row, place in np.ndindex(places.shape):
        there = place + depth
        inside = there < places.shape[1] and flat["segments"][row, place] > 0
        inside = inside and flat["segments"][row, there] == flat["segments"][row, place]
        want = [flat[name][row, there] if inside else 0 for name in ("tokens", "labels", "mask")]
        want.append(flat["segments"][row, place] if inside else 0)
        have = [np.asarray(x)[row, back[place]] for x in (got.ids, got.labels, got.mask, got.tokens.segments)]
        assert have == want


CASE = Case((2, 2, 2), (1, 8, 1), "alltoall", "gqa", zero=3, accumulation=2, context="ring", recompute=("layer",))


def test_step_equals_one_device():
    assert not differences(CASE, dict(gqa=QUIET)).problems()


def masks(base):
    none, first, late = np.zeros_like(base), base.copy(), base.copy()
    first[..., 8:], late[..., :8] = False, False
    return dict(packed=base, none=none, first=first, late=late, few=base & (np.arange(16) % 5 == 0))


def test_gradients_are_those_of_an_unsplit_sequence_for_any_mask():
    split = CASE.config(dict(gqa=QUIET))
    programs = program_of(split, 8), program_of(Harness.on_one_device(split), 1)
    rows = packed_rows(split)
    for name, mask in masks(rows["mask"]).items():
        found = []
        for program in programs:
            before = program.initial_state()
            start = jax.device_get(before.params)
            after, metrics = program.train(before, put(program, rows | dict(mask=mask)))
            change = jax.tree.map(lambda a, b: a - b, jax.device_get(after.params), start)
            found.append((change, jax.device_get(metrics)))
        (ours, metrics), (theirs, want) = found
        np.testing.assert_allclose(metrics["mtp_loss"], want["mtp_loss"], rtol=1e-6)
        if name == "none":
            assert metrics["mtp_loss"] == metrics["lm_loss"] == metrics["loss"] == 0
            assert not any(np.any(x) for x in jax.tree.leaves((ours, theirs)))
            continue
        assert metrics["mtp_loss"] > 0
        assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(theirs["mtp"]["ahead"]))
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


def test_each_depth_is_a_mean_over_its_own_tokens():
    """A head of zeros guesses: every loss is ln V, however few tokens a depth has; together 1.3 times the model's own."""
    config = tiny_config(QUIET, accumulation=4, parallel=ParallelConfig(dp=2))
    program = program_of(config, 2)
    state = program.initial_state()
    ends = state.params["ends"] | dict(head=state.params["ends"]["head"] * 0)
    state = state._replace(params=state.params | dict(ends=ends))
    _, metrics = program.train(state, put(program, packed_rows(config)))
    np.testing.assert_allclose(metrics["lm_loss"], math.log(259), rtol=1e-6)
    np.testing.assert_allclose(metrics["loss"], 1.3 * math.log(259), rtol=1e-6)
    assert metrics["expert_counts"].shape == (4, 8)
    seen = np.asarray(metrics["expert_counts"]).sum(axis=1)
    assert seen[0] == seen[1] > seen[2] > seen[3]  # a token near its document's end has nothing further on
