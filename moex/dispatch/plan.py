"""The contract that every transport keeps.

T tokens of this device, k experts a token, e experts of this device, R rows of its expert-sorted buffer, D model width.

`plan` turns chosen experts into index maps (integers only, no gradient). `send` brings token rows to their experts:
[R, D] sorted by local expert, inside an expert by (source, token, k), every expert's start aligned, pad rows zero.
`send_pairs` brings one number a (token, k) pair the same way. `combine` brings results back and sums a token's k rows
in the order of k; weights have been applied by the expert, so it is a plain sum.
"""

from typing import NamedTuple

import jax


class Plan(NamedTuple):
    """Index maps of one dispatch and what they say of the load.

    token_of_row_R: source token of each row, or -1.  pair_of_row_R: source pair (token k + choice), or -1.
    row_of_pair_Tk: each pair's row, or -1 for a pair that goes nowhere.  counts_e: rows of each local expert.
    sizes_e: the same rounded up to the alignment.  overflow: int32, rows that found no place.
    """

    token_of_row_R: jax.Array
    pair_of_row_R: jax.Array
    row_of_pair_Tk: jax.Array
    counts_e: jax.Array
    sizes_e: jax.Array
    overflow: jax.Array
