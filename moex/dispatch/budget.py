"""Static sizes of a transport's buffers: part of the compiled program, never of the data.

T tokens that a rank dispatches, k experts a token, n ranks of the ep view, e experts of a rank. Balanced is T k rows a
rank and T k / n rows a (source, destination) cell.
"""

import dataclasses
import math


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """cell_rows: of each cell of an all-to-all.  rows: of the expert-sorted buffer.  align: of its experts' starts.
    spill_rows: that a rank may send by way of others when cells are full, and as many that it may get so.
    expert_rows: every expert stands in exactly this many rows, a multiple of `align`; 0 gives each what it needs.
    """

    cell_rows: int
    rows: int
    align: int
    spill_rows: int = 0
    expert_rows: int = 0


def worst_case(num_tokens: int, top_k: int, num_ranks: int, num_local: int, align: int = 1) -> Budget:
    """Room for any routing: a token sends a rank at most min(k, e) rows. It cannot overflow."""
    most = num_tokens * min(top_k, num_local)
    return Budget(cell_rows=most, rows=_aligned(num_ranks * most, num_local, align), align=align)


def budget(
    num_tokens: int,
    top_k: int,
    num_ranks: int,
    num_local: int,
    *,
    cell_factor: float = 0.0,
    spill_factor: float = 0.0,
    row_factor: float = 0.0,
    align: int = 1,
) -> Budget:
    """Cells, spill and rows of so many times the balanced ones, never above the worst case.

    A factor of 0 is the worst case for cells and rows, and none for the spill, which worst-case cells don't need.
    Raises ValueError for a negative or infinite factor.
    """
    if not all(0 <= factor < math.inf for factor in (cell_factor, spill_factor, row_factor)) or align < 1:
        raise ValueError(
            f"cell_factor={cell_factor}, spill_factor={spill_factor} and row_factor={row_factor} must be finite and not "
            f"negative, align={align} at least 1"
        )
    worst, pairs = worst_case(num_tokens, top_k, num_ranks, num_local, align), num_tokens * top_k
    cell_rows = math.ceil(pairs * cell_factor / num_ranks) if cell_factor else worst.cell_rows
    rows = _aligned(math.ceil(pairs * row_factor), num_local, align) if row_factor else worst.rows
    cell_rows = min(cell_rows, worst.cell_rows)
    spill_rows = 0 if cell_rows == worst.cell_rows else min(math.ceil(pairs * spill_factor), num_ranks * pairs)
    return Budget(cell_rows=cell_rows, rows=min(rows, worst.rows), align=align, spill_rows=spill_rows)


def within_capacity(budget: Budget, num_local: int, cell_capacity: int, capacity: int, *, pad: bool) -> Budget:
    """The same where no expert gets more than `capacity` rows, and not more than `cell_capacity` through one cell.

    pad: every expert gets exactly `capacity` rows, rounded up to the alignment, empty ones among them.
    """
    expert_rows = -(-capacity // budget.align) * budget.align
    return dataclasses.replace(
        budget,
        cell_rows=min(budget.cell_rows, num_local * cell_capacity),
        rows=num_local * expert_rows if pad else min(budget.rows, num_local * expert_rows),
        expert_rows=expert_rows if pad else 0,
    )


def _aligned(rows: int, num_local: int, align: int) -> int:
    """Rows that hold `rows` real ones with every expert's start at a multiple of `align`."""
    padding = min(num_local, rows) * (align - 1)
    return -(-(rows + padding) // align) * align
