"""Buckets by length: documents where their ring is short enough, each once an epoch; step and seed decide a batch."""

import numpy as np
import pytest

from moex.data import Buckets, Tokens

S, GROUPS = 32, (1, 1, 2, 4)
LENGTHS = np.clip(np.random.default_rng(1).lognormal(1.3, 1.1, 800).astype(int), 0, 3 * S)
STARTS = np.cumsum([0, *LENGTHS])
CORPUS = [Tokens(np.arange(1, STARTS[-1] + 1, dtype=np.uint32), STARTS, tuple(map(str, LENGTHS)))]


def buckets(seed=0):
    return Buckets(CORPUS, S, GROUPS, rows=4, seed=seed)


@pytest.mark.parametrize("group, longer_than", [(1, 0), (2, 8), (4, 16)])
def test_no_document_crosses_a_lane_and_lanes_are_no_longer_than_needed(group, longer_than):
    """A lane that is used has a document that no shorter one holds."""
    lane, bucket = S * group // 4, buckets().buckets[(1, 2, 4).index(group)].sources[0]
    arrays = bucket.read(np.arange(bucket.num_rows))
    used = arrays["segments"].reshape(-1, lane)
    assert all(np.bincount(one)[1:].max() > longer_than for one in used if one.any())
    for segments in arrays["segments"]:
        assert (np.diff(segments[segments > 0]) >= 0).all()
        for document in range(1, segments.max() + 1):
            at = np.flatnonzero(segments == document)
            assert len(at) <= lane
            assert at[0] // lane == at[-1] // lane


def test_every_token_is_in_one_bucket_once():
    parts = [bucket.sources[0] for bucket in buckets().buckets]
    arrays = [part.read(np.arange(part.num_rows)) for part in parts]
    tokens = np.concatenate([a["tokens"][a["segments"] > 0] for a in arrays])
    assert sorted(tokens.tolist()) == list(range(1, STARTS[-1] + 1))
    for part, a in zip(parts, arrays, strict=True):
        assert part.num_padding == (a["segments"] == 0).sum()
        assert (a["labels"] == a["tokens"] + 1)[a["mask"]].all()


def test_step_and_seed_decide_and_hosts_read_their_parts():
    one, again = buckets().batch(7), buckets().batch(7)
    for name, array in one.items():
        np.testing.assert_array_equal(array, again[name])
        halves = [buckets().batch(7, rows)[name] for rows in (slice(0, 2), slice(2, 4))]
        np.testing.assert_array_equal(np.concatenate(halves, axis=1), array)
    assert one["tokens"].shape == (4, 4, S)
    assert (buckets(seed=1).batch(7)["sample_ids"] != one["sample_ids"]).any()
    made = buckets()
    first = made.buckets[0]
    seen = np.concatenate([made.sample_ids(step)[:2].reshape(-1) for step in range(first.num_rows // 8)])
    assert len(set(seen.tolist())) == len(seen)
    assert made.epochs(first.num_rows // 8)[0] >= len(seen) / first.num_rows
    assert set(made.source_of(np.array([0, -1, made.num_rows - 1])).tolist()) == {0, -1}


def test_an_empty_bucket_is_refused():
    short = [Tokens(np.arange(64, dtype=np.uint32), np.arange(0, 65, 4), tuple("abcdefghijklmnop"))]
    with pytest.raises(
        ValueError, match=r"cp_groups=\[1, 2, 4\]: of documents of up to 16 tokens, which are for 2 ranks"
    ):
        Buckets(short, S, GROUPS, rows=1, seed=0)
