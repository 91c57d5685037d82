"""`python -m moex.balance simulate`: loads and buffers of recorded routing on other numbers of ranks."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from mesh import build_mesh, fold, sharded
from moex import dispatch
from moex.balance.__main__ import counted, main, recorded
from moex.balance.simulate import Cloning, group_counts, overflowing, retries, simulate, wire_rows
from moex.config import ModelConfig, ParallelConfig, RouterConfig
from moex.layers import passage
from moex.layers.experts import Experts
from moex.observe import routing
from tests.quick import quick_jit

EVEN, HOT = [10] * 8, [70, *[10] * 7]


@pytest.fixture
def run(tmp_path):
    """Two steps of two layers: even, and one expert with half of all tokens."""
    lines = [dict(step=n, expert_counts=[EVEN, HOT]) for n in range(2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_loads_by_hand(run):
    draws = counted(run, 0)[:, None] * np.array([1, 0, 0, 0])[None, :, None]
    found = simulate(draws, 1.0, Cloning(slots=1, hot_per_home=2, cap=1.0))
    np.testing.assert_allclose(found.plain.load, [1, 80 / 35] * 2)
    np.testing.assert_allclose(found.cloned.load, [1, 1] * 2)
    assert found.clones.tolist() == [0, 3] * 2


def test_cells_and_spill_by_hand():
    """Two ranks with 8 pairs each: cells hold 4. The first sends 7 to the second, the second keeps 5."""
    counts = np.array([[[1, 0, 4, 3], [1, 2, 3, 2]]])
    found = simulate(counts, 1.0, Cloning(cap=1000.0)).plain
    np.testing.assert_allclose([found.load, found.cell, found.spill], [[12 / 8], [7 / 4], [4 / 8]])
    options = dict(cell_factor=1.0, spill_factor=0.5, row_factor=1.5)
    assert not overflowing(found, **options)
    assert overflowing(found, **options | dict(spill_factor=0.4))
    assert overflowing(found, **options | dict(row_factor=1.4))
    assert overflowing(found, cell_factor=1.0, spill_factor=0.0, row_factor=0.0)
    assert not overflowing(found, cell_factor=0.0, spill_factor=0.0, row_factor=0.0)
    assert wire_rows(100, 8, 64, cell_factor=1.0, spill_factor=0.35, num_local=4) == pytest.approx(1.7 * 800)
    assert wire_rows(100, 8, 64, cell_factor=0.0, spill_factor=0.0, num_local=4) == 64 * 100 * 4
    assert retries(0.01, 100) == pytest.approx(0.634, abs=1e-3)


def test_choices_are_dealt_to_ranks_in_their_order():
    experts = np.array([[0, 1], [0, 3], [4, 2], [2, 2], [1, 1], [1, 1], [1, 1], [1, 0]])  # 4 is nobody
    first, second = group_counts(experts, 2, 4, tokens_per_rank=2)
    np.testing.assert_array_equal(first, [[2, 1, 0, 1], [0, 0, 3, 0]])
    np.testing.assert_array_equal(second, [[0, 4, 0, 0], [1, 3, 0, 0]])
    (whole,) = group_counts(experts, 4, 4)
    np.testing.assert_array_equal(whole.sum(axis=0), (first + second).sum(axis=0))
    with pytest.raises(ValueError, match="8 tokens don't divide into groups of 3 ranks with 2 tokens each"):
        list(group_counts(experts, 3, 4))


@pytest.mark.parametrize("slots", [0, 1])
def test_needs_are_those_of_the_transport(devices, slots):
    """The simulated cell, spill and rows are what the layer's dispatch measures on eight devices."""
    ranks, tokens, experts_, top_k = 8, 32, 16, 2
    rng = np.random.default_rng(4)
    weights = np.arange(1, experts_ + 1) ** -0.9
    chosen = np.stack([rng.choice(experts_, top_k, False, weights / weights.sum()) for _ in range(ranks * tokens)])
    folded = fold(dict(dp=ranks), dict(ep=ranks))
    parallel = ParallelConfig(
        ep=ranks, transport="alltoall", cell_factor=1.0, spill_factor=9.0, row_factor=9.0, echo_slots=slots
    )

    def local(chosen, gate_up, down):
        module = nnx.merge(
            nnx.graphdef(Experts(ModelConfig(d_model=8, expert_width=8, router=RouterConfig(num_experts=2)))),
            dict(gate_up=gate_up, down=down),
        )
        copies = passage.copies(module, chosen, experts_, folded, parallel)
        options = dict(cell_factor=1.0, spill_factor=9.0, row_factor=9.0)
        plan = dispatch.plan("alltoall", copies.chosen_Tk, copies.number, folded, **options)
        return dispatch.relative_need(plan, chosen.size, folded)[None], copies.load[None]

    spec = P(folded.names)
    program = quick_jit(sharded(local, build_mesh(folded, devices), (spec,) * 3, (spec, spec)))
    gate_up, down = jnp.ones((experts_, 8, 2, 8)), jnp.ones((experts_, 8, 8))
    needs, load = jax.device_get(program(chosen.astype(np.int32), gate_up, down))
    found = simulate(np.stack(list(group_counts(chosen, ranks, experts_))), 1.0, Cloning())
    want = found.cloned if slots else found.plain
    np.testing.assert_allclose(needs.max(axis=0)[[0, 2]], [want.cell[0], want.load[0]], rtol=1e-6)
    sources_only = needs[:, 1].max()  # a rank knows what it spills; what is spilled to one rank, from a relay's cells
    assert want.spill[0] * 0.5 <= sources_only <= want.spill[0] + ranks * ranks / (tokens * top_k)
    if slots:
        np.testing.assert_allclose(load, want.load[0], rtol=1e-6)


