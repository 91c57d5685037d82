"""Prefetch: in order, rewound, failing, closed."""

import threading

import numpy as np
import pytest

from moex.data import Batches, Prefetch, Tokens, Windows

WAIT_S = 10


def test_results_come_in_order_from_one_other_thread():
    threads = set()

    def fn(step):
        threads.add(threading.current_thread())
        return step * step

    with Prefetch(fn, 5) as prefetch:
        assert [prefetch.get(step) for step in range(5, 30)] == [step * step for step in range(5, 30)]
    assert len(threads) == 1 and threading.current_thread() not in threads


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_works_ahead_by_depth_and_no_further(depth):
    done, reached = [], threading.Event()

    def fn(step):
        done.append(step)
        if step == depth:
            reached.set()
        return step

    with Prefetch(fn, 0, depth) as prefetch:
        assert prefetch.get(0) == 0
        assert reached.wait(WAIT_S)
        # One thread runs the calls in order, so an extra call would be queued behind a marker submitted now.
        prefetch._pool.submit(int).result(WAIT_S)
        assert done == list(range(depth + 1))


def test_starts_before_the_first_get():
    started = threading.Event()
    with Prefetch(lambda step: started.set(), 0):
        assert started.wait(WAIT_S)


def test_rewinds_and_jumps():
    calls = []

    def fn(step):
        calls.append(step)
        return step

    with Prefetch(fn, 0, depth=3) as prefetch:
        asked = [0, 1, 2, 1, 2, 3, 4, 4, 10, 11, 0]
        assert [prefetch.get(step) for step in asked] == asked
    assert calls.count(4) >= 2


def test_an_error_surfaces_at_its_step_only_and_the_step_can_be_retried():
    broken = {"on": True}

    def fn(step):
        if step == 2 and broken["on"]:
            raise OSError("shard 2 is gone")
        return step

    with Prefetch(fn, 0, depth=3) as prefetch:
        assert prefetch.get(0) == 0 and prefetch.get(1) == 1
        for _ in range(2):
            with pytest.raises(OSError, match="shard 2 is gone"):
                prefetch.get(2)
        assert prefetch.get(3) == 3
        broken["on"] = False
        assert prefetch.get(2) == 2


def test_close_ends_the_thread_drops_waiting_work_and_refuses_get():
    release, entered, calls = threading.Event(), threading.Event(), []

    def fn(step):
        calls.append((step, threading.current_thread()))
        entered.set()
        assert release.wait(WAIT_S)

    prefetch = Prefetch(fn, 0, depth=4)
    assert entered.wait(WAIT_S)
    closer = threading.Thread(target=prefetch.close)
    closer.start()
    while not prefetch._pool._shutdown:  # release the call only once close has cancelled the others
        closer.join(0.001)
    release.set()
    closer.join(WAIT_S)
    ((step, thread),) = calls
    assert step == 0 and not thread.is_alive()
    prefetch.close()
    with pytest.raises(RuntimeError, match="after close"):
        prefetch.get(0)


@pytest.mark.parametrize("arguments, message", [({"depth": 0}, "depth=0"), ({"first_step": -1}, "first_step=-1")])
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Prefetch(int, **{"first_step": 0} | arguments)


def test_carries_batches():
    tokens = Tokens(np.arange(400, dtype=np.uint16), np.array([0, 400], np.int64), ("all",))
    batches = Batches([Windows([tokens], 4)], rows=5, accumulation=2, seed=0)
    with Prefetch(batches.batch, 3) as prefetch:
        for step in (3, 4, 3, 30):
            got, want = prefetch.get(step), batches.batch(step)
            assert all((got[name] == want[name]).all() for name in want)
