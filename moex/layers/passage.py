"""Tokens on their way through the experts: dispatch, expert MLPs, combine; with clones of hot experts, rows kept in a
stash, or tokens in waves.

T tokens of this device, D model width, E experts, e of this device, k a token, S clone slots, R rows of the experts' buffer.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mesh import collectives
from mesh.fold import Fold
from moex import balance, dispatch
from moex.balance import echo
from moex.config import ParallelConfig
from moex.dispatch import legs
from moex.layers import wire
from moex.layers.experts import Experts
from moex.memory import stash as stashing
from moex.memory.residuals import kept, named
from moex.memory.stash import Stash
from moex.precision.experts import QuantisedRows
from moex.precision.matrix import bits
from moex.precision.recipes import Precision
from moex.precision.weight import is_quantised
from pallas_kernels.quantize import quantize


class Way(NamedTuple):
    """What is static of it.  parallel: transport, buffers, waves, clones.  top_k: experts a token.  capacity: most rows that
    an expert gets from this data-parallel rank's rows of a batch, 0 for no limit; pad: it gets exactly that many.
    precision: formats on the wire, alignment of experts' first rows.  stash_rows: that all layers' experts may keep
    together, 0 without a stash; balanced_rows: what they use when routing is balanced.
    """

    parallel: ParallelConfig
    top_k: int
    capacity: int = 0
    pad: bool = False
    precision: Precision = Precision()
    stash_rows: int = 0
    balanced_rows: int = 0

    @property
    def waves(self) -> int:
        """Waves are for buffers of the worst case."""
        return 1 if self.parallel.bounded else self.parallel.waves

    def options(self) -> dict:
        """What `dispatch.plan` and `dispatch.sizes` take beside the choices."""
        p = self.parallel
        factors = dict(cell_factor=p.cell_factor, spill_factor=p.spill_factor, row_factor=p.row_factor)
        return factors | dict(capacity=self.capacity, pad=self.pad, align=self.precision.align)


class Copies(NamedTuple):
    """Experts and their clones.  matrices: gate_up, down and biases of this device's experts, then of the clones it holds.
    chosen_Tk: int32, the copy that each pair goes to.  number: copies on all devices.  clones: int32, slots of this device
    that hold one.  load: float32, rows of the busiest rank over the mean, with clones.
    """

    matrices: tuple[jax.Array, ...]
    chosen_Tk: jax.Array
    number: int
    clones: jax.Array
    load: jax.Array


class Account(NamedTuple):
    """Of this device.  overflow: int32, pairs or stashed rows without room.  need: float32 [4], the factors of cell, spill,
    rows and stash that would have been enough.
    """

    overflow: jax.Array
    need: jax.Array


def copies(experts: Experts, experts_Tk, num_experts: int, fold: Fold, parallel: ParallelConfig) -> Copies:
    """The experts as they stand, or with clones of hot ones on other devices; or only what clones would do.

    experts_Tk: int32, the expert of each pair of this device, `num_experts` for nobody.
    """
    own, ep, slots = experts.matrices(), fold.expert.ep, parallel.echo_slots
    if not slots or not ep:
        return Copies(own, experts_Tk, num_experts, jnp.int32(0), jnp.float32(0))
    all_Tk = collectives.all_gather(experts_Tk, fold.expert.etp, dim=0)  # as the transport will have them
    counts_E = balance.expert_counts(all_Tk, jnp.ones(all_Tk.shape[:1], bool), num_experts)
    counts_nE = collectives.all_gather(counts_E[None], ep, dim=0)
    tokens_E, ranks = counts_nE.sum(axis=0), fold.size(ep)
    me, part = collectives.axis_index(ep), collectives.axis_index(fold.expert.etp)
    options = dict(slots=slots, hot_per_home=parallel.echo_hot, cap=parallel.echo_cap)
    plan = kept(echo.plan_clones(tokens_E, ranks, **options))
    held = jnp.where(part == 0, (plan.slot_nS[me] >= 0).sum(dtype=jnp.int32), 0)  # once for each width split
    mean = jnp.maximum(tokens_E.sum(), 1).astype(jnp.float32) / ranks
    load = plan.loads(tokens_E).max().astype(jnp.float32) / mean
    if not _clone_slots(parallel, fold):
        return Copies(own, experts_Tk, num_experts, held, load)
    copies_Tk = kept(echo.split_pairs(all_Tk, counts_nE, plan, me))
    copies_Tk = jax.lax.dynamic_slice_in_dim(copies_Tk, part * experts_Tk.shape[0], experts_Tk.shape[0], axis=0)
    with jax.named_scope("clones"):
        fetch = dict(compute=echo.fetch_weights, float8=echo.fetch_in_float8)[parallel.echo_wire]
        cloned = lambda w: named("expert_rows", fetch(w, plan.slot_nS, parallel.echo_hot, ep), small=True)
        both = tuple(jnp.concatenate([w, cloned(w)]) for w in own)
    return Copies(both, copies_Tk, num_experts + ranks * slots, held, load)


def with_stash(way: Way, num_layers: int, num_tokens: int, num_experts: int, fold: Fold, factor: float) -> Way:
    """The same with a stash of `factor` times what `num_layers` layers use when routing is balanced; 0 for the worst case.

    num_tokens: this device's tokens of a micro-batch.
    """
    worst = num_layers * _buffer_rows(num_tokens, num_experts, fold, way)
    balanced = num_layers * num_tokens * way.top_k * fold.size(fold.expert.etp)
    rows = min(math.ceil(balanced * factor), worst) if factor else worst
    return way._replace(stash_rows=rows, balanced_rows=balanced)


def empty_stash(experts: Experts, matrices, num_tokens: int, dtype, num_experts: int, fold: Fold, way: Way) -> Stash:
    """The stash that `through_experts` begins its first layer with.  matrices: shapes of this device's experts'."""
    shape, slots = jax.ShapeDtypeStruct, _clone_slots(way.parallel, fold)
    rows = _buffer_rows(num_tokens, num_experts, fold, way)
    copied = lambda w: w if is_quantised(w) else shape((w.shape[0] + slots, *w.shape[1:]), w.dtype)
    matrices = tuple(map(copied, matrices))
    x_TD = shape((num_tokens, matrices[0].shape[1]), dtype)
    given = _abstract_rows(x_TD, rows, way), shape((rows,), jnp.float32)
    ints = (shape(matrices[0].shape[:1], jnp.int32),)
    return stashing.empty(_apply(experts), way.stash_rows, ints, given, matrices, fold.dense.tokens)


def through_experts(
    experts: Experts, x_TD, weights_Tk, copies: Copies, fold: Fold, way: Way, stash: Stash | None
) -> tuple[jax.Array, Account, Stash | None]:
    """The sum [T, D] over each token's experts of their weighed results."""
    waves = math.gcd(way.waves, x_TD.shape[0])  # fewer where generation has fewer tokens than training
    if waves > 1:
        return *_in_waves(experts, x_TD, weights_Tk, copies, fold, way, waves), stash
    plan = _plan(copies.chosen_Tk, copies.number, fold, way)
    with jax.named_scope("dispatch"):
        rows = _rows(x_TD, weights_Tk, plan, fold, way)
    run, ints = _apply(experts), (plan.sizes_e,)
    account = _account(plan, weights_Tk, fold)
    with jax.named_scope("experts"):
        if stash is None:
            out_RD = run(ints, rows, copies.matrices)
        else:
            used = plan.sizes_e.sum(dtype=jnp.int32)
            out_RD, stash = stashing.stashed(run, way.stash_rows)(stash, used, ints, rows, copies.matrices)
            account = _with_stash(account, stash, way)
    with jax.named_scope("combine"):
        y_TD = wire.combine(way.parallel.transport, out_RD, plan, fold, way.precision.wire_gradients)
    return y_TD, account, stash


