"""Muon: momentum made orthogonal, for the matrices of layers (K. Jordan 2024; arXiv 2502.16982); AdamW for the rest.

What is one matrix: each expert's, gate and up apart; queries, keys and values apart, each of all heads. Embedding, head and
vectors are AdamW's. The work is optax's; here is which dims of a parameter are a matrix's rows and columns.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import optax
from optax.contrib import MuonDimensionNumbers

from moex.config import OptimizerConfig
from moex.layers import param
from moex.layers.param import Declaration


def matrix_dims(name: str, d: Declaration) -> MuonDimensionNumbers | None:
    """Dims of a whole parameter that are a matrix's inputs and outputs, the others counting matrices; None for no matrix."""
    first = (1 if d.stacked else 0) + d.slices
    inputs = max(d.contracted, 1)
    dims = list(range(first, len(d.full_shape)))
    if name.startswith("ends.") or not d.decays or len(dims) <= inputs:
        return None
    outputs = dims[inputs:]
    if name.endswith(".gate_up"):
        outputs = outputs[1:]  # the first of them says whether it is the gate or the up matrix
    return MuonDimensionNumbers(reduction_axis=tuple(dims[:inputs]), output_axis=tuple(outputs))


def with_muon(
    config: OptimizerConfig, declarations: Mapping, other: optax.GradientTransformation, rates: Mapping
) -> optax.GradientTransformation:
    """Muon for parameters that are matrices, `other` for the rest: gradients -> direction for a learning rate of 1.

    rates: factors of the parameters' rates; one of rate 0 has no moments and a direction of 0.
    An update's elements have the root mean square `muon_rms`, whatever the matrix's shape (arXiv 2502.16982 section 2.2).
    """

    def label(name: str, d: Declaration, rate: float) -> str:
        return "frozen" if not rate else "other" if matrix_dims(name, d) is None else "muon"

    return optax.partition(
        dict(muon=_muon(config, declarations), other=other, frozen=optax.set_to_zero()),
        param.named_map(label, declarations, rates),
    )


class Momentum(NamedTuple):
    """count: int32, updates so far.  mu: averages of gradients. Both begin at zero, like the rest of a run's state."""

    count: Any
    mu: Any


def _muon(config: OptimizerConfig, declarations: Mapping) -> optax.GradientTransformation:
    def numbers(updates) -> Any:
        return param.named_map(
            lambda name, d, x: x if isinstance(x, optax.MaskedNode) else matrix_dims(name, d), declarations, updates
        )

    inner = optax.contrib.scale_by_muon(beta=config.muon_momentum, nesterov=False, weight_dimension_numbers=numbers)

    def init(params) -> Momentum:
        state: Any = inner.init(params)
        return Momentum(state.count, state.mu)

    def update(updates, state: Any, params=None):
        fresh: Any = inner.init(updates)  # with the polynomial's constants, which are no state
        found: Any = inner.update(updates, fresh._replace(count=state.count, mu=state.mu), params)
        updates, after = found
        is_dims = lambda x: isinstance(x, MuonDimensionNumbers)
        updates = jax.tree.map(lambda dims, x: scaled(x, dims), numbers(updates), updates, is_leaf=is_dims)
        return updates, Momentum(after.count, after.mu)

    def scaled(update, dims: MuonDimensionNumbers):
        size = lambda axes: math.prod(update.shape[a] for a in axes)
        return update * (config.muon_rms * max(size(dims.reduction_axis), size(dims.output_axis)) ** 0.5)

    return optax.GradientTransformation(init, update)
