"""Rising buffer sizes for dispatch, and which of them a step runs with.

A step that overflows a buffer leaves the state as it was; it is run again with the next size up, whose result has the bits
that it would have had at once. The last size is the worst case and cannot overflow, so no token is ever lost.
"""

import collections
import dataclasses

from moex.config import RunConfig

FACTORS = ("cell_factor", "spill_factor", "row_factor")
WINDOW, MANY = 50, 3
"""Retries within so many steps, from so many on, make the larger size the usual one."""


def ladder(config: RunConfig) -> tuple[RunConfig, ...]:
    """The configuration with each buffer size: as given, doubled from one to the next, the last the worst case.

    One alone when the sizes given are the worst case already.
    """
    parallel = config.parallel
    if not (parallel.cell_factor or parallel.row_factor):
        return (config,)
    scaled = lambda by: dataclasses.replace(parallel, **{name: by * getattr(parallel, name) for name in FACTORS})
    rising = [scaled(2**i) for i in range(parallel.rungs - 1)]
    return tuple(dataclasses.replace(config, parallel=p) for p in (*rising, scaled(0)))


class Rungs:
    """The rung that each step runs on. All hosts see the same overflows, so they decide alike."""

    def __init__(self, number: int):
        self.last, self.usual = number - 1, 0
        self._raised: dict[int, int] = {}
        self._retries: collections.deque[int] = collections.deque(maxlen=MANY)

    def of(self, step: int) -> int:
        """The usual one, or a higher one after this step has overflowed."""
        return max(self.usual, self._raised.get(step, 0))

    def overflowed(self, step: int, rung: int) -> int:
        """The rung to run this step on again.  Raises RuntimeError when there is none above."""
        if rung >= self.last:
            raise RuntimeError(f"step {step} overflowed the worst-case buffers, which should not be possible")
        self._raised = {step: rung + 1}
        if not self._retries or self._retries[-1] != step:
            self._retries.append(step)
            if len(self._retries) == MANY and step - self._retries[0] < WINDOW:
                self.usual = min(self.usual + 1, self.last)
                self._retries.clear()
        return rung + 1
