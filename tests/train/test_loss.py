"""Cross entropy in chunks is plain cross entropy, and a padded vocabulary is the true one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesh import ALONE, abstract_mesh
from moex.config import ParallelConfig, TrainConfig
from moex.train.loss import cross_entropy_sum, logits
from moex.train.program import build
from moex.validate import resolve_fold

B, S, D, V, REAL = 3, 14, 8, 24, 19


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)
    hidden, head = rng.normal(size=(B, S, D)).astype(np.float32), rng.normal(size=(V, D)).astype(np.float32)
    return hidden, head, rng.integers(0, REAL, (B, S)), rng.random((B, S)) < 0.7


def in_numpy(hidden, head, labels, mask):
    """Sum of -log p and its gradients, in float64, of the true vocabulary."""
    x, w = hidden.reshape(-1, D).astype(np.float64), head[:REAL].astype(np.float64)
    scores = x @ w.T
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    at = np.arange(len(x)), labels.reshape(-1)
    error = p.copy()
    error[at] -= 1
    error *= mask.reshape(-1, 1)
    head_gradient = np.concatenate([error.T @ x, np.zeros((V - REAL, D))])
    return -(np.log(p[at]) * mask.reshape(-1)).sum(), (error @ w).reshape(hidden.shape), head_gradient


@pytest.mark.parametrize("chunk_tokens", [1, 7, 16, 41, 42, 1000])
def test_chunks_of_any_size_give_the_plain_loss_and_gradients(arrays, chunk_tokens):
    hidden, head, labels, mask = arrays
    loss = lambda h, w: cross_entropy_sum(h, w, labels, mask, ALONE, vocab_size=REAL, chunk_tokens=chunk_tokens)
    total, gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))(hidden, head)
    expected, *expected_gradients = in_numpy(*arrays)
    np.testing.assert_allclose(total, expected, rtol=1e-6)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())
    assert (gradients[1][REAL:] == 0).all()


def test_labels_under_a_false_mask_may_be_anything(arrays):
    hidden, head, labels, mask = arrays
    loss = lambda y: cross_entropy_sum(hidden, head, y, mask, ALONE, vocab_size=REAL, chunk_tokens=16)
    assert loss(labels) == loss(np.where(mask, labels, -7)) == loss(np.where(mask, labels, 10**6))


def test_loss_of_scores_that_would_overflow_is_finite(arrays):
    hidden, head, labels, mask = arrays
    total = cross_entropy_sum(hidden * 1e4, head, labels, mask, ALONE, vocab_size=REAL, chunk_tokens=16)
    assert np.isfinite(total)


def test_scores_of_added_rows_never_win():
    head = jnp.zeros((V, D)).at[REAL:].set(100.0)
    scores = logits(jnp.ones((2, D)), head, ALONE, vocab_size=REAL)
    assert scores.dtype == jnp.float32
    assert scores[:, REAL:].max() <= -1e30
    assert scores.argmax(axis=-1).max() < REAL


def test_logits_of_all_tokens_never_exist(harness):
    """Chunks of 48 tokens: no array of the step, forward or backward, has the size of 512 tokens' logits."""
    model = dataclasses.replace(harness.MODELS["gqa"], vocab_size=1003)
    train = TrainConfig(steps=10, batch_size=32, seq_len=16, loss_chunk_tokens=48)
    config = harness.config(model, train=train)
    fold = resolve_fold(config.parallel, 1)
    program = build(config, fold, mesh=abstract_mesh(fold))
    traced = program.train.trace(program.state, program.batch).jaxpr
    shapes = [x.aval.shape for e in harness.equations(traced) for x in (*e.invars, *e.outvars) if hasattr(x, "aval")]
    with_vocabulary = [shape for shape in shapes if 1008 in shape]
    assert (48, 1008) in with_vocabulary
    assert max(np.prod(shape) for shape in with_vocabulary) <= 48 * 1008


@pytest.fixture(scope="module")
def padded(harness):
    """Vocabulary 1003 of 1008 rows, 126 on each of eight devices: the last one has all that are padding."""
    model = dataclasses.replace(harness.MODELS["gqa"], vocab_size=1003)
    return harness.program(harness.config(model, optimizer=harness.ADAMW, parallel=ParallelConfig(tp=8)), 8)


def with_head(values, head):
    return values._replace(params=values.params | dict(ends=values.params["ends"] | dict(head=head)))


def test_zero_head_guesses_among_the_true_vocabulary(harness, padded):
    values = jax.device_get(padded.initial_state())
    values = with_head(values, np.zeros_like(values.params["ends"]["head"]))
    batch = harness.put(padded, harness.rows(padded.config))
    _, metrics = padded.train(harness.place_state(padded, values), batch)
    np.testing.assert_allclose(metrics["lm_loss"], 6.910751, atol=1e-5)  # ln 1003; ln 1008 is 6.915723


def test_added_rows_are_zero_and_stay_so(harness, padded):
    state = padded.initial_state()
    for at in range(4):
        state, metrics = padded.train(state, harness.put(padded, harness.rows(padded.config, seed=at), at))
        assert metrics["skipped"] == 0
    state = jax.device_get(state)
    for tree in (state.params, *(moments for moments in jax.tree.leaves(state.optimizer, is_leaf=is_ends))):
        if is_ends(tree):
            for name in ("embedding", "head"):
                rows = tree["ends"][name]
                assert rows.shape == (1008, 32)
                assert (rows[1003:] == 0).all(), name
                assert (rows[:1003] != 0).any(axis=-1).all() or name == "embedding"


def is_ends(tree):
    return isinstance(tree, dict) and "ends" in tree
