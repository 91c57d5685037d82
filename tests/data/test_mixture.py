"""Mixtures by weight and batch sizes that rise: shares, epochs of each corpus, and where a step's rows begin."""

import numpy as np
import pytest

from moex.data import Batches, Ramp, Tokens, Windows


def source(number, num_rows, seq_len=2):
    """Rows whose tokens are 1000 x number + row."""
    flat = np.repeat(np.arange(num_rows, dtype=np.uint32) + 1000 * number, seq_len)
    return Windows([Tokens(flat, np.array([0, len(flat)]), ("all",))], seq_len)


def stream(batches, num_steps):
    return np.concatenate([batches.batch(step)["tokens"][..., 0].reshape(-1) for step in range(num_steps)])


def test_each_corpus_gets_its_share_and_goes_through_its_own_epochs():
    batches = Batches([source(1, 30), source(2, 200)], rows=10, accumulation=1, seed=0, weights=(0.25, 0.75))
    seen = stream(batches, 40)
    first, second = seen[seen < 2000], seen[seen >= 2000]
    assert len(first) == 100 and len(second) == 300
    for epoch in range(3):
        assert sorted(first[30 * epoch : 30 * (epoch + 1)]) == list(range(1000, 1030))
    assert sorted(second[:200]) == list(range(2000, 2200))
    assert batches.epochs(40) == pytest.approx([100 / 30, 1.5])
    # The share holds in every stretch, not only in the end.
    shares = [(seen[at : at + 50] < 2000).mean() for at in range(0, 400, 50)]
    assert max(abs(share - 0.25) for share in shares) <= 0.02


def test_without_weights_all_rows_are_seen_equally_often():
    batches = Batches([source(1, 30), source(2, 90)], rows=8, accumulation=1, seed=0)
    assert batches.epochs(15) == pytest.approx([1, 1])
    assert sorted(stream(batches, 15)) == [*range(1000, 1030), *range(2000, 2090)]


def test_corpora_of_one_length_are_shuffled_apart():
    batches = Batches([source(1, 50), source(2, 50)], rows=10, accumulation=1, seed=0)
    seen = stream(batches, 10)
    assert (seen[seen < 2000] - 1000).tolist() != (seen[seen >= 2000] - 2000).tolist()


def test_sample_ids_number_rows_through_all_corpora():
    batches = Batches([source(1, 30), source(2, 90)], rows=8, accumulation=1, seed=0)
    batch = batches.batch(3)
    ids = batch["sample_ids"]
    number = np.where(ids < 30, 1000 + ids, 2000 + ids - 30)
    np.testing.assert_array_equal(batch["tokens"][..., 0], number)
    np.testing.assert_array_equal(batches.source_of(ids), batch["tokens"][..., 0] // 1000 - 1)
    evaluated = np.concatenate([b["tokens"][..., 0].reshape(-1) for b in batches.eval_batches()])
    assert evaluated.tolist() == [*range(1000, 1030), *range(2000, 2090)]


@pytest.mark.parametrize("weights", [(1.0,), (0.5, 0.0), (0.5, -1.0), (0.5, float("nan"))])
def test_weights_that_are_none_are_refused(weights):
    with pytest.raises(ValueError, match="weights"):
        Batches([source(1, 30), source(2, 90)], rows=8, accumulation=1, seed=0, weights=weights)


def test_sizes_rise_by_the_samples_seen():
    """8 until 32 samples, 16 until 96, then 32: the published expectation of a ramp."""
    ramp = Ramp(32, (8, 16), (32, 96))
    assert [ramp.size(step) for step in range(9)] == [8, 8, 8, 8, 16, 16, 16, 16, 32]
    assert ramp.samples_before(8) == 96 and ramp.sizes == (8, 16, 32)
    batches = Batches([source(1, 500)], rows=8, accumulation=4, seed=0, sizes=ramp)
    assert [batches.batch(step)["tokens"].shape for step in (0, 4, 8)] == [(1, 8, 2), (2, 8, 2), (4, 8, 2)]
    straight = Batches([source(1, 500)], rows=8, accumulation=1, seed=0)
    ids = np.concatenate([straight.sample_ids(step).reshape(-1) for step in range(20)])
    assert batches.sample_ids(6).reshape(-1).tolist() == ids[64:80].tolist()
    assert batches.sample_ids(8).reshape(-1).tolist() == ids[96:128].tolist()


@pytest.mark.parametrize(
    ("arguments", "sizes", "steps"),
    [
        ((4, (), ()), (4,), [4, 4, 4]),
        ((4, (2,), (3,)), (2, 4), [2, 2, 4]),  # a step isn't cut
        ((8, (2, 6), (8, 9)), (2, 6, 8), [2, 2, 2, 2, 6, 8]),
        ((8, (4, 6), (8, 9)), (4, 6, 8), [4, 4, 6, 8]),
        ((8, (5, 6), (4, 5)), (5, 8), [5, 8, 8]),  # passed over where its end is behind already
    ],
)
def test_ramps(arguments, sizes, steps):
    ramp = Ramp(*arguments)
    assert ramp.sizes == sizes
    assert [ramp.size(step) for step in range(len(steps))] == steps
    assert [ramp.samples_before(step) for step in range(len(steps) + 1)] == np.cumsum([0, *steps]).tolist()
    assert ramp.sizes_between(0, len(steps)) == tuple(dict.fromkeys(steps))
    assert ramp.sizes_between(1, 2) == (steps[1],)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, (2,), ()), "1 batch sizes and 0 numbers of samples"),
        ((4, (4,), (8,)), r"\[4, 4\] must rise"),
        ((4, (0,), (8,)), r"\[0, 4\] must rise"),
        ((8, (2, 4), (8, 8)), r"\[8, 8\] must rise from above 0"),
        ((8, (2,), (0,)), "must rise from above 0"),
    ],
)
def test_ramps_that_are_none_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Ramp(*arguments)
