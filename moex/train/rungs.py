"""Rising buffer sizes, and which of them a step runs with.

A step that overflows a buffer leaves the state as it was; it is run again with the next size up, whose result has the bits
that it would have had at once. The last size is the worst case and cannot overflow, so no token is ever lost.
"""

import collections
import dataclasses
from collections.abc import Iterable

from moex.config import MemoryConfig, RunConfig

FACTORS = ("cell_factor", "spill_factor", "row_factor")
WINDOW = 50
"""Steps over which the share of those that overflowed is taken."""


def ladder(config: RunConfig) -> tuple[RunConfig, ...]:
    """The configuration with each buffer size: as given, doubled from one to the next, the last the worst case.

    One alone when the sizes given are the worst case already. Clones that are for retries only join from the second on;
    where the last one goes in waves, it keeps no rows, hence no stash.
    """
    parallel, memory = config.parallel, config.memory
    if not (parallel.bounded or (memory.stash and memory.stash_factor)):
        return (config,)

    def sized(rung: int, by: float) -> RunConfig:
        changes: dict = {name: by * getattr(parallel, name) for name in FACTORS}
        if parallel.echo == "retry":
            changes["echo"] = "report" if rung == 0 else "always"
        stash = dataclasses.replace(memory, stash_factor=by * memory.stash_factor) if memory.stash else memory
        if not by and parallel.waves > 1:
            stash = dataclasses.replace(memory, stash=(), stash_factor=MemoryConfig.stash_factor)
        return dataclasses.replace(config, parallel=dataclasses.replace(parallel, **changes), memory=stash)

    rising = [sized(i, 2**i) for i in range(parallel.rungs - 1)]
    return (*rising, sized(parallel.rungs - 1, 0))


class Rungs:
    """The rung that each step runs on first. All hosts see the same overflows, so they decide alike.

    The usual one is raised when more than a share `tail` of the last `WINDOW` steps overflowed it. When a whole window
    passes without, the one below is tried again; each time that proves wrong it takes twice as long to the next trial.
    """

    def __init__(self, number: int, tail: float, usual: int = 0):
        self.last, self.usual = number - 1, min(usual, number - 1)
        self._allowed, self._patience, self._quiet = int(tail * WINDOW), WINDOW, 0
        self._raised: dict[int, int] = {}
        self._retried: collections.deque[int] = collections.deque()

    def of(self, step: int) -> int:
        """The usual one, or a higher one after this step has overflowed."""
        return max(self.usual, self._raised.get(step, 0))

    def overflowed(self, step: int, rung: int) -> int:
        """The rung to run this step on again.  Raises RuntimeError when there is none above."""
        if rung >= self.last:
            raise RuntimeError(f"step {step} overflowed the worst-case buffers, which should not be possible")
        self._raised, self._quiet = {step: rung + 1}, 0
        while self._retried and self._retried[0] <= step - WINDOW:
            self._retried.popleft()
        if step not in self._retried:
            self._retried.append(step)
        if len(self._retried) > self._allowed and self.usual < self.last:
            self.usual += 1
            self._patience *= 2
            self._retried.clear()
        return rung + 1

    def applied(self, step: int, rung: int) -> None:
        """Takes note of a step that found room."""
        self._quiet = self._quiet + 1 if rung == self.usual else 0
        if self.usual and self._quiet >= self._patience:
            self.usual, self._quiet = self.usual - 1, 0
            self._retried.clear()


def usual_of(rungs: Iterable[int], tail: float) -> int:
    """The smallest size that at most a share `tail` of a run's last steps were above, by the rung each ended on."""
    last = sorted(list(rungs)[-WINDOW:], reverse=True)
    above = int(tail * WINDOW)
    return last[above] if len(last) > above else 0
