"""Parameters by flat names, as the import and the export of checkpoints see them."""

from collections.abc import Mapping
from typing import Any

import jax

from moex.hf.names import ROUTER_BIAS
from moex.train.state import TrainState


def targets(state: TrainState) -> dict[str, Any]:
    """Leaves of an abstract state's parameters by name, and of its router bias."""
    leaves = jax.tree_util.tree_leaves_with_path(state.params)
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves} | {
        ROUTER_BIAS: state.router_bias
    }


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters' tree of flat names, without the router bias."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        if name == ROUTER_BIAS:
            continue
        *path, last = name.split(".")
        at = tree
        for part in path:
            at = at.setdefault(part, {})
        at[last] = value
    return tree
