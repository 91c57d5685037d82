"""Batch sizes by step: constant, or rising while the run is young."""

import bisect
import itertools
from collections.abc import Sequence

from moex.config import TrainConfig


class Ramp:
    """A step's rows as a function of its number alone.

    Args: size, rows of a step after the ramp. sizes[i] holds until at least until_samples[i] rows have been seen; a step
    is never cut, so the next size begins with the first step that starts at or past that number.
    Raises ValueError when the lists differ in length, sizes don't rise or until_samples don't.
    """

    def __init__(self, size: int, sizes: Sequence[int] = (), until_samples: Sequence[int] = ()):
        if len(sizes) != len(until_samples):
            raise ValueError(f"{len(sizes)} batch sizes and {len(until_samples)} numbers of samples: give one each")
        rising = [*sizes, size]
        if min(rising) < 1 or any(a >= b for a, b in itertools.pairwise(rising)):
            raise ValueError(f"batch sizes {rising} must rise, the last being the size after the ramp")
        if any(a >= b for a, b in itertools.pairwise([0, *until_samples])):
            raise ValueError(f"numbers of samples {list(until_samples)} must rise from above 0")
        self._steps, self._samples, self._sizes = [0], [0], []
        for rows, until in zip(sizes, until_samples, strict=True):
            num_steps = max(0, -(-(until - self._samples[-1]) // rows))
            self._sizes.append(rows)
            self._steps.append(self._steps[-1] + num_steps)
            self._samples.append(self._samples[-1] + num_steps * rows)
        self._sizes.append(size)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Each size that some step has, rising."""
        ends = [*self._steps[1:], None]
        return tuple(s for s, a, b in zip(self._sizes, self._steps, ends, strict=True) if a != b)

    def size(self, step: int) -> int:
        """Rows of step `step`, from 0."""
        return self._sizes[bisect.bisect_right(self._steps, step) - 1]

    def samples_before(self, step: int) -> int:
        """Rows of all steps before `step`."""
        stage = bisect.bisect_right(self._steps, step) - 1
        return self._samples[stage] + (step - self._steps[stage]) * self._sizes[stage]

    def sizes_between(self, first: int, stop: int) -> tuple[int, ...]:
        """Each size that a step from `first` up to `stop` has, rising."""
        borders = [first, *(step for step in self._steps if first < step < stop)]
        return tuple(dict.fromkeys(self.size(step) for step in borders))


def ramp_of(train: TrainConfig) -> Ramp:
    """A run's batch sizes by step.  Raises ValueError as `Ramp` does."""
    return Ramp(train.batch_size, train.ramp_sizes, train.ramp_samples)
