"""The routing report by layer, on counts whose numbers are plain to see."""

import math

import numpy as np
import pytest

from moex.observe.load import load_entropy
from moex.observe.moe import layers, lost_pairs
from moex.observe.run import read_run


def test_entropy_of_known_shares():
    counts = np.array([[1, 1, 1, 1], [4, 0, 0, 0], [2, 2, 0, 0], [0, 0, 0, 0], [3, 1, np.nan, np.nan]], float)
    third = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(2)
    np.testing.assert_allclose(load_entropy(counts), [1, 0, 0.5, np.nan, third], rtol=1e-12)


def test_layers_and_what_was_lost(write_run, tmp_path):
    def change(record):
        record["expert_counts"] = [[100, 100, 100, 100], [370, 20, 10, 0]]
        record["dropped"] = 3 if record["step"] < 2 else 0
        record["gate_load"] = [1.25, 3.5]

    write_run(tmp_path, change=change)
    run = read_run(tmp_path)
    even, skewed = layers(run)
    assert even == (0, 1.0, 1.0, pytest.approx(1.0), 1.25, ())
    assert (skewed.layer, skewed.load, skewed.least, skewed.dead) == (1, pytest.approx(3.7), 0.0, (3,))
    assert 0.1 < skewed.entropy < 0.4 and skewed.gates == 3.5
    assert lost_pairs(run) == {"dropped": 6}


def test_a_log_without_gate_mass_still_has_layers(write_run, tmp_path):
    assert all(math.isnan(layer.gates) for layer in layers(read_run(write_run(tmp_path))))


def test_a_dense_run_has_no_layers(write_run, tmp_path):
    write_run(tmp_path, change=lambda record: record.update(expert_counts=[]))
    assert layers(read_run(tmp_path)) == []
