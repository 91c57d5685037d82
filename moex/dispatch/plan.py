"""The contract that every transport keeps.

T tokens of this device, k experts a token, E experts in all, e of this device, R rows of its expert-sorted buffer, D model
width; `ep` is the view axis that experts are split over, expert i on rank i // e.

    plan(experts_Tk, num_experts, budget, ep) -> a plan: index maps (integers only, no gradient) with the fields below
    send(x_TD, plan, ep) -> rows_RD           token rows, sorted by local expert, pad rows zero
    send_pairs(weights_Tk, plan, ep) -> [R]   one number a (token, choice) pair, the same way
    combine(rows_RD, plan, ep) -> y_TD        the sum of each token's k results

An expert's rows stand in the order (source rank, token, choice) and start at a multiple of the alignment. A pair whose
expert lies outside [0, E) goes nowhere. Forward and backward passes are gathers with a fixed order of sums; weights were
applied by the expert, so combining is a plain sum. A pair without room is counted in `overflow` and leaves no trace: the
step that it happens in is not applied.
"""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp


class Plan(Protocol):
    """What the layer reads of any transport's plan."""

    @property
    def counts_e(self) -> jax.Array:
        """int32: real rows of each local expert."""
        ...

    @property
    def sizes_e(self) -> jax.Array:
        """int32: the same rounded up to the alignment, as `grouped_matmul` takes them."""
        ...

    @property
    def overflow(self) -> jax.Array:
        """int32: pairs that found no room on this device."""
        ...

    @property
    def need(self) -> "Need":
        """What this device would have needed."""
        ...


class Need(NamedTuple):
    """int32 each, of one device: rows of its fullest cell, rows that it spills or that spill to one rank, rows of its
    expert buffer. A lower bound where something upstream had no room.
    """

    cell: jax.Array
    spill: jax.Array
    rows: jax.Array


class Rows(NamedTuple):
    """Where rows go inside one device; itself a plan, of the transport `local`.

    token_of_row_R: source token of each row, or -1.  pair_of_row_R: source pair (token k + choice), or -1.
    row_of_pair_Tk: each pair's row, or -1.  rows_needed: all experts' rows with alignment, room or not.
    """

    token_of_row_R: jax.Array
    pair_of_row_R: jax.Array
    row_of_pair_Tk: jax.Array
    counts_e: jax.Array
    sizes_e: jax.Array
    overflow: jax.Array
    rows_needed: jax.Array

    @property
    def need(self) -> Need:
        return Need(jnp.int32(0), jnp.int32(0), self.rows_needed)


class Routes(NamedTuple):
    """The plan of a transport that moves single rows between ranks.

    sent: this device's pairs, sorted by destination.  received: what arrives, sorted by local expert.  sent_overflow:
    int32, pairs that weren't sent for want of room.  need: see `Plan`.  extra: what else the transport's exchange needs.
    """

    sent: Rows
    received: Rows
    sent_overflow: jax.Array
    need: Need
    extra: Any = ()

    @property
    def counts_e(self) -> jax.Array:
        return self.received.counts_e

    @property
    def sizes_e(self) -> jax.Array:
        return self.received.sizes_e

    @property
    def overflow(self) -> jax.Array:
        return self.sent_overflow + self.received.overflow
