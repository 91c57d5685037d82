"""Grouped matmul in plain XLA, on any back end: one tile of rows at a time with its group's matrix.

R rows, E groups, K and N the matrix dims, m rows of a tile. Work is that of R + E m rows at most, never dense over
groups. Tiles are cut at the groups' own starts, so groups need no alignment: a tile that reaches past its group is masked
and what stood there before is kept. A row's bits depend on that row and its group's matrix only.

On CPUs the loop over a group's tiles runs as often as the group needs (the group's matrix is read once); a group's first
rows go four tiles at a time, whole and unmasked, since each product arranges its matrix anew. Elsewhere, where a loop
whose length the host doesn't know would wait for it, a static list of R / m + E tiles is walked.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.vma import axes_of, cast_to

_ROWS = (((1,), (0,)), ((), ()))  # [m, K] x [K, N]
_TRANSPOSED = (((1,), (1,)), ((), ()))  # [m, N] x [K, N] over N
_OUTER = (((0,), (0,)), ((), ()))  # [m, K] x [m, N] over m
_WIDE = 4  # tiles at a time


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def grouped_matmul(lhs_RK, rhs_EKN, group_sizes_E, tile_rows: int, out_dtype):
    """As in the package's `grouped_matmul`; all arguments must vary over the same mesh axes."""
    return _by_rows(lhs_RK, rhs_EKN, group_sizes_E, tile_rows, _ROWS, out_dtype)


def _fwd(lhs_RK, rhs_EKN, group_sizes_E, tile_rows, out_dtype):
    return grouped_matmul(lhs_RK, rhs_EKN, group_sizes_E, tile_rows, out_dtype), (lhs_RK, rhs_EKN, group_sizes_E)


def _bwd(tile_rows, out_dtype, kept, g_RN):
    lhs_RK, rhs_EKN, group_sizes_E = kept
    g_RN = g_RN.astype(lhs_RK.dtype)
    dlhs_RK = _by_rows(g_RN, rhs_EKN, group_sizes_E, tile_rows, _TRANSPOSED, lhs_RK.dtype)
    drhs_EKN = _by_groups(lhs_RK, g_RN, group_sizes_E, tile_rows).astype(rhs_EKN.dtype)
    return dlhs_RK, drhs_EKN, None


grouped_matmul.defvjp(_fwd, _bwd)


def rows_by_matrix(x_RK, w_ENK, sizes_E, tile_rows: int, out_dtype):
    """Rows times the transpose of their group's matrix, [R, N]; without a gradient rule, R at least `tile_rows`."""
    return _by_rows(x_RK, w_ENK, sizes_E, tile_rows, _TRANSPOSED, out_dtype)


def sums_of_rows(x_RK, g_RN, sizes_E, tile_rows: int):
    """Each group's x^T g, float32 [E, K, N]; without a gradient rule, R at least `tile_rows`."""
    return _by_groups(x_RK, g_RN, sizes_E, tile_rows)


def _by_rows(x_RK, w_EKN, sizes_E, m, dims, out_dtype):
    """Rows times their group's matrix, [R, N] (or [R, K] with the matrix transposed)."""
    width = w_EKN.shape[2 if dims is _ROWS else 1]
    out_RN = cast_to(axes_of(x_RK), jnp.zeros((x_RK.shape[0], width), out_dtype))

    def tile(out_RN, w_KN, start, end):
        at, inside_m1 = _clamped(start, end, m, x_RK.shape[0])
        y_mN = lax.dot_general(_rows(x_RK, at, m), w_KN, dims, preferred_element_type=jnp.float32).astype(out_dtype)
        return lax.dynamic_update_slice_in_dim(out_RN, jnp.where(inside_m1, y_mN, _rows(out_RN, at, m)), at, axis=0)

    def loops(x_RK, w_EKN, sizes_E, out_RN):
        def group(out_RN, one):
            w_KN, start, size = one

            def wide(at, out_RN):
                y = lax.dot_general(_rows(x_RK, at, _WIDE * m), w_KN, dims, preferred_element_type=jnp.float32)
                return lax.dynamic_update_slice_in_dim(out_RN, y.astype(out_dtype), at, axis=0)

            return _walk(
                x_RK.shape[0], start, size, m, wide, lambda at, out: tile(out, w_KN, at, start + size), out_RN
            ), None

        return lax.scan(group, out_RN, (w_EKN, jnp.cumsum(sizes_E) - sizes_E, sizes_E))[0]

    def static_list(x_RK, w_EKN, sizes_E, out_RN):
        step = lambda out_RN, one: (tile(out_RN, lax.dynamic_index_in_dim(w_EKN, one[0], 0, False), *one[1:]), None)
        return lax.scan(step, out_RN, _tile_list(sizes_E, m, x_RK.shape[0]))[0]

    return lax.platform_dependent(x_RK, w_EKN, sizes_E, out_RN, cpu=loops, default=static_list)


