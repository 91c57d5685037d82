"""Multi-token prediction against the reference library's module for it: loss and every gradient, on one device and split."""

import numpy as np
import pytest

from tests.models.golden import golden, results

NAME = "../mtp"  # beside the families


@pytest.mark.parametrize("folding", ["one", "ring"])
def test_loss_and_every_gradient(folding):
    g, r = golden(NAME), results(NAME, folding)
    assert g.config.model.mtp_depth == 1 and g.config.model.mtp_coefficient == 0.1
    assert {piece.tensor for piece in g.pieces} == g.folder.tensors.keys()
    np.testing.assert_allclose(r.loss, g.expected["loss"][0], rtol=1e-6)
    np.testing.assert_allclose(r.sums.mtp, 0.1 * g.expected["further_loss"][0], rtol=1e-5)
    want = g.gradients
    wrong = {
        key: error
        for key in want
        if not (error := np.abs(r.gradients[key] - want[key]).max()) <= 2e-5 * np.abs(want[key]).max()
    }
    assert not wrong
    np.testing.assert_allclose(r.logits[..., : want["lm_head.weight"].shape[0]], g.expected["logits"], atol=1e-4)
