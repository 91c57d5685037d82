"""A piece's two passes give autodiff's gradients, and keep what depends on activations, once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moex.pipeline.residuals import Piece

WEIGHTS = dict(
    up=np.random.default_rng(0).normal(size=(3, 8, 16)).astype(np.float32),
    down=np.random.default_rng(1).normal(size=(16, 8)).astype(np.float32),
)
X = np.random.default_rng(2).normal(size=(4, 8)).astype(np.float32)
KNOWN = dict(which=np.int32(1), scale=np.full((1, 16), 0.5, np.float32))


def block(weights, known, x):
    """Weights and what is known are cut, cast and multiplied before they meet the activations; a mask meets no weight."""
    up = (weights["up"][known["which"]] * known["scale"]).astype(jnp.bfloat16).astype(jnp.float32)
    causal = jnp.arange(4)[:, None] >= jnp.arange(4)[None]
    mixed = jnp.where(causal, jnp.sin(x @ x.T), 0) @ x
    hidden = jnp.tanh(mixed @ up)
    return dict(y=x + (hidden * hidden) @ weights["down"], loss=jnp.square(hidden).sum()), hidden.max()


@pytest.mark.parametrize("remat", [False, True])
def test_gradients_are_those_of_autodiff(remat):
    function = jax.checkpoint(block, prevent_cse=False) if remat else block
    piece = Piece.of(function, WEIGHTS, KNOWN, X)
    g = dict(y=np.cos(X), loss=np.float32(0.3))

    def plain(weights, x):
        out, _ = block(weights, KNOWN, x)
        return (out["y"] * g["y"]).sum() + out["loss"] * g["loss"]

    @jax.jit
    def passes(weights, known, x):
        out, rest, kept = piece.forward(weights, known, x)
        return out, rest, piece.backward(weights, known, kept, g)

    out, rest, found = passes(WEIGHTS, KNOWN, X)
    np.testing.assert_allclose(out["y"], block(WEIGHTS, KNOWN, X)[0]["y"], rtol=1e-5, atol=1e-6)
    assert rest.shape == ()
    wanted = jax.grad(plain, argnums=(0, 1))(WEIGHTS, X)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_weights_masks_and_doubles_are_not_kept():
    """4 x 16 are hidden rows, 8 x 16 and 16 x 8 weights, bool [4, 4] the mask."""
    piece = Piece.of(block, WEIGHTS, KNOWN, X)
    kept = jax.eval_shape(piece.forward, WEIGHTS, KNOWN, X)[2]
    shapes = [x.shape for x in kept]
    assert not {(8, 16), (16, 8), (3, 8, 16), (1, 16)} & set(shapes)
    assert all(x.dtype != bool for x in kept)
    assert len(piece.places) > len(kept)
    again = Piece.of(jax.checkpoint(block, prevent_cse=False), WEIGHTS, KNOWN, X)
    assert [x.shape for x in jax.eval_shape(again.forward, WEIGHTS, KNOWN, X)[2]] == [X.shape]


def test_zero_cotangents_give_exact_zeros():
    """The mask of a bubble: whatever finite numbers were kept."""
    piece = Piece.of(block, WEIGHTS, KNOWN, X)
    kept = [1e30 * jnp.ones(x.shape, x.dtype) for x in jax.eval_shape(piece.forward, WEIGHTS, KNOWN, X)[2]]
    found = jax.jit(piece.backward)(WEIGHTS, KNOWN, kept, dict(y=np.zeros_like(X), loss=np.float32(0)))
    assert not any(np.any(x) for x in jax.tree.leaves(found))
