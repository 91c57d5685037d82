"""Identity experts give identity, forward and backward, on every transport and every way to fold eight devices.

Each device holds 3 tokens; 8 experts, 3 choices a token, whose weights sum to one. Whole numbers: exact.
"""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mesh import build_mesh, fold, sharded
from moex import dispatch
from tests.dispatch.linear import through_linear_experts
from tests.dispatch.stand_in import ragged_on_cpus
from tests.foldings import FOLDINGS, sizes
from tests.quick import quick_jit

__all__ = ["ragged_on_cpus"]

DEVICES, T, K, E, D = 8, 3, 3, 8, 4
TOKENS = DEVICES * T
SETUPS = [(transport, *folding) for folding in FOLDINGS for transport in ("allgather", "alltoall")]
# Only index arithmetic is tested of ragged here, over a slow stand-in: experts over all parts, over one part, with etp.
SETUPS += [("ragged", (2, 2, 2), (1, 8, 1)), ("ragged", (8, 1, 1), (4, 2, 1)), ("ragged", (4, 1, 2), (1, 4, 2))]
SETUPS += [("local", (2, 2, 2), (8, 1, 1)), ("local", (2, 2, 2), (2, 1, 4)), ("local", (1, 1, 8), (1, 1, 8))]
name_of = lambda value: value if isinstance(value, str) else "x".join(map(str, value))


def patterns():
    rng = np.random.default_rng(0)
    random = np.stack([rng.permutation(E)[:K] for _ in range(TOKENS)])
    only_one = np.where(np.arange(K) == 0, 6, E) + np.zeros((TOKENS, 1), int)
    idle = np.where((np.arange(TOKENS) // T % 3 == 1)[:, None], random, E)  # two of three devices have no token
    return dict(random=random, all_to_one=only_one, idle_devices=idle)


PATTERNS = patterns()


@functools.cache
def compiled(transport, dense, expert):
    folded = fold(*sizes(dense, expert))

    def local(x, w, experts, g):
        plan = dispatch.plan(transport, experts, E, folded, align=4)
        there_and_back = functools.partial(through_linear_experts, transport, plan, E, folded, identity=True)
        y, pull, _ = jax.vjp(there_and_back, x, w, has_aux=True)
        return y, *pull(g), plan.overflow[None], plan.counts_e[None]

    spec = P(folded.names)
    return quick_jit(sharded(local, build_mesh(folded, jax.devices()[:DEVICES]), (spec,) * 4, (spec,) * 5))


@pytest.mark.parametrize("transport, dense, expert", SETUPS, ids=name_of)
def test_identity_experts_give_identity(transport, dense, expert, ragged_on_cpus):
    """The tokens of a device without any come back zero, and so do their gradients; pad rows are NaN all the while."""
    rng = np.random.default_rng(1)
    x, g = (rng.integers(-4, 5, (TOKENS, D)).astype(np.float32) for _ in range(2))
    w = np.tile(np.array([3, -4, 2], np.float32), (TOKENS, 1))
    for name, experts in PATTERNS.items():
        goes = (experts >= 0) & (experts < E)
        weights = np.where(goes.all(axis=1, keepdims=True), w, goes)  # they sum to one whether one choice goes or three
        arguments = x, weights.astype(np.float32), experts.astype(np.int32), g
        y, dx, dw, overflow, counts = jax.device_get(compiled(transport, dense, expert)(*arguments))
        np.testing.assert_array_equal(overflow, 0, err_msg=name)
        assert counts.sum() == goes.sum() * expert[2], name  # every etp rank works on all rows
        some = goes.any(axis=1, keepdims=True)
        np.testing.assert_array_equal(y, np.where(some, x, 0), err_msg=name)
        np.testing.assert_array_equal(dx, np.where(some, g, 0), err_msg=name)
        np.testing.assert_array_equal(dw, goes * (x * g).sum(axis=1, keepdims=True), err_msg=name)


def test_every_transport_is_tested():
    assert {transport for transport, *_ in SETUPS} == set(dispatch.TRANSPORTS)


def test_experts_lie_across_every_dense_axis():
    atoms = {name for folding in FOLDINGS for name in fold(*sizes(*folding)).names}
    assert {"dp_ep", "cp_ep", "tp_ep"} <= atoms
    assert {name for name in atoms if name.endswith("_etp")}
    together = [{name[:2] for name in fold(*sizes(*folding)).expert.ep} for folding in FOLDINGS]
    assert {"dp", "cp", "tp"} in together
