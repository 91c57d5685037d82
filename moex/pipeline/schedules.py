"""Who does what when in a pipeline, as tables of whole numbers: 1F1B, plain and interleaved, in lock step.

T ticks, P ranks, M micro-batches, V chunks of a rank (virtual stages). A unit is one chunk's pass over one micro-batch; in
a tick a rank runs at most one forward and one backward unit. Stage = chunk P + rank, so what a rank sends always goes to
the next one, and the last rank's to the first.
"""

import itertools
from typing import NamedTuple

import numpy as np


class Units(NamedTuple):
    """[T, P] each.  on: bool, the rank has a unit.  micro, chunk: which.  slot: where its residuals lie.

    Where `on` is false the numbers are those of some unit, so that the same program can run and be masked.
    """

    on: np.ndarray
    micro: np.ndarray
    chunk: np.ndarray
    slot: np.ndarray


class Does(NamedTuple):
    """What is compiled into a tick, on all ranks alike.  forward, backward: for each part of a chunk, whether any rank runs
    it.  embed, embed_back, head: likewise of the first stage's embedding, its gradient, and the loss.
    """

    forward: tuple[bool, ...]
    backward: tuple[bool, ...]
    embed: bool
    embed_back: bool
    head: bool


class Phase(NamedTuple):
    """Ticks from `start` on: `repeats` times the runs, each (number of ticks, what they do)."""

    start: int
    repeats: int
    runs: tuple[tuple[int, Does], ...]


class Schedule(NamedTuple):
    """embed_T, embed_back_T, head_T: micro-batch whose tokens the first stage embeds, whose embedding's gradient is taken,
    and whose loss is.  num_slots: slots for residuals of units, of each rank.  delay: see `one_f_one_b`.
    """

    forward: Units
    backward: Units
    embed_T: np.ndarray
    embed_back_T: np.ndarray
    head_T: np.ndarray
    phases: tuple[Phase, ...]
    num_slots: int
    delay: int

    @property
    def num_ticks(self) -> int:
        return len(self.head_T)

    @property
    def bubble(self) -> float:
        """Time beyond that of a rank's own units, in units of it, a backward unit taking twice as long as a forward one."""
        forward, backward = self.forward.on, self.backward.on
        passed = forward.any(axis=1).sum() + 2 * backward.any(axis=1).sum()
        return float(passed / (forward[:, 0].sum() + 2 * backward[:, 0].sum()) - 1)


def one_f_one_b(
    num_ranks: int, chunks: int, micros: int, *, delay: int = 0, parts: np.ndarray | None = None
) -> Schedule:
    """The lock-step 1F1B: forward unit k of rank r in tick k + r, backward unit k in tick t0 + k + P - 1 - r.

    Args:
      delay: 0: the last rank runs a micro-batch's backward unit in the tick of its forward unit; 1: in the next one, so that
        a tick's two units don't need each other.
      parts: bool [P, V, parts], whether a stage has layers in each part of a chunk; one part that all have by default.

    Its ticks are three regions, forward only, both, backward only, which makes the bubble the ideal (P - 1) / (M V).

    Raises ValueError when several chunks a rank would have micro-batches left over: M must then be a multiple of P.
    """
    if min(num_ranks, chunks, micros) < 1 or (chunks > 1 and micros % num_ranks):
        raise ValueError(
            f"{chunks} chunks of each of {num_ranks} ranks need a number of micro-batches that is a multiple of "
            f"{num_ranks}, got {micros}"
        )
    units, first = micros * chunks, chunks * num_ranks - 1 + delay
    tick_T1, rank_1P = np.arange(units + num_ranks - 1 + first)[:, None], np.arange(num_ranks)[None]
    forward = _units(tick_T1 - rank_1P, num_ranks, chunks, micros)
    backward = _units(tick_T1 - first - rank_1P[:, ::-1], num_ranks, chunks, micros)
    backward = backward._replace(chunk=chunks - 1 - backward.chunk)
    forward, backward, num_slots = _with_slots(forward, backward)
    finished_T = forward.on[:, -1] & (forward.chunk[:, -1] == chunks - 1)
    parts = np.ones((num_ranks, chunks, 1), bool) if parts is None else parts
    flags = np.concatenate([
        _parts(forward, parts), _parts(backward, parts), _at_first_stage(forward)[:, None],
        _at_first_stage(backward)[:, None], np.roll(finished_T, delay)[:, None],
    ], axis=1)  # fmt: skip
    return Schedule(
        forward=forward,
        backward=backward,
        embed_T=forward.micro[:, 0],
        embed_back_T=backward.micro[:, 0],
        head_T=np.roll(forward.micro[:, -1], delay),
        phases=_phases(flags, chunks * num_ranks),
        num_slots=num_slots,
        delay=delay,
    )


