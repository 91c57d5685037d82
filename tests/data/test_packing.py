"""Packing: every token once, nothing cut that fits, as full as a plain best-fit-decreasing packer's rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moex.data import Batches, Packed, Tokens, pack
from moex.data.packing import best_fit


def numbered(lengths):
    """Documents whose token i is i + 1."""
    starts = np.cumsum([0, *lengths], dtype=np.int64)
    return Tokens(np.arange(1, starts[-1] + 1, dtype=np.uint32), starts, tuple(map(str, range(len(lengths)))))


def plain_best_fit(lengths, capacity):
    """One piece at a time: the fullest row that has room, the oldest of equally full ones."""
    room, total = [], 0
    for length in sorted(lengths, reverse=True):
        fitting = [(left, row) for row, left in enumerate(room) if left >= length]
        if fitting:
            room[min(fitting)[1]] -= length
        else:
            room.append(capacity - length)
        total += length
    return sorted(room)


@settings(max_examples=150, deadline=None)
@given(capacity=st.integers(2, 24), data=st.data())
def test_rows_are_as_full_as_those_of_a_packer_that_places_one_piece_at_a_time(capacity, data):
    lengths = np.array(data.draw(st.lists(st.integers(1, capacity), max_size=60)), np.int64)
    rows = best_fit(lengths, capacity)
    used = np.bincount(rows, weights=lengths, minlength=0)
    assert sorted((capacity - used).astype(int).tolist()) == plain_best_fit(lengths.tolist(), capacity)


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=40), seq_len=st.integers(2, 16))
def test_every_token_is_an_input_once_and_a_label_once_but_for_first_tokens(lengths, seq_len):
    tokens = numbered(lengths)
    if not len(tokens):
        return
    rows = Packed([tokens], seq_len)
    got = rows.read(np.arange(rows.num_rows))
    assert sorted(got["tokens"][got["segments"] > 0].tolist()) == list(range(1, len(tokens) + 1))
    starts = {int(s) + 1 for s, length in zip(tokens.starts, lengths, strict=False) if length}
    assert sorted(got["labels"][got["mask"]].tolist()) == [t for t in range(1, len(tokens) + 1) if t not in starts]
    assert (got["labels"] == got["tokens"] + 1)[got["mask"]].all()
    assert (got["tokens"] == 0)[got["segments"] == 0].all()
    assert rows.num_padding == (got["segments"] == 0).sum()
    document = np.searchsorted(tokens.starts, got["tokens"].astype(np.int64) - 1, side="right") - 1
    for row in range(rows.num_rows):
        for segment in range(1, got["segments"][row].max() + 1):
            at = got["segments"][row] == segment
            (own,) = set(document[row, at].tolist())
            assert got["positions"][row, at].tolist() == list(range(at.sum()))
            assert at.sum() == lengths[own] or lengths[own] > seq_len, "a document that fits is not cut"


def test_a_row_of_hand_made_documents():
    tokens = Tokens(
        np.array([11, 12, 0, 21, 0, 31, 32, 33, 34, 35, 0], np.uint16), np.array([0, 3, 5, 11]), ("a", "b", "c")
    )
    rows = Packed([tokens], 5)
    got = rows.read(np.arange(rows.num_rows))
    np.testing.assert_array_equal(got["tokens"], [[31, 32, 33, 34, 35], [11, 12, 0, 21, 0], [0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(got["labels"][0], [32, 33, 34, 35, 0])
    np.testing.assert_array_equal(got["mask"], [[1, 1, 1, 1, 1], [1, 1, 0, 1, 0], [0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(got["segments"], [[1, 1, 1, 1, 1], [1, 1, 1, 2, 2], [1, 0, 0, 0, 0]])
    np.testing.assert_array_equal(got["positions"], [[0, 1, 2, 3, 4], [0, 1, 2, 0, 1], [0, 0, 0, 0, 0]])


def test_packing_depends_on_lengths_alone_and_wastes_little():
    lengths = np.random.default_rng(0).lognormal(5, 1.2, 20_000).astype(np.int64) + 1
    starts = np.cumsum([0, *lengths])
    one, two = pack(starts, 512), pack(starts, 512)
    assert all((a == b).all() for a, b in zip(one, two, strict=True))
    assert starts[-1] / (one.num_rows * 512) > 0.999


def test_one_thousand_documents_of_one_token():
    """Every id once an epoch; orders differ by epoch and by seed; hosts side by side are the whole."""
    tokens = numbered([1] * 1000)
    make = lambda seed: Batches([Packed([tokens], 2)], rows=10, accumulation=2, seed=seed)
    steps = 1000 // 2 // 20
    orders = {}
    for seed in (1, 2):
        for epoch in (0, 1):
            some = [make(seed).batch(epoch * steps + step) for step in range(steps)]
            ids = np.concatenate([batch["tokens"].reshape(-1) for batch in some])
            assert sorted(ids.tolist()) == list(range(1, 1001))
            assert not any(batch["mask"].any() for batch in some)
            orders[seed, epoch] = tuple(ids.tolist())
    assert len(set(orders.values())) == 4
    for num_hosts in (2, 5):
        each = 10 // num_hosts
        parts = [make(1).batch(3, slice(i * each, (i + 1) * each))["tokens"] for i in range(num_hosts)]
        np.testing.assert_array_equal(np.concatenate(parts, axis=1), make(1).batch(3)["tokens"])


@pytest.mark.parametrize("seq_len", [4, 4096])
def test_shards_keep_their_rows_apart(seq_len):
    shards = [numbered([3, 2, 9]), numbered([5, 5])]
    alone = [Packed([shard], seq_len) for shard in shards]
    both = Packed(shards, seq_len)
    assert both.num_rows == sum(rows.num_rows for rows in alone)
    got = both.read(np.arange(both.num_rows))
    want = [rows.read(np.arange(rows.num_rows)) for rows in alone]
    for name, array in got.items():
        np.testing.assert_array_equal(array, np.concatenate([one[name] for one in want]), err_msg=name)
