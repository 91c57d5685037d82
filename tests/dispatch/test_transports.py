"""The contract of dispatch, for every transport: where rows stand, what comes back, gradients, budgets.

Four devices hold 6 tokens each; 8 experts, 3 choices a token. All values are small whole numbers, so sums are exact in any
order and results can be compared bit by bit. Experts are linear: expert e multiplies by e + 1.

A new transport is one line in SETUPS. XLA:CPU has no ragged all-to-all: `ragged` runs here over a stand-in made of an
all-gather, which tests its index arithmetic and not XLA's collective.
"""

import functools
from typing import NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mesh import build_mesh, fold, sharded
from moex import dispatch
from tests.dispatch.linear import through_linear_experts
from tests.dispatch.stand_in import ragged_on_cpus
from tests.quick import quick_jit

__all__ = ["ragged_on_cpus"]

DEVICES, T, K, E, D = 4, 6, 3, 8, 5


class Setup(NamedTuple):
    """A transport over `ep` ranks of experts, each split over `etp`; the rest of the four devices repeat them (edp)."""

    transport: str
    ep: int = 1
    etp: int = 1
    cell: float = 0.0
    spill: float = 0.0

    @property
    def edp(self):
        return DEVICES // (self.ep * self.etp)


SETUPS = [
    Setup("local"),
    Setup("local", etp=2),
    Setup("allgather", ep=4),
    Setup("allgather", ep=2, etp=2),
    Setup("alltoall", ep=4),
    Setup("alltoall", ep=2),
    Setup("alltoall", ep=2, etp=2),
    Setup("alltoall", ep=4, cell=0.25, spill=4.0),
    Setup("alltoall", ep=2, etp=2, cell=0.5, spill=2.0),
    Setup("ragged", ep=4),
    Setup("ragged", ep=2, etp=2),
]
name_of = lambda s: f"{s.transport}-ep{s.ep}-etp{s.etp}" + (f"-cell{s.cell}-spill{s.spill}" if s.spill else "")
every_setup = pytest.mark.parametrize("setup", SETUPS, ids=name_of)
TRANSPORTED = {setup.transport for setup in SETUPS}


def test_every_transport_is_tested():
    assert set(dispatch.TRANSPORTS) == TRANSPORTED


class Results(NamedTuple):
    """One dispatch as seen from outside; a leading dim of 4 devices where values differ between them."""

    rows: np.ndarray  # [4, R, D], as the experts get them
    weights: np.ndarray  # [4, R]
    counts: np.ndarray  # [4, e]
    sizes: np.ndarray  # [4, e]
    overflow: np.ndarray  # [4]
    y: np.ndarray  # [24, D]
    dx: np.ndarray  # [24, D]
    dw: np.ndarray  # [24, k]


@functools.cache
def compiled(setup, align=4, cell_factor=None, row_factor=0.0):
    """(x, weights, experts, cotangent of y) -> Results: rows through the linear experts and back, and gradients."""
    folded = fold(dict(dp=DEVICES), dict(edp=setup.edp, ep=setup.ep, etp=setup.etp))
    name = setup.transport

    def local(x, w, experts, cotangent):
        cells = setup.cell if cell_factor is None else cell_factor
        factors = dict(cell_factor=cells, spill_factor=setup.spill, row_factor=row_factor)
        plan = dispatch.plan(name, experts, E, folded, align=align, **factors)

        there_and_back = functools.partial(through_linear_experts, name, plan, E, folded)
        y, pull, (rows, weights) = jax.vjp(there_and_back, x, w, has_aux=True)
        dx, dw = pull(cotangent)
        one = lambda a: a[None]
        return Results(*map(one, (rows, weights, plan.counts_e, plan.sizes_e, plan.overflow)), y, dx, dw)

    spec = P(folded.names)
    mesh = build_mesh(folded, jax.devices()[:DEVICES])
    return quick_jit(sharded(local, mesh, (spec,) * 4, Results(*(spec,) * 8)))