def _units(k_TP, num_ranks: int, chunks: int, micros: int) -> Units:
    """Unit k of a rank: P micro-batches go through one chunk, then through the next."""
    on, k = (k_TP >= 0) & (k_TP < micros * chunks), np.clip(k_TP, 0, micros * chunks - 1)
    if chunks == 1:
        return Units(on, k, np.zeros_like(k), np.zeros_like(k))
    micro, chunk = k // (num_ranks * chunks) * num_ranks + k % num_ranks, k // num_ranks % chunks
    return Units(on, micro, chunk, np.zeros_like(k))


def _with_slots(forward: Units, backward: Units) -> tuple[Units, Units, int]:
    """Each forward unit gets the first slot that is free until its backward unit has run.

    A masked forward unit writes, too, and gets a free slot; a masked backward unit reads slot 0, which its rank's first
    forward unit has filled: what it reads is multiplied by zero, and must be finite.
    """
    num_ticks, num_ranks = forward.on.shape
    f_slot, b_slot = np.zeros_like(forward.slot), np.zeros_like(backward.slot)
    for rank in range(num_ranks):
        taken: dict[tuple[int, int], int] = {}
        for t in range(num_ticks):
            f_slot[t, rank] = next(i for i in range(num_ticks) if i not in taken.values())
            if forward.on[t, rank]:
                taken[forward.micro[t, rank], forward.chunk[t, rank]] = f_slot[t, rank]
            if backward.on[t, rank]:
                b_slot[t, rank] = taken.pop((backward.micro[t, rank], backward.chunk[t, rank]))
    num_slots = int(f_slot[forward.on.any(axis=1)].max()) + 1
    return forward._replace(slot=f_slot), backward._replace(slot=b_slot), num_slots


def _parts(units: Units, parts: np.ndarray) -> np.ndarray:
    """bool [T, parts]: some rank has a unit whose stage has layers in the part."""
    mine = parts[np.arange(units.on.shape[1])[None], units.chunk]
    return (mine & units.on[..., None]).any(axis=1)


def _at_first_stage(units: Units) -> np.ndarray:
    """bool [T]. Where every unit of a rank is at one stage, all its ticks count: fewer kinds of ticks are to be compiled."""
    if not units.chunk.any():
        return units.on.any(axis=1)
    return units.on[:, 0] & (units.chunk[:, 0] == 0)


def _phases(flags: np.ndarray, period: int) -> tuple[Phase, ...]:
    """Runs of equal ticks. The steady state, which repeats every `period` ticks, becomes one phase, so that the number of
    ticks to compile doesn't depend on the number of micro-batches.
    """
    num_ticks = len(flags)
    repeating = np.append((flags[period:] == flags[:-period]).all(axis=1), [False])
    start, repeats = 0, 0
    for first in range(max(num_ticks - period, 0)):
        length = int(np.argmin(repeating[first:])) + period
        if length // period > max(repeats, 1):
            start, repeats = first, length // period
    runs = _runs(flags[start : start + repeats * period])
    if len(runs) <= 1:
        return tuple(_single(flags, 0, num_ticks))
    steady, ends = tuple(_runs(flags[start : start + period])), start + repeats * period
    return (*_single(flags, 0, start), Phase(start, repeats, steady), *_single(flags, ends, num_ticks))


def _single(flags: np.ndarray, start: int, end: int) -> list[Phase]:
    found, at = [], start
    for length, does in _runs(flags[start:end]):
        found.append(Phase(at, 1, ((length, does),)))
        at += length
    return found


def _runs(flags: np.ndarray) -> list[tuple[int, Does]]:
    cuts = [0, *(1 + np.flatnonzero((flags[1:] != flags[:-1]).any(axis=1))), len(flags)] if len(flags) else []
    return [(int(b - a), _does(flags[a])) for a, b in itertools.pairwise(cuts)]


def _does(flags: np.ndarray) -> Does:
    *parts, embed, embed_back, head = map(bool, flags)
    half = len(parts) // 2
    return Does(tuple(parts[:half]), tuple(parts[half:]), embed, embed_back, head)