class Departed(NamedTuple):
    """rows: what this device sends.  weights_R: float32, the router's, one for each of the experts' rows."""

    rows: jax.Array
    weights_R: jax.Array
    plan: dispatch.Plan
    account: Account


def depart(x_TD, weights_Tk, copies: Copies, fold: Fold, way: Way) -> Departed:
    """`through_experts` up to where rows travel; `legs.travel`, `at_experts`, `legs.travel_home`, `legs.land` are the rest.

    For transports of `legs.IN_LEGS`, in the compute dtype, without stash and waves.
    """
    plan = _plan(copies.chosen_Tk, copies.number, fold, way)
    with jax.named_scope("dispatch"):
        weights_R = dispatch.send_pairs(way.parallel.transport, weights_Tk, plan, fold)
        return Departed(legs.depart(x_TD, plan, fold), weights_R, plan, _account(plan, weights_Tk, fold))


def at_experts(experts: Experts, rows, weights_R, plan):
    """What has arrived -> what goes back."""
    with jax.named_scope("dispatch"):
        rows_RD = named("expert_rows", legs.arrive(rows, plan))
    run = _apply(experts)
    with jax.named_scope("experts"):
        out_RD = run((plan.sizes_e,), (rows_RD, weights_R), experts.matrices())
    with jax.named_scope("combine"):
        return legs.leave(out_RD, plan)


