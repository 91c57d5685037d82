"""Sums of each token's rows in plain XLA, on any back end: gathers.  T tokens, k choices, R rows, D columns."""

import jax.numpy as jnp


def combine(rows_RD, row_of_pair_Tk):
    """As in the package's `combine`."""
    if not rows_RD.shape[0]:  # a gather cannot take from nothing, and no pair has a row
        rows_RD = jnp.zeros((1, rows_RD.shape[1]), rows_RD.dtype)
    total_TD = None
    for row_T in row_of_pair_Tk.T:
        part_TD = rows_RD[jnp.maximum(row_T, 0)].astype(jnp.float32)
        part_TD = jnp.where((row_T >= 0)[:, None], part_TD, 0)
        total_TD = part_TD if total_TD is None else total_TD + part_TD
    if total_TD is None:
        return jnp.zeros((row_of_pair_Tk.shape[0], rows_RD.shape[1]), rows_RD.dtype)
    return total_TD.astype(rows_RD.dtype)
