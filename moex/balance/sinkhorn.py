"""Sinkhorn's iteration: scales rows and columns of exp(logits) until every expert has the same share."""

import jax.numpy as jnp
from jax import lax

from mesh import collectives
from mesh.axes import Axes
from mesh.vma import vary, varying

_TINY, _MOST = 1e-8, 1000


def sinkhorn(logits_TE, real_T, *, axes: Axes = (), tolerance: float = 1e-4):
    """A matrix whose rows sum to 1/T and columns to 1/E, from which to pick experts (S-BASE, arXiv 2202.01169).

    Rows: d0 = 1/T / (C d1), columns: d1 = 1/E / (C^T d0) with C = exp(logits), until the mean change of d1 falls below
    `tolerance` (or for 1000 rounds). T counts the real tokens of all devices along `axes`; others weigh nothing.

    Returns: float32 [T, E], without gradient.
    """
    logits_TE = lax.stop_gradient(logits_TE.astype(jnp.float32))
    finite_T = jnp.isfinite(logits_TE).all(axis=-1)  # a token without finite logits may not spoil the others
    real_T, logits_TE = real_T & finite_T, jnp.where(finite_T[:, None], logits_TE, 0)
    # A factor of a row is taken up by d0, so each row may be scaled to a maximum of 1.
    cost_TE = jnp.exp(logits_TE - logits_TE.max(axis=-1, keepdims=True)) * real_T[:, None]
    num_tokens = jnp.maximum(collectives.psum(real_T.sum(dtype=jnp.int32), axes), 1).astype(jnp.float32)
    num_experts = logits_TE.shape[1]
    rows = lambda d1_E: 1 / num_tokens / ((cost_TE * d1_E[None]).sum(axis=-1) + _TINY)
    columns = lambda d0_T: 1 / num_experts / (collectives.psum((cost_TE * d0_T[:, None]).sum(axis=0), axes) + _TINY)

    def body(carry):
        d1_E, _, n = carry
        new_E = columns(rows(d1_E))
        return new_E, jnp.abs(new_E - d1_E).mean(), n + 1

    beyond = varying(cost_TE) - set(axes)  # on a mesh with axes that tokens are not split over
    start = (vary(jnp.ones((num_experts,), jnp.float32), beyond), vary(jnp.float32(jnp.inf), beyond), jnp.int32(0))
    d1_E = lax.while_loop(lambda c: (c[1] > tolerance) & (c[2] < _MOST), body, start)[0]
    return cost_TE * d1_E[None] * rows(d1_E)[:, None]