def _by_groups(x_RK, g_RN, sizes_E, m):
    """Each group's x^T g, float32 [E, K, N]; zero for a group without rows."""
    zeros = lambda *shape: cast_to(axes_of(x_RK, g_RN), jnp.zeros(shape, jnp.float32))
    shape = (x_RK.shape[1], g_RN.shape[1])

    def tile(start, end, to_front):
        at, inside_m1 = _clamped(start, end, m, x_RK.shape[0])
        only = lambda x: jnp.where(inside_m1, _rows(x, at, m), jnp.zeros((), x.dtype))  # where, since 0 * NaN is NaN
        x_mK, g_mN = to_front((only(x_RK), only(g_RN)), start - at)
        return lax.dot_general(x_mK, g_mN, _OUTER, preferred_element_type=jnp.float32)

    # The order of a sum over rows may not depend on how far the array reaches past them.
    rolled = lambda arrays, shift: tuple(jnp.roll(x, -shift, axis=0) for x in arrays)
    seldom = lambda arrays, shift: lax.cond(shift > 0, rolled, lambda arrays, _: arrays, arrays, shift)

    def loops(x_RK, g_RN, sizes_E):
        def group(_, one):
            start, size = one

            def wide(at, total_KN):
                x_Km = lax.optimization_barrier(_rows(x_RK, at, _WIDE * m).T)  # or XLA:CPU walks it by columns
                return total_KN + jnp.dot(x_Km, _rows(g_RN, at, _WIDE * m), preferred_element_type=jnp.float32)

            narrow = lambda at, total_KN: total_KN + tile(at, start + size, seldom)
            return None, _walk(x_RK.shape[0], start, size, m, wide, narrow, zeros(*shape))

        return lax.scan(group, None, (jnp.cumsum(sizes_E) - sizes_E, sizes_E))[1]

    def static_list(x_RK, g_RN, sizes_E):
        def step(total_EKN, one):
            group, start, end = one
            sum_KN = lax.dynamic_index_in_dim(total_EKN, group, 0, False) + tile(start, end, rolled)
            return lax.dynamic_update_index_in_dim(total_EKN, sum_KN, group, 0), None

        return lax.scan(step, zeros(sizes_E.shape[0], *shape), _tile_list(sizes_E, m, x_RK.shape[0]))[0]

    return lax.platform_dependent(x_RK, g_RN, sizes_E, cpu=loops, default=static_list)


def _walk(num_rows: int, start, size, m: int, wide, narrow, carry):
    """A group's rows in their order: `wide(first row, carry)` for every four whole tiles, `narrow` for the tiles left."""
    done = jnp.zeros_like(size)
    if num_rows >= _WIDE * m:
        many = size // (_WIDE * m)
        carry = lax.fori_loop(0, many, lambda i, carry: wide(start + i * _WIDE * m, carry), carry)
        done = many * _WIDE
    return lax.fori_loop(done, -(-size // m), lambda i, carry: narrow(start + i * m, carry), carry)


def _tile_list(sizes_E, m: int, num_rows: int):
    """(group, first row, end) of every tile, R / m + E of them; those past the last real one are empty."""
    num_groups = sizes_E.shape[0]
    tiles_E = -(-sizes_E // m)
    last_E = jnp.cumsum(tiles_E)
    t = jnp.arange(num_rows // m + num_groups, dtype=jnp.int32)
    group = jnp.minimum((t[:, None] >= last_E[None]).sum(axis=1, dtype=jnp.int32), num_groups - 1)
    starts_E = jnp.cumsum(sizes_E) - sizes_E
    start = starts_E[group] + (t - (last_E - tiles_E)[group]) * m
    return group, start, jnp.where(t < last_E[-1], (starts_E + sizes_E)[group], start)


def _clamped(start, end, m: int, num_rows: int):
    """First row to read so that m rows stay inside the array, and which of them belong to [start, end)."""
    at = jnp.minimum(start, num_rows - m)
    rows = at + jnp.arange(m, dtype=jnp.int32)
    return at, ((rows >= start) & (rows < end))[:, None]


def _rows(x, at, m: int):
    return lax.dynamic_slice_in_dim(x, at, m, axis=0)
