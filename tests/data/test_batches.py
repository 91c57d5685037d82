"""Batches: the arrays of a window, which windows a step holds, and exactly-once coverage."""

import time
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moex.data import Batches, Tokens, Windows


def make_tokens(*documents, dtype=np.uint16):
    flat = np.array([token for document in documents for token in document], dtype=dtype)
    starts = np.cumsum([0, *map(len, documents)], dtype=np.int64)
    return Tokens(flat, starts, tuple(f"doc{d}" for d in range(len(documents))))


def windows(tokens, *, seq_len, **options):
    """Batches of one shard's windows."""
    return Batches([Windows([tokens], seq_len)], **options)


def read_windows(tokens, ids, seq_len):
    return Windows([tokens], seq_len).read(ids)


def numbered(num_tokens):
    """One document whose token i is i."""
    return make_tokens(range(num_tokens))


def assert_equal(got, want):
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].dtype == want[name].dtype, name
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


def epoch_ids(batches, epoch):
    """Window ids of one epoch in order, when an epoch is a whole number of steps."""
    steps, rest = divmod(batches.num_rows, batches.rows_per_step)
    assert rest == 0
    return np.concatenate([batches.sample_ids(epoch * steps + step).reshape(-1) for step in range(steps)]).tolist()


# Documents "11 12 13 0", "21 0", "31 32 33 34 0" in windows of 4; 0 ends a document.
THREE = ([11, 12, 13, 0], [21, 0], [31, 32, 33, 34, 0])
WANT = {
    "tokens": [[11, 12, 13, 0], [21, 0, 31, 32], [33, 34, 0, 0]],
    "labels": [[12, 13, 0, 21], [0, 31, 32, 33], [34, 0, 0, 0]],
    "mask": [[1, 1, 1, 0], [1, 0, 1, 1], [1, 1, 0, 0]],
    "segments": [[1, 1, 1, 1], [1, 1, 2, 2], [1, 1, 1, 0]],
    "positions": [[0, 1, 2, 3], [0, 1, 0, 1], [0, 1, 2, 0]],
}
WANT = {name: np.array(rows, bool if name == "mask" else np.int32) for name, rows in WANT.items()}


def test_windows_of_hand_made_documents():
    assert_equal(read_windows(make_tokens(*THREE), np.arange(3), 4), WANT)


def test_a_negative_id_is_a_row_of_padding():
    got = read_windows(make_tokens(*THREE), np.array([2, -1]), 4)
    for name, rows in WANT.items():
        np.testing.assert_array_equal(got[name], [rows[2], np.zeros(4)], err_msg=name)


def test_empty_documents_change_nothing():
    with_empty = make_tokens([], THREE[0], [], [], THREE[1], THREE[2], [])
    assert_equal(read_windows(with_empty, np.arange(3), 4), WANT)


def test_a_document_over_several_windows_keeps_its_labels_and_restarts_its_positions():
    got = read_windows(numbered(7), np.arange(3), 3)
    np.testing.assert_array_equal(got["labels"], [[1, 2, 3], [4, 5, 6], [0, 0, 0]])
    np.testing.assert_array_equal(got["mask"], [[1, 1, 1], [1, 1, 1], [0, 0, 0]])
    np.testing.assert_array_equal(got["positions"], [[0, 1, 2], [0, 1, 2], [0, 0, 0]])
    np.testing.assert_array_equal(got["segments"], [[1, 1, 1], [1, 1, 1], [1, 0, 0]])


def test_writing_to_tokens_leaves_labels_alone():
    got = windows(numbered(9), seq_len=4, rows=1, accumulation=1, seed=0, shuffle=False).batch(0)
    got["tokens"][:] = 77
    np.testing.assert_array_equal(got["labels"], [[[1, 2, 3, 4]]])


def test_unshuffled_batches_lie_in_corpus_order_by_step_micro_batch_and_row():
    batches = windows(numbered(24), seq_len=2, rows=3, accumulation=2, seed=0, shuffle=False)
    assert batches.num_rows == 12
    np.testing.assert_array_equal(batches.batch(1)["sample_ids"], [[6, 7, 8], [9, 10, 11]])
    np.testing.assert_array_equal(batches.batch(1)["tokens"][1], [[18, 19], [20, 21], [22, 23]])
    np.testing.assert_array_equal(batches.batch(3)["sample_ids"], batches.batch(1)["sample_ids"])


def test_shapes_dtypes_and_rows_match_their_sample_ids():
    tokens = numbered(1000)
    got = windows(tokens, seq_len=10, rows=4, accumulation=3, seed=5).batch(2)
    assert got["sample_ids"].shape == (3, 4) and got["sample_ids"].dtype == np.int64
    want = read_windows(tokens, got.pop("sample_ids").reshape(-1), 10)
    assert_equal(got, {name: array.reshape(3, 4, 10) for name, array in want.items()})