def test_the_table(run, capsys):
    assert main(["simulate", str(run), "--ep", "1", "4", "--cap", "1.0", "--first-step", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "2, 2" in lines[0]
    assert [line.split()[0] for line in lines[3:5]] == ["1", "4"]
    assert lines[4].split()[3] == "2.29"
    assert "--observe.record_routing_every" in lines[5]


@pytest.fixture
def with_choices(run):
    """A recorded step: 2 micro-batches of 4 rows of 16 tokens, 3 layers, 2 of 8 experts."""
    rng = np.random.default_rng(0)
    experts = rng.integers(0, 9, (2, 4, 16, 3, 2))
    for step in (0, 7):
        routing.write(run, step, experts, 8)
    return run, experts


def test_recorded_choices_come_back(with_choices):
    run, experts = with_choices
    (first, got, number), (last, again, _) = routing.read(run)
    assert (first, last, number) == (0, 7, 8)
    np.testing.assert_array_equal(got, experts)
    np.testing.assert_array_equal(again, experts)
    assert [step for step, *_ in routing.read(run, 1)] == [7]
    draws = recorded(run, 4, 0, first_step=7)
    assert draws.shape == (2 * 3, 4, 8)
    assert draws.sum() == (experts < 8).sum()


def test_buffers_and_a_figure_of_recorded_choices(with_choices, tmp_path, capsys):
    run, _ = with_choices
    figure = tmp_path / "needs.svg"
    assert main(["simulate", str(run), "--ep", "2", "4", "--figure", str(figure), "--rows", "1.0"]) == 0
    out = capsys.readouterr().out
    assert "draws (steps x micro-batches x layers): 12, 12" in out
    assert "buffers: cell 1, spill 0.35, rows 1" in out
    buffers = [line.split()[:2] for line in out.splitlines() if line.strip()[:1].isdigit()][-4:]
    assert buffers == [["2", "plain"], ["2", "clones"], ["4", "plain"], ["4", "clones"]]
    text = figure.read_text()
    assert text.startswith("<svg")
    assert all(name in text for name in ("fullest cell", "with clones", "2 ranks, with clones: load"))
    assert "var(" not in text


def test_a_broken_recording_is_named(with_choices, capsys):
    run, _ = with_choices
    (run / "routing" / "00000007.npz").write_bytes(b"torn")
    assert main(["simulate", str(run), "--ep", "2"]) == 2
    assert "00000007.npz: no recorded choices" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--ep", "3"], "8 experts don't divide by 3 ranks"),
        (["--ep", "0"], "--ep 0 must be at least 1"),
        (["--slots", "0"], "--slots 0"),
        (["--spill", "-1"], "must not be negative"),
        (["--first-step", "9"], "no tokens of experts from step 9 on"),
    ],
)
def test_what_does_not_fit_exits_2_with_a_sentence(run, capsys, arguments, message):
    assert main(["simulate", str(run), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_no_run_folder(tmp_path, capsys):
    assert main(["simulate", str(tmp_path)]) == 2
    assert "is no run folder" in capsys.readouterr().err
