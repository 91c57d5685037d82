"""Computes the next steps' batches on a background thread while the current step runs."""

import operator
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Prefetch[T]:
    """Keeps the results of `fn` for the next `depth` steps ready, addressed by step.

    Args: fn, a pure function of the step, called on one background thread, for one step at a time and possibly for
    steps that are never asked for. first_step, the step at which to begin, at once. depth, how many results are held or
    being made ahead of the consumer: the memory it costs. Raises ValueError when first_step < 0 or depth < 1.
    For one consumer thread. Use it as a context manager, or call `close`.
    """

    def __init__(self, fn: Callable[[int], T], first_step: int, depth: int = 2):
        if depth < 1:
            raise ValueError(f"depth={depth}: must be 1 or more")
        if first_step < 0:
            raise ValueError(f"first_step={first_step}: must be 0 or more")
        self._fn, self._depth, self._closed = fn, depth, False
        self._ahead: deque[tuple[int, Future[T]]] = deque()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="moex-prefetch")
        self._fill(operator.index(first_step))

    def get(self, step: int) -> T:
        """fn(step). Steps asked for in order come from the thread; any other step discards what is ahead and refills.

        Raises whatever fn(step) raised; asking for the step again calls fn again. RuntimeError after `close`.
        """
        if self._closed:
            raise RuntimeError(f"Prefetch.get({step}) after close(); make a new Prefetch")
        step = operator.index(step)
        if self._ahead[0][0] != step:
            self._discard()
            self._fill(step)
        _, result = self._ahead.popleft()
        self._fill(step + 1)
        return result.result()

    def close(self) -> None:
        """Drops what is ahead and ends the thread; waits for a call of fn that is under way. May be called twice."""
        self._closed = True
        self._discard()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> "Prefetch[T]":
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def _fill(self, next_step: int) -> None:
        for step in range(next_step + len(self._ahead), next_step + self._depth):
            self._ahead.append((step, self._pool.submit(self._fn, step)))

    def _discard(self) -> None:
        for _, result in self._ahead:
            result.cancel()
        self._ahead.clear()