def test_one_token_documents_each_come_once_an_epoch():
    # Token i is document i. 1000 tokens are 250 windows of 4: 25 steps of 2 x 5.
    batches = windows(make_tokens(*([i] for i in range(1000))), seq_len=4, rows=5, accumulation=2, seed=3)
    for epoch in range(3):
        steps = [batches.batch(25 * epoch + step) for step in range(25)]
        assert sorted(np.concatenate([b["tokens"].reshape(-1) for b in steps]).tolist()) == list(range(1000))
        assert not any(b["mask"].any() for b in steps)
        assert all((b["segments"] == [1, 2, 3, 4]).all() and not b["positions"].any() for b in steps)


def test_every_epoch_holds_each_window_once_when_steps_straddle_epochs():
    batches = windows(numbered(80), seq_len=2, rows=3, accumulation=1, seed=1)
    stream = np.concatenate([batches.sample_ids(step).reshape(-1) for step in range(40)])
    for epoch in range(3):
        assert sorted(stream[40 * epoch : 40 * (epoch + 1)].tolist()) == list(range(40))


def test_order_differs_by_epoch_and_by_seed_and_repeats_for_the_same_seed():
    tokens = numbered(80)
    make = partial(windows, tokens, seq_len=2, rows=4, accumulation=2)
    orders = {(seed, epoch): epoch_ids(make(seed=seed), epoch) for seed in range(4) for epoch in range(4)}
    # All differ: a seed must not merely shift the epochs of its neighbour.
    assert len({tuple(order) for order in orders.values()}) == 16
    assert list(range(40)) not in orders.values()
    assert epoch_ids(make(seed=2), 3) == orders[2, 3]


def test_order_is_the_one_that_saved_runs_were_trained_in():
    # A change here (a new grain, say) makes resumed runs repeat and miss samples: treat it as a breaking change.
    batches = windows(numbered(80), seq_len=2, rows=8, accumulation=1, seed=17)
    assert batches.sample_ids(0).tolist() == [[9, 7, 0, 11, 38, 27, 17, 35]]
    assert batches.sample_ids(10**6).tolist() == [[13, 5, 27, 30, 17, 15, 20, 16]]


def test_any_step_is_the_same_alone_or_in_sequence():
    make = partial(windows, numbered(100), seq_len=3, rows=4, accumulation=2, seed=9)
    straight = make()
    stream = [straight.batch(step) for step in range(30)]
    for stop in (1, 7, 13, 20):
        resumed = make()
        for step in range(stop, 30):
            assert_equal(resumed.batch(step), stream[step])
    assert_equal(straight.batch(4), stream[4])


@pytest.mark.parametrize("num_hosts", [2, 3, 6])
def test_hosts_side_by_side_are_the_global_batch(num_hosts):
    batches = windows(make_tokens(*([d] * (d % 7) for d in range(60))), seq_len=4, rows=6, accumulation=2, seed=2)
    each = 6 // num_hosts
    for read, last in ((batches.batch, 11), (batches.eval_batch, batches.num_eval_batches - 1)):
        for step in (0, last):
            parts = [read(step, slice(host * each, (host + 1) * each)) for host in range(num_hosts)]
            assert_equal({k: np.concatenate([p[k] for p in parts], axis=1) for k in parts[0]}, read(step))


def test_a_host_reads_only_its_rows():
    read = []

    class Recorded(np.ndarray):
        def __getitem__(self, key):
            read.append((key.start, key.stop))
            return super().__getitem__(key)

    base = numbered(100)
    tokens = Tokens(base.tokens.view(Recorded), base.starts, base.names)
    windows(tokens, seq_len=5, rows=4, accumulation=2, seed=0, shuffle=False).batch(1, slice(1, 2))
    assert read == [(45, 51), (65, 71)]


def test_a_far_step_costs_as_little_as_the_first():
    batches = windows(numbered(1000), seq_len=4, rows=8, accumulation=2, seed=0)
    batches.batch(0)
    start = time.perf_counter()
    ids = batches.batch(10**6)["sample_ids"]
    batches.batch(10**12)
    assert time.perf_counter() - start < 0.5
    assert len(set(ids.reshape(-1).tolist())) == 16


