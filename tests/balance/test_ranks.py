"""Every rule runs where JAX refuses to add dims to an operand by itself, as this project's tests have it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moex import balance
from moex.config import RouterConfig
from moex.layers.router import route

LOGITS_TE = jax.random.normal(jax.random.key(0), (96, 8))


def test_sinkhorn_has_even_rows_and_columns():
    plan_TE = balance.sinkhorn(LOGITS_TE, jnp.ones((96,), bool), tolerance=1e-7)
    np.testing.assert_allclose(plan_TE.sum(axis=1), 1 / 96, rtol=1e-4)
    np.testing.assert_allclose(plan_TE.sum(axis=0), 1 / 8, rtol=1e-4)


@pytest.mark.parametrize("bias_E", [0.0, np.linspace(-0.1, 0.1, 8, dtype=np.float32)], ids=["one number", "each"])
def test_quantile_offsets_leave_an_equal_share_above(bias_E):
    config = RouterConfig(num_experts=8, top_k=2, selection="quantile")
    logits_BSE = LOGITS_TE[None]
    offsets_E = balance.quantile_offsets(logits_BSE, jnp.float32(bias_E), jnp.ones((1, 96), bool), config)
    alpha_T = jnp.sort(LOGITS_TE + np.reshape(bias_E, (1, -1)), axis=1)[:, -3]
    above_TE, share = LOGITS_TE - alpha_T[:, None], 96 * 2 // 8
    # The next best expert of a token is at 0, so several may stand at a threshold of 0.
    assert ((above_TE > offsets_E[None]).sum(axis=0) <= share).all()
    assert ((above_TE >= offsets_E[None]).sum(axis=0) > share).all()


def test_forced_skew_heats_the_same_experts_for_every_key():
    config = RouterConfig(num_experts=8, top_k=2, forced="skew", forced_skew=3.0)
    counts = [route(LOGITS_TE, None, config, key=jax.random.key(i), training=True).counts_E for i in range(2)]
    hot = [set(np.argsort(counts_E)[-2:].tolist()) for counts_E in counts]
    assert hot[0] == hot[1]
    assert min(int(counts_E.max()) for counts_E in counts) > 3 * 96 * 2 // 8
