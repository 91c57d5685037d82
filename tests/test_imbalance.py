"""The benchmark of uneven routing runs, small: its draws are what they say they are."""

import numpy as np
import pytest

from benchmarks import imbalance


@pytest.mark.parametrize("name", imbalance.ROUTINGS)
def test_every_token_has_eight_experts(name):
    chosen = imbalance.ROUTINGS[name](np.random.default_rng(0), 64, 8)
    assert chosen.shape == (64 * 8, imbalance.TOP_K)
    assert all(len(set(token)) == imbalance.TOP_K for token in chosen)
    assert chosen.min() >= 0
    assert chosen.max() < imbalance.EXPERTS


def test_topics_stay_within_their_groups():
    chosen = imbalance.ROUTINGS["topics 1.0"](np.random.default_rng(0), 4, 64)
    groups = chosen * imbalance.GROUPS // imbalance.EXPERTS
    assert max(len(set(token)) for token in groups) <= imbalance.TOP_GROUPS


def test_the_table(capsys):
    assert imbalance.main(["--draws", "1", "--tokens", "64", "--ep", "8"]) == 0
    lines = {line[:28].strip(): line for line in capsys.readouterr().out.splitlines()}
    worst = lines["all tokens to the same 8"].split()
    assert worst[-12:-9] == ["8.00", "8.00", "7.00"]
    own = lines["each source to its own rank"].split()
    assert own[-12:-8] == ["1.00", "8.00", "0.88", "2"], "no buffer but the worst case holds it"
    assert set(lines) >= set(imbalance.ROUTINGS)


def test_bytes_by_hand():
    """1000 tokens, k 8, cells 1 and spill 0.35: 1.7 times 8000 rows of 7168 BF16 numbers, there and back."""
    assert imbalance.wire_gb(0, 64, 1000, 0) == pytest.approx(2 * 1.7 * 8000 * 7168 * 2 / 1e9)
    clones = imbalance.wire_gb(0, 64, 1000, 1) - imbalance.wire_gb(0, 64, 1000, 0)
    assert clones == pytest.approx(3 * 3 * 7168 * 2048 * 2 / 1e9), "three experts of three matrices"