@pytest.mark.parametrize("rows, accumulation", [(1, 1), (4, 1), (3, 2), (64, 2)])
def test_evaluation_predicts_each_token_once(rows, accumulation):
    documents = [[*range(10 * d + 1, 10 * d + 1 + d % 9 + 1), 0] for d in range(40)]
    tokens = make_tokens(*documents)
    batches = windows(tokens, seq_len=7, rows=rows, accumulation=accumulation, seed=0, shuffle=False)
    passes = list(batches.eval_batches())
    assert len(passes) == batches.num_eval_batches
    assert all(b["tokens"].shape == (accumulation, rows, 7) for b in passes)
    labels = np.concatenate([b["labels"][b["mask"]] for b in passes])
    # In corpus order, the masked labels are the documents without their first tokens.
    assert labels.tolist() == [token for document in documents for token in document[1:]]
    ids = np.concatenate([b["sample_ids"].reshape(-1) for b in passes])
    assert ids[: batches.num_rows].tolist() == list(range(batches.num_rows))
    padding = np.concatenate([b["mask"].any(-1).reshape(-1) | b["segments"].any(-1).reshape(-1) for b in passes])
    assert (ids[batches.num_rows :] == -1).all() and not padding[batches.num_rows :].any()


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=25),
    seq_len=st.integers(2, 9),
    rows=st.integers(1, 4),
    accumulation=st.integers(1, 3),
)
def test_any_documents_match_a_token_by_token_reading(lengths, seq_len, rows, accumulation):
    total = sum(lengths)
    if total == 0:
        return
    doc_of = [d for d, length in enumerate(lengths) for _ in range(length)]
    ends = np.cumsum([0, *lengths])
    tokens = make_tokens(*(range(1 + ends[d], 1 + ends[d + 1]) for d in range(len(lengths))))
    batches = windows(tokens, seq_len=seq_len, rows=rows, accumulation=accumulation, seed=0, shuffle=False)
    seen = {}
    for batch in batches.eval_batches():
        for a, r in np.ndindex(accumulation, rows):
            previous, number = None, 0
            for s in range(seq_len):
                token, label, mask, segment, position = (
                    batch[k][a, r, s].item() for k in ("tokens", "labels", "mask", "segments", "positions")
                )
                if segment == 0:
                    assert (token, label, mask, position) == (0, 0, False, 0)
                    continue
                i = token - 1
                assert i not in seen
                number += doc_of[i] != previous
                assert segment == number
                previous = doc_of[i]
                row_start = batch["sample_ids"][a, r].item() * seq_len
                assert position == i - max(row_start, ends[doc_of[i]])
                assert label == (token + 1 if token < total else 0)
                seen[i] = mask
    assert sorted(seen) == list(range(total))
    assert [i for i in seen if seen[i]] == [i for i in range(total - 1) if doc_of[i] == doc_of[i + 1]]


def test_memory_mapped_tokens_give_the_same_batches(tmp_path):
    tokens = numbered(500)
    np.save(tmp_path / "tokens.npy", tokens.tokens)
    mapped = Tokens(np.load(tmp_path / "tokens.npy", mmap_mode="r"), tokens.starts, tokens.names)
    sizes = {"seq_len": 7, "rows": 4, "accumulation": 2, "seed": 1}
    assert_equal(windows(mapped, **sizes).batch(3), windows(tokens, **sizes).batch(3))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"seq_len": 1}, "seq_len=1: must be 2 or more"),
        ({"rows": 0}, "rows=0: must be 1 or more"),
        ({"accumulation": 0}, "accumulation=0: must be 1 or more"),
        ({"seed": -1}, "seed=-1: must be between"),
        ({"seed": 2**32}, "must be between"),
        ({"rows": 6}, r"39 tokens, 10 windows of seq_len=4, but a step takes .*6 \* 2 = 12 different ones; lower rows"),
    ],
)
def test_bad_sizes_are_refused_with_numbers(change, message):
    with pytest.raises(ValueError, match=message):
        windows(numbered(39), **{"seq_len": 4, "rows": 2, "accumulation": 2, "seed": 0} | change)


def test_an_empty_corpus_is_refused():
    with pytest.raises(ValueError, match="0 tokens, 0 windows"):
        windows(make_tokens([]), seq_len=4, rows=1, accumulation=1, seed=0, shuffle=False)


def test_bad_addresses_are_refused():
    batches = windows(numbered(40), seq_len=4, rows=2, accumulation=2, seed=0, shuffle=False)
    with pytest.raises(ValueError, match="step=-1"):
        batches.batch(-1)
    for rows in (slice(2, 4), slice(1, 3), slice(1, 1)):
        with pytest.raises(ValueError, match="the 2 rows"):
            batches.batch(0, rows)
    for index in (-1, 3):
        with pytest.raises(ValueError, match="there are 3"):
            batches.eval_batch(index)
    with pytest.raises(ValueError, match="row 10: there are 10"):
        read_windows(numbered(40), np.array([0, 10]), 4)


def test_a_corpus_smaller_than_a_step_can_be_evaluated_but_not_trained_on():
    batches = windows(numbered(5), seq_len=4, rows=8, accumulation=1, seed=0, shuffle=False)
    assert sum(b["mask"].sum() for b in batches.eval_batches()) == 4
    with pytest.raises(ValueError, match="2 windows"):
        batches.batch(0)
