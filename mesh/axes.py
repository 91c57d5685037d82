"""The names of the view axes, and what a view of the mesh is.

A view axis (tp, ep, ...) is a tuple of mesh axes, outer to inner, ready for a PartitionSpec entry or a collective's
axis name. A view of size one over no mesh axis is the empty tuple.
"""

import dataclasses

Axes = tuple[str, ...]

DENSE_AXES = ("pp", "dp", "cp", "tp")
EXPERT_AXES = ("pp", "edp", "ep", "etp")


@dataclasses.dataclass(frozen=True)
class DenseView:
    """How attention, norms, embedding and head see the devices: pipeline, data, context, tensor (outer to inner)."""

    pp: Axes
    dp: Axes
    cp: Axes
    tp: Axes

    @property
    def sequence(self) -> Axes:
        """The axes that split a sequence between layers: context, then tensor (sequence parallelism)."""
        return self.cp + self.tp

    @property
    def tokens(self) -> Axes:
        """The axes that split the tokens of one micro-batch."""
        return self.dp + self.cp + self.tp


@dataclasses.dataclass(frozen=True)
class ExpertView:
    """How routed experts see the same devices: pipeline, expert data, expert, expert tensor (outer to inner)."""

    pp: Axes
    edp: Axes
    ep: Axes
    etp: Axes