def _account(plan, weights_Tk, fold: Fold) -> Account:
    return Account(plan.overflow, jnp.append(dispatch.relative_need(plan, weights_Tk.size, fold), 0))


def _apply(experts: Experts) -> Callable:
    """The experts as a function of (sizes), (rows, weights), (matrices), which is how a stash takes it."""
    return lambda ints, rows, matrices: experts(rows[0], rows[1], ints[0], matrices)


def _plan(chosen_Tk, number: int, fold: Fold, way: Way):
    with jax.named_scope("dispatch"):
        return kept(dispatch.plan(way.parallel.transport, chosen_Tk, number, fold, **way.options()))


def _rows(x_TD, weights_Tk, plan, fold: Fold, way: Way):
    transport = way.parallel.transport
    weights_R = named("expert_rows", dispatch.send_pairs(transport, weights_Tk, plan, fold), small=True)
    if way.precision.wire is None:
        return named("expert_rows", dispatch.send(transport, x_TD, plan, fold)), weights_R
    rows = wire.send(transport, x_TD, plan, fold, way.precision.wire)
    return rows._replace(quantised=named("expert_rows", rows.quantised)), weights_R


def _abstract_rows(x_TD, num_rows: int, way: Way):
    """Shapes of rows as they arrive."""
    rows_RD = jax.ShapeDtypeStruct((num_rows, x_TD.shape[1]), x_TD.dtype)
    if way.precision.wire is None:
        return rows_RD
    written = jax.eval_shape(lambda x: bits(quantize(x, way.precision.wire)), rows_RD)
    return QuantisedRows(written, rows_RD)


def _clone_slots(parallel: ParallelConfig, fold: Fold) -> int:
    """Slots of each rank that weights are fetched for."""
    return parallel.echo_slots if parallel.echo == "always" and fold.expert.ep else 0


def _buffer_rows(num_tokens: int, num_experts: int, fold: Fold, way: Way) -> int:
    number = num_experts + fold.size(fold.expert.ep) * _clone_slots(way.parallel, fold)
    return dispatch.sizes(num_tokens, way.top_k, number, fold, **way.options()).rows


def _with_stash(account: Account, stash: Stash, way: Way) -> Account:
    """Adds what the stash has no room for, and what it needs."""
    over, need = jnp.maximum(stash.at - way.stash_rows, 0), stash.at / jnp.float32(way.balanced_rows)
    return Account(account.overflow + over, account.need.at[3].set(need))


def _in_waves(
    experts: Experts, x_TD, weights_Tk, copies: Copies, fold: Fold, way: Way, waves: int
) -> tuple[jax.Array, Account]:
    """Some tokens after the others, each part with buffers of its own that hold its worst case.

    Of a part only the tokens are kept for the backward pass. An expert's weight gradient is summed part by part: the one
    thing here that changes last bits.
    """
    at_once = way._replace(parallel=dataclasses.replace(way.parallel, waves=1))

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def wave(x_TD, weights_Tk, chosen_Tk, matrices):
        part = copies._replace(chosen_Tk=chosen_Tk, matrices=matrices)
        return through_experts(experts, x_TD, weights_Tk, part, fold, at_once, None)[:2]

    parts = [x.reshape(waves, -1, *x.shape[1:]) for x in (x_TD, weights_Tk, copies.chosen_Tk)]
    _, (y, account) = jax.lax.scan(lambda _, one: (None, wave(*one, copies.matrices)), None, tuple(parts))
    return y.reshape(x_TD.shape), Account(account.overflow.sum(dtype=jnp.int32), account.need.mean(axis=0))
