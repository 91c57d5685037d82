"""XLA:CPU has no ragged all-to-all: a stand-in made of an all-gather, for the index arithmetic around it."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax


def ragged_all_to_all(x, out, send_from, send_rows, to_peer_at, receive_rows, *, axis_name):
    """`lax.ragged_all_to_all` by showing everyone everything; a row that no source writes keeps what stands in `out`."""
    x, starts, sizes, targets = (lax.all_gather(a, axis_name) for a in (x, send_from, send_rows, to_peer_at))
    me, row = lax.axis_index(axis_name), jnp.arange(out.shape[0])
    for source in range(x.shape[0]):
        start, size, target = (a[source, me] for a in (starts, sizes, targets))
        inside = (row >= target) & (row < target + size)
        taken = x[source][jnp.clip(row - target + start, 0, x.shape[1] - 1)]
        out = jnp.where(inside.reshape((-1,) + (1,) * (out.ndim - 1)), taken, out)
    return out


@pytest.fixture
def ragged_on_cpus(monkeypatch):
    """Puts the stand-in in XLA's place where there is none."""
    if jax.default_backend() == "cpu":
        monkeypatch.setattr(lax, "ragged_all_to_all", ragged_all_to_all)
