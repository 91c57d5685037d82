"""What routing would need of buffers on a number of ranks, and what clones of hot experts would change, by counts alone.

n ranks of an ep view, T tokens of a rank, E experts, k experts a token. A draw is one layer's routing of one micro-batch in
one ep group: pairs by (source rank, expert). Factors are in units of balanced routing, as in `ParallelConfig`.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moex.balance import echo


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cloning:
    """Settings of ECHO: `echo_slots`, `echo_hot` and `echo_cap` of `ParallelConfig`."""

    slots: int = 1
    hot_per_home: int = 2
    cap: float = 1.1


class Needs(NamedTuple):
    """Of every draw: the factors that would have been enough.  load: rows of the busiest rank.  cell: of the fullest
    (source, destination) cell.  spill: rows over their cells, of the source or the destination with most.
    """

    load: np.ndarray
    cell: np.ndarray
    spill: np.ndarray


class Simulated(NamedTuple):
    """plain, cloned: `Needs` without and with clones.  clones: slots that held one."""

    plain: Needs
    cloned: Needs
    clones: np.ndarray


def group_counts(experts_Tk, num_ranks: int, num_experts: int, tokens_per_rank: int = 0) -> Iterator[np.ndarray]:
    """Draws [n, E] of a micro-batch's choices in one layer: consecutive tokens are a rank's, consecutive ranks a group.

    experts_Tk: whole numbers; those outside [0, E) are nobody.  tokens_per_rank: T; 0 deals all tokens to one group.
    Raises ValueError when tokens don't divide.
    """
    num_tokens, here = experts_Tk.shape[0], tokens_per_rank or max(experts_Tk.shape[0] // num_ranks, 1)
    if num_tokens % (here * num_ranks):
        raise ValueError(f"{num_tokens} tokens don't divide into groups of {num_ranks} ranks with {here} tokens each")
    for group in np.reshape(experts_Tk, (-1, num_ranks, here * experts_Tk.shape[1])).astype(np.int64):
        real = (group >= 0) & (group < num_experts)
        flat = np.where(real, group + np.arange(num_ranks)[:, None] * num_experts, num_ranks * num_experts)
        counts = np.bincount(flat.reshape(-1), minlength=num_ranks * num_experts + 1)[:-1]
        yield counts.reshape(num_ranks, num_experts).astype(np.int32)


def simulate(counts_DnE, cell_factor: float, cloning: Cloning) -> Simulated:
    """Needs of draws [D, n, E] with cells of `cell_factor`.  Raises ValueError when experts don't divide by ranks."""
    counts_DnE = np.asarray(counts_DnE, np.int32)
    num_ranks, num_experts = counts_DnE.shape[1:]
    if num_experts % num_ranks:
        raise ValueError(f"{num_experts} experts don't divide by {num_ranks} ranks")
    plain, cloned, clones = zip(*(_one(draw, cell_factor, cloning) for draw in counts_DnE), strict=True)
    stacked = lambda needs: Needs(*map(np.array, zip(*needs, strict=True)))
    return Simulated(stacked(plain), stacked(cloned), np.array(clones))


def overflowing(needs: Needs, *, cell_factor: float, spill_factor: float, row_factor: float) -> np.ndarray:
    """Which draws a budget has no room for; a factor of 0 is the worst case.  `needs` must be for the same cells."""
    over = needs.load > row_factor if row_factor else np.zeros(len(needs.load), bool)
    if not cell_factor:
        return over
    return over | (needs.spill > spill_factor if spill_factor else needs.cell > cell_factor)


def retries(share_of_draws: float, draws_per_step: int) -> float:
    """Share of steps that are run again when so many of all draws overflow, if draws are independent."""
    return 1 - (1 - share_of_draws) ** draws_per_step


def wire_rows(
    num_tokens: int, top_k: int, num_ranks: int, *, cell_factor: float, spill_factor: float, num_local: int
) -> float:
    """Rows that a rank sends one way in a layer: its cells, and its spill twice."""
    pairs = num_tokens * top_k
    cells = pairs * cell_factor if cell_factor else num_ranks * num_tokens * min(top_k, num_local)
    return cells + 2 * pairs * spill_factor


def _one(counts_nE: np.ndarray, cell_factor: float, cloning: Cloning) -> tuple[Needs, Needs, int]:
    num_ranks = counts_nE.shape[0]
    plan = _planner(num_ranks, cloning)(jnp.asarray(counts_nE.sum(axis=0)))
    shares_nEm = _sharer()(jnp.asarray(counts_nE), plan)
    by_home = counts_nE.reshape(num_ranks, num_ranks, -1).sum(axis=2)
    return (
        _needs(by_home, cell_factor),
        _needs(_by_rank(np.asarray(shares_nEm), num_ranks), cell_factor),
        int((plan.slot_nS >= 0).sum()),
    )


def _by_rank(shares_nEm: np.ndarray, num_ranks: int) -> np.ndarray:
    """Pairs by (source, destination): clones' shares by their rank, the rest (last) by the experts' home."""
    home = shares_nEm[:, :, -1].reshape(num_ranks, num_ranks, -1).sum(axis=2)
    return home + shares_nEm[:, :, :-1].sum(axis=1)


def _needs(cells_nn: np.ndarray, cell_factor: float) -> Needs:
    num_ranks, pairs = len(cells_nn), max(int(cells_nn.sum()), 1) / len(cells_nn)
    room = math.ceil(cell_factor * pairs / num_ranks) if cell_factor else np.inf
    excess = np.maximum(cells_nn - room, 0)
    most_spilled = max(excess.sum(axis=0).max(), excess.sum(axis=1).max())
    return Needs(cells_nn.sum(axis=0).max() / pairs, cells_nn.max() * num_ranks / pairs, most_spilled / pairs)


@functools.cache
def _planner(num_ranks: int, cloning: Cloning):
    return jax.jit(functools.partial(echo.plan_clones, num_ranks=num_ranks, **dataclasses.asdict(cloning)))


@functools.cache
def _sharer():
    by_source = jax.vmap(echo.shares, in_axes=(None, None, 0))
    return jax.jit(lambda counts_nE, plan: by_source(counts_nE, plan, jnp.arange(counts_nE.shape[0])))
