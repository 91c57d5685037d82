"""The tables of a pipeline against a simulation that knows only what a unit waits for."""

import itertools

import numpy as np
import pytest

from moex.pipeline.schedules import one_f_one_b

SIZES = [
    (p, v, m)
    for p, v, m in itertools.product((1, 2, 3, 4, 8), (1, 2, 4), (1, 2, 4, 6, 8, 16, 32))
    if v == 1 or m % p == 0
]


def simulated(p: int, v: int, m: int, delay: int) -> int:
    """Ticks of greedy ranks in lock step: a unit waits for its neighbour's of an earlier tick, backward ones come last.

    Ranks take units in the order of 1F1B: groups of p micro-batches through one chunk after the other.
    """
    order = [(g * p + i, c) for g in range(-(-m // p)) for c in range(v) for i in range(p) if g * p + i < m]
    if v == 1:
        order = [(i, 0) for i in range(m)]
    back = [(i, v - 1 - c) for i, c in order]
    done: dict[tuple[str, int, int], int] = {}
    at = {("F", r): 0 for r in range(p)} | {("B", r): 0 for r in range(p)}
    tick, last = 0, v * p - 1
    while any(at["B", r] < len(back) for r in range(p)):
        for kind, r in itertools.product("FB", range(p)):
            units = order if kind == "F" else back
            if at[kind, r] == len(units):
                continue
            i, c = units[at[kind, r]]
            stage = c * p + r
            before = lambda key, gap=1, now=tick: done.get(key, now) <= now - gap
            if kind == "F":
                ready = stage == 0 or before(("F", i, stage - 1))
            else:
                ready = before(("F", i, stage), delay) and done.get(("F", i, stage)) is not None
                ready = ready and (stage == last or before(("B", i, stage + 1)))
            if ready:
                done[kind, i, stage] = tick
                at[kind, r] += 1
        tick += 1
    return tick


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("p, v, m", SIZES)
def test_as_few_ticks_as_greedy_ranks_and_the_ideal_bubble(p, v, m, delay):
    schedule = one_f_one_b(p, v, m, delay=delay)
    assert schedule.num_ticks == simulated(p, v, m, delay)
    assert schedule.bubble == pytest.approx((p - 1) / (m * v), abs=1e-12)
    steady = m * v + p - 1
    assert schedule.forward.on.any(axis=1).sum() == schedule.backward.on.any(axis=1).sum() == steady


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("p, v, m", SIZES)
def test_every_unit_runs_once_after_what_it_needs(p, v, m, delay):
    schedule = one_f_one_b(p, v, m, delay=delay)
    when: dict[str, dict[tuple[int, int], int]] = dict(F={}, B={})
    for kind, units in (("F", schedule.forward), ("B", schedule.backward)):
        for t, r in zip(*np.nonzero(units.on), strict=True):
            key = int(units.micro[t, r]), int(units.chunk[t, r] * p + r)
            assert key not in when[kind]
            when[kind][key] = int(t)
    assert set(when["F"]) == set(when["B"]) == set(itertools.product(range(m), range(p * v)))
    for (micro, stage), t in when["F"].items():
        assert stage == 0 or when["F"][micro, stage - 1] == t - 1, "what arrives is what was sent in the tick before"
        assert when["B"][micro, stage] >= t + delay
    for (micro, stage), t in when["B"].items():
        if stage < p * v - 1:
            assert when["B"][micro, stage + 1] == t - 1
        else:
            head = t  # the loss's gradient enters here
            assert schedule.head_T[head] == micro


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("p, v, m", SIZES)
def test_no_slot_is_overwritten_before_it_is_read(p, v, m, delay):
    """Within a tick the forward unit writes first without a delay, and the backward unit reads first with one."""
    schedule = one_f_one_b(p, v, m, delay=delay)
    forward, backward = schedule.forward, schedule.backward
    for r in range(p):
        holds: dict[int, tuple[int, int] | None] = {}
        for t in range(schedule.num_ticks):
            written = (forward.micro[t, r], forward.chunk[t, r]) if forward.on[t, r] else None
            if delay == 0 and forward.on[t].any():
                holds[forward.slot[t, r]] = written
            if backward.on[t].any():
                read = holds[backward.slot[t, r]]  # written before, if only by a masked unit
                assert not backward.on[t, r] or read == (backward.micro[t, r], backward.chunk[t, r])
            if delay == 1 and forward.on[t].any():
                holds[forward.slot[t, r]] = written
        assert max(holds) < schedule.num_slots


warm_up = lambda p, v: 2 * (p - 1) + (v - 1) * p


@pytest.mark.parametrize("p, v, m", [(p, v, m) for p, v, m in SIZES if m * v > warm_up(p, v) + 1])
def test_slots_are_those_of_published_warm_up_counts(p, v, m):
    """Interleaved: Megatron-Core's warm-up units of rank 0 plus the one at work; plain lock step: 2 P - 1."""
    assert one_f_one_b(p, v, m).num_slots == warm_up(p, v) + 1
    assert one_f_one_b(p, v, m, delay=1).num_slots == warm_up(p, v) + 2


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("p, v", [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2), (8, 4)])
def test_phases_cover_all_ticks_and_do_not_grow_with_micro_batches(p, v, delay):
    def bodies(m):
        schedule, at = one_f_one_b(p, v, m, delay=delay), 0
        for phase in schedule.phases:
            assert phase.start == at
            for _, (length, does) in itertools.product(range(phase.repeats), phase.runs):
                ticks = slice(at, at + length)
                assert (schedule.forward.on[ticks].any(axis=1) == does.forward[0]).all()
                assert (schedule.backward.on[ticks].any(axis=1) == does.backward[0]).all()
                starts = schedule.forward.on[ticks, 0] & (schedule.forward.chunk[ticks, 0] == 0)
                assert does.embed or not starts.any()
                ends = schedule.backward.on[ticks, 0] & (schedule.backward.chunk[ticks, 0] == 0)
                assert does.embed_back or not ends.any()
                at += length
        assert at == schedule.num_ticks
        return sum(len(phase.runs) for phase in schedule.phases)

    assert bodies(8 * p) == bodies(16 * p)


def test_a_head_runs_once_for_each_micro_batch_and_nowhere_else():
    for p, v, m, delay in itertools.product((1, 2, 4), (1, 2), (4, 8), (0, 1)):
        schedule, heads = one_f_one_b(p, v, m, delay=delay), []
        for phase in schedule.phases:
            at = phase.start
            for _, (length, does) in itertools.product(range(phase.repeats), phase.runs):
                heads += schedule.head_T[at : at + length].tolist() if does.head else []
                at += length
        assert sorted(heads) == list(range(m))


def test_parts_without_layers_are_left_out_of_a_tick():
    """The first stage alone has the first part: with two chunks only some ticks have it."""
    parts = np.ones((4, 2, 2), bool)
    parts[..., 0] = False
    parts[0, 0, 0] = True
    schedule, forward, first = one_f_one_b(4, 2, 16, parts=parts), 0, 0
    for phase in schedule.phases:
        for _, (length, does) in itertools.product(range(phase.repeats), phase.runs):
            forward, first = forward + length * does.forward[1], first + length * does.forward[0]
    assert (forward, first) == (16 * 2 + 3, 16)


def test_micro_batches_that_do_not_fill_the_chunks_are_refused():
    with pytest.raises(ValueError, match=r"2 chunks of each of 4 ranks .* multiple of 4, got 6"):
        one_f_one_b(4, 2, 6)
