"""Where rows go: index maps of an expert-sorted buffer, made in XLA from whole numbers only, with static shapes.

T tokens, k choices of each, E experts here, R rows of the buffer, b blocks of it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.vma import axes_of, cast_to


class RowMap(NamedTuple):
    """int32 throughout; -1 stands for nothing.

    row_of_pair_Tk: each (token, choice) pair's row.  token_of_row_R, pair_of_row_R: each row's token and pair (token k +
    choice).  starts_E, counts_E, sizes_E: an expert's first row, its real rows, and those rounded up to the alignment, both
    cut off at the buffer's end.  overflow: pairs that found no room.
    """

    row_of_pair_Tk: jax.Array
    token_of_row_R: jax.Array
    pair_of_row_R: jax.Array
    starts_E: jax.Array
    counts_E: jax.Array
    sizes_E: jax.Array
    overflow: jax.Array


def sort_rows(experts_Tk, num_experts: int, num_rows: int, *, align: int = 128) -> RowMap:
    """Gives every pair a row: sorted by expert, then by token and choice, each expert's first row a multiple of `align`.

    Nothing waits for the host: the rows that experts don't fill hold nothing. An expert outside [0, E) is not here and its
    pair goes nowhere. R of at least T k + E (align - 1) always has room.

    Args: experts_Tk: int32 choices.  num_experts: E.  num_rows: R, a multiple of align.
    Raises ValueError where R isn't such a multiple.
    """
    if align < 1 or num_rows % align:
        raise ValueError(f"num_rows={num_rows} must be a multiple of align={align}")
    num_tokens, top_k = experts_Tk.shape
    expert_P = experts_Tk.reshape(-1).astype(jnp.int32)
    expert_P = jnp.where((expert_P >= 0) & (expert_P < num_experts), expert_P, num_experts)
    vary = lambda a: cast_to(axes_of(expert_P), a)
    numbers_P = vary(jnp.arange(expert_P.size, dtype=jnp.int32))
    sorted_P, pair_P = lax.sort((expert_P, numbers_P), num_keys=1, is_stable=True)
    counts_E = vary(jnp.zeros((num_experts + 1,), jnp.int32)).at[expert_P].add(1)[:num_experts]
    sizes_E = -(-counts_E // align) * align
    starts_E, before_E = jnp.cumsum(sizes_E) - sizes_E, jnp.cumsum(counts_E) - counts_E
    known_P = jnp.minimum(sorted_P, num_experts - 1)
    row_P = starts_E[known_P] + numbers_P - before_E[known_P]
    wanted_P = sorted_P < num_experts
    fits_P = wanted_P & (row_P < num_rows)
    row_P = jnp.where(fits_P, row_P, -1)
    empty = lambda size: vary(jnp.full((size,), -1, jnp.int32))
    pair_of_row_R = empty(num_rows).at[jnp.where(fits_P, row_P, num_rows)].set(pair_P, mode="drop", unique_indices=True)
    row_of_pair_P = empty(expert_P.size).at[pair_P].set(row_P, unique_indices=True)
    room_E = jnp.maximum(num_rows - starts_E, 0)
    return RowMap(
        row_of_pair_Tk=row_of_pair_P.reshape(num_tokens, top_k),
        token_of_row_R=jnp.where(pair_of_row_R >= 0, pair_of_row_R // top_k, -1),
        pair_of_row_R=pair_of_row_R,
        starts_E=jnp.minimum(starts_E, num_rows),
        counts_E=jnp.minimum(counts_E, room_E),
        sizes_E=jnp.minimum(sizes_E, room_E),
        overflow=(wanted_P & ~fits_P).sum(dtype=jnp.int32),
    )


def block_table(rows: RowMap, block: int):
    """Which expert owns each `block` rows of the buffer and how many of them are real: two int32 [R / block].

    Blocks behind the last expert belong to expert E and have no real row.  Raises ValueError unless block divides R.
    Experts must start at multiples of `block`, which is not checked since starts are known on the device only.
    """
    num_rows = rows.token_of_row_R.shape[0]
    if block < 1 or num_rows % block:
        raise ValueError(f"blocks of {block} rows don't fill {num_rows}")
    first_b = jnp.arange(num_rows // block, dtype=jnp.int32) * block
    ends_E = rows.starts_E + rows.sizes_E
    expert_b = (first_b[:, None] >= ends_E[None]).sum(axis=1, dtype=jnp.int32)
    past = jnp.zeros((1,), jnp.int32)
    last_b = jnp.concatenate([rows.starts_E + rows.counts_E, cast_to(axes_of(ends_E), past)])[expert_b]
    return expert_b, jnp.clip(last_b - first_b, 0, block)