@pytest.fixture(autouse=True)
def everywhere(ragged_on_cpus):
    """Every transport runs here."""


def distinct(rng, low=0, high=E):
    return np.stack([low + rng.permutation(high - low)[:K] for _ in range(DEVICES * T)])


def patterns():
    rng = np.random.default_rng(0)
    random = distinct(rng)
    dropped = random.copy()
    dropped[rng.random(dropped.shape) < 0.3] = E  # sentinel: goes nowhere
    dropped[rng.random(dropped.shape) < 0.2] = -1
    dropped[5] = E
    hot = np.where(np.arange(K)[None] == rng.integers(0, K, (DEVICES * T, 1)), 6, E)
    uneven = np.where((np.arange(DEVICES * T) // T == 1)[:, None], random, E)  # only device 1 has any token
    return dict(
        random=random,
        dropped=dropped,
        all_to_one=hot,
        one_source=uneven,
        one_rank=distinct(rng, 0, 3),  # only experts 0, 1, 2: one rank gets everything, expert 7 and others nothing
        nowhere=np.full((DEVICES * T, K), E),
    )


PATTERNS = patterns()
every_pattern = pytest.mark.parametrize("pattern", PATTERNS)


def whole_numbers(seed, *shape):
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)


X, W, G = whole_numbers(1, DEVICES * T, D), whole_numbers(2, DEVICES * T, K), whole_numbers(3, DEVICES * T, D)


def random_floats():
    rng = np.random.default_rng(7)
    return (rng.normal(size=a.shape).astype(np.float32) for a in (X, W, G))


def run(setup, experts, x=X, w=W, g=G, **options) -> Results:
    return Results(*map(np.asarray, compiled(setup, **options)(x, w, experts.astype(np.int32), g)))


def valid(experts):
    return (experts >= 0) & (experts < E)


def local_experts(setup):
    """(device, local expert, expert, tokens that may reach it) for every buffer segment on the four devices."""
    block = DEVICES * T // setup.edp
    for device in range(DEVICES):
        outer, rest = divmod(device, setup.ep * setup.etp)
        rank = rest // setup.etp
        for i in range(E // setup.ep):
            yield device, i, rank * (E // setup.ep) + i, range(outer * block, (outer + 1) * block)


UNALIGNED = [(s, 1) for s in SETUPS if s.ep == 4 or s == Setup("local")]


@pytest.mark.parametrize("setup, align", [(s, 4) for s in SETUPS] + UNALIGNED)
@every_pattern
def test_rows_stand_in_canonical_order_at_aligned_starts(setup, align, pattern):
    """Inside an expert by (source, token, choice), which is the order of all tokens; pad rows and their weights zero."""
    experts = PATTERNS[pattern]
    got = run(setup, experts, align=align)
    np.testing.assert_array_equal(got.overflow, 0)
    np.testing.assert_array_equal(got.sizes, -(-got.counts // align) * align)
    end = np.zeros(DEVICES, int)
    for device, i, expert, tokens in local_experts(setup):
        want = [(t, j) for t in tokens for j in range(K) if experts[t, j] == expert]
        start, count = end[device], got.counts[device, i]
        assert start % align == 0
        assert count == len(want)
        rows, weights = got.rows[device, start : start + count], got.weights[device, start : start + count]
        np.testing.assert_array_equal(rows, X[[t for t, _ in want]].reshape(-1, D))
        np.testing.assert_array_equal(weights, [W[pair] for pair in want])
        end[device] = start + got.sizes[device, i]
        np.testing.assert_array_equal(got.rows[device, start + count : end[device]], 0)
        np.testing.assert_array_equal(got.weights[device, start + count : end[device]], 0)
    for device in range(DEVICES):
        np.testing.assert_array_equal(got.rows[device, end[device] :], 0)
        np.testing.assert_array_equal(got.weights[device, end[device] :], 0)


@every_setup
@every_pattern
def test_each_pair_meets_its_own_expert_and_weight(setup, pattern):
    """Forward: y = x sum_j w_j (e_j + 1). Backward: its exact transpose. Pad rows come back from the experts as NaN."""
    experts = PATTERNS[pattern]
    factor = np.where(valid(experts), experts + 1, 0)
    got = run(setup, experts)
    np.testing.assert_array_equal(got.y, X * (W * factor).sum(axis=1, keepdims=True))
    np.testing.assert_array_equal(got.dx, G * (W * factor).sum(axis=1, keepdims=True))
    np.testing.assert_array_equal(got.dw, factor * (X * G).sum(axis=1, keepdims=True))


@every_setup
def test_nan_in_a_token_that_goes_nowhere_reaches_nobody(setup):
    experts = PATTERNS["dropped"]
    lost = ~valid(experts).any(axis=1)
    assert lost.any()
    x, g = np.where(lost[:, None], np.nan, X), np.where(lost[:, None], np.nan, G)
    got, clean = run(setup, experts, x=x, g=g), run(setup, experts)
    for name in ("rows", "weights", "y", "dx", "dw"):
        np.testing.assert_array_equal(getattr(got, name), getattr(clean, name), err_msg=name)
    np.testing.assert_array_equal(got.y[lost], 0)


@every_setup
@every_pattern
def test_transports_bring_an_expert_the_same_rows(setup, pattern):
    """`send` against the local transport of one group of devices: every expert's rows, whoever brought them."""
    experts = PATTERNS[pattern]
    here, there = (by_expert(s, run(s, experts)) for s in (setup, Setup("local")))
    for expert in range(E):
        np.testing.assert_array_equal(here[expert], there[expert])


def by_expert(setup, got):
    """Each expert's rows with their weights, groups of devices (edp) one after the other, etp's copies left out."""
    found = {e: [] for e in range(E)}
    start = np.zeros(DEVICES, int)
    for device, i, expert, _ in local_experts(setup):
        part = slice(start[device], start[device] + got.counts[device, i])
        start[device] += got.sizes[device, i]
        if device % setup.etp == 0:
            found[expert].append(np.concatenate([got.rows[device, part], got.weights[device, part, None]], axis=1))
    return {e: np.concatenate(parts) for e, parts in found.items()}


IN_ORDER = [s for s in SETUPS if s.transport != "allgather" and s.etp == 1]  # a reduce-scatter sums by rank


@pytest.mark.parametrize("setup", IN_ORDER, ids=name_of)
def test_results_are_summed_in_the_order_of_choices(setup):
    """2^27 + 1 - 2^27 in float32 is 0 from left to right, 1 in another order."""
    experts = np.tile([3, 0, 6], (DEVICES * T, 1))
    w = np.tile(np.array([2.0**27 / 4, 1, -(2.0**27) / 7], np.float32), (DEVICES * T, 1))
    left_to_right = np.float32(w[0, 0] * 4) + np.float32(w[0, 1] * 1) + np.float32(w[0, 2] * 7)
    got = run(setup, experts, x=np.ones_like(X), w=w)
    np.testing.assert_array_equal(got.y, left_to_right)
    assert left_to_right == 0


@pytest.mark.parametrize("setup", IN_ORDER, ids=name_of)
def test_bits_do_not_depend_on_the_transport(setup):
    x, w, g = random_floats()
    here, there = (run(s, PATTERNS["random"], x, w, g) for s in (setup, Setup("local")))
    for name in ("y", "dx", "dw"):
        np.testing.assert_array_equal(getattr(here, name), getattr(there, name), err_msg=name)


# --- budgets --------------------------------------------------------------------------------------------------------

TIGHT = [
    (Setup("local"), dict(row_factor=1.0)),
    (Setup("allgather", ep=4), dict(row_factor=2.0)),
    (Setup("alltoall", ep=4), dict(cell_factor=2.0)),
    (Setup("alltoall", ep=4), dict(cell_factor=2.0, row_factor=2.0)),
    (Setup("alltoall", ep=4, spill=1.0), dict(cell_factor=0.5, row_factor=2.0)),
    (Setup("alltoall", ep=4, spill=0.7), dict(cell_factor=1.0)),
    (Setup("ragged", ep=4), dict(row_factor=2.0)),
]


@pytest.mark.parametrize("setup, factors", TIGHT)
def test_bits_do_not_depend_on_the_budget(setup, factors):
    x, w, g = random_floats()
    experts = np.stack([(3 * t + np.array([0, 3, 6])) % E for t in range(DEVICES * T)])  # balanced
    small, large = run(setup, experts, x, w, g, **factors), run(setup, experts, x, w, g)
    np.testing.assert_array_equal(small.overflow, 0)
    assert setup.ep == 1 or "row_factor" not in factors or small.rows.shape[1] < large.rows.shape[1]
    for name in ("y", "dx", "dw", "counts"):
        np.testing.assert_array_equal(getattr(small, name), getattr(large, name), err_msg=name)


@pytest.mark.parametrize(
    "name, factors",
    [
        ("alltoall", dict(cell_factor=1.0)),
        ("alltoall", dict(row_factor=1.0)),
        ("ragged", dict(row_factor=1.0)),
        ("allgather", dict(row_factor=1.0)),
    ],
)
def test_what_finds_no_room_is_counted(name, factors):
    """Everything wants rank 0. The step is then not applied; what is left is finite and inside the buffer."""
    setup, experts = Setup(name, ep=4), PATTERNS["one_rank"] % 2
    experts = np.stack([experts[:, 0], 1 - experts[:, 0], np.full(DEVICES * T, E)], axis=1)  # both experts of rank 0
    got = run(setup, experts, **factors)
    kept = sum(np.abs(part).sum(axis=1).astype(bool).sum() for part in got.rows)
    assert got.overflow.sum() > 0
    assert got.overflow.sum() + np.minimum(got.counts, got.sizes).sum() == experts.shape[0] * 2
    assert (got.sizes.sum(axis=1) <= got.rows.shape[1]).all()
    assert kept <= got.rows.shape[1]
    assert all(np.isfinite(value).all() for value in (got.rows, got.weights))


def test_budgets_are_factors_of_balanced_and_never_above_the_worst_case():
    assert dispatch.budget(96, 4, 8, 4, cell_factor=1.5, row_factor=1.25) == dispatch.Budget(
        cell_rows=72, rows=480, align=1
    )
    worst = dispatch.Budget(cell_rows=384, rows=3072, align=1)
    assert dispatch.worst_case(96, 4, 8, 4) == dispatch.budget(96, 4, 8, 4) == worst
    assert dispatch.budget(96, 4, 8, 4, cell_factor=100, row_factor=100) == worst
    # A rank of two experts gets two rows of a token at most.
    assert dispatch.worst_case(96, 4, 8, 2) == dispatch.Budget(cell_rows=192, rows=1536, align=1)
    # Alignment: room for every expert's padding, a multiple of it.
    assert dispatch.worst_case(10, 1, 1, 4, align=8) == dispatch.Budget(cell_rows=10, rows=40, align=8)
    with pytest.raises(ValueError, match=r"cell_factor=-1.*row_factor=0"):
        dispatch.budget(96, 4, 8, 4, cell_factor=-1)


def test_local_refuses_experts_that_are_elsewhere():
    with pytest.raises(ValueError, match=r"local holds all experts.*dp_ep"):
        compiled(Setup("local", ep=4))(X, W, PATTERNS["random"].astype(np.int32), G)


def test_what_does_not_run_here_says_why():
    assert dispatch.unavailable("ragged", "cpu") == "XLA has no ragged all-to-all on CPUs"
    assert not any(dispatch.unavailable(name, "gpu") for name in dispatch.TRANSPORTS)
