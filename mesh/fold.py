"""Parallel folding: two factorisations of one line of devices, joined in one mesh of atomic axes.

The dense layers factor the line as pp x dp x cp x tp, the expert layers as pp x edp x ep x etp (outer to inner). Every
cut of either factorisation becomes a cut of the mesh, so each atom lies in one dense and one expert axis and is named
by the pair: `dp_ep` is the part of dp that ep runs over. Folding: arXiv 2504.14960.
"""

import dataclasses
import math
from collections.abc import Mapping

from mesh.axes import DENSE_AXES, EXPERT_AXES, Axes, DenseView, ExpertView


@dataclasses.dataclass(frozen=True)
class Fold:
    """A folded mesh in the abstract: named atoms (outer to inner) with sizes, and the two views of them."""

    atoms: tuple[tuple[str, int], ...]
    dense: DenseView
    expert: ExpertView

    @property
    def names(self) -> Axes:
        return tuple(name for name, _ in self.atoms)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.atoms)

    @property
    def num_devices(self) -> int:
        return math.prod(self.shape)

    def view(self, name: str) -> Axes:
        """Mesh axes of the view axis `name`, one of pp, dp, cp, tp, edp, ep, etp.  Raises KeyError on another name."""
        if name in DENSE_AXES:
            return getattr(self.dense, name)
        if name in EXPERT_AXES:
            return getattr(self.expert, name)
        raise KeyError(f"no view axis {name!r}: the dense ones are {DENSE_AXES}, the expert ones {EXPERT_AXES}")

    def size(self, axes: str | Axes) -> int:
        """Number of devices along a view axis (by name) or a tuple of mesh axes."""
        sizes = dict(self.atoms)
        return math.prod(sizes[a] for a in (self.view(axes) if isinstance(axes, str) else axes))

    def describe(self) -> str:
        """One line for a person: both factorisations and the atoms."""
        line = lambda names: " ".join(f"{n}={self.size(n)}" for n in names)
        atoms = " ".join(f"{n}={s}" for n, s in self.atoms)
        return f"dense {line(DENSE_AXES)} | expert {line(EXPERT_AXES[1:])} | atoms {atoms}"


def fold(dense: Mapping[str, int], expert: Mapping[str, int]) -> Fold:
    """Joins the two factorisations into their coarsest common refinement.

    Args:
      dense: sizes of pp, dp, cp, tp; a missing one is 1.
      expert: sizes of pp, edp, ep, etp; a missing one is 1.

    Returns: the Fold; one device gives a single atom of size 1, so that a mesh always has an axis.

    Raises ValueError, naming the sizes, for an unknown axis, a size below 1, unequal pp, unequal products, or two cuts
    that don't divide each other.
    """
    dense, expert = _checked("dense", dense, DENSE_AXES), _checked("expert", expert, EXPERT_AXES)
    if dense["pp"] != expert["pp"]:
        raise ValueError(f"pp must agree: dense pp={dense['pp']}, expert pp={expert['pp']}")
    products = math.prod(dense.values()), math.prod(expert.values())
    if products[0] != products[1]:
        raise ValueError(f"{_text(dense)} is {products[0]} devices, {_text(expert)} is {products[1]}: make them equal")

    atoms, outer = [], products[0]  # walk from the outermost axis inwards; `outer` = devices not yet cut off
    cuts_dense, cuts_expert = _cuts(dense), _cuts(expert)
    while outer > 1:
        (dense_axis, dense_cut), (expert_axis, expert_cut) = _at(cuts_dense, outer), _at(cuts_expert, outer)
        cut = max(dense_cut, expert_cut)
        if outer % cut or cut % min(dense_cut, expert_cut):
            raise ValueError(
                f"cannot fold {_text(dense)} with {_text(expert)}: inside {dense_axis} lie {dense_cut} devices, inside "
                f"{expert_axis} lie {expert_cut}, and neither divides the other; choose sizes whose inner products divide"
            )
        name = dense_axis if dense_axis == expert_axis else f"{dense_axis}_{expert_axis}"
        atoms.append((name, outer // cut, dense_axis, expert_axis))
        outer = cut
    atoms = atoms or [("dp_edp", 1, "dp", "edp")]
    view = lambda side, axis: tuple(a[0] for a in atoms if a[side] == axis)
    return Fold(
        atoms=tuple((name, size) for name, size, _, _ in atoms),
        dense=DenseView(**{axis: view(2, axis) for axis in DENSE_AXES}),
        expert=ExpertView(**{axis: view(3, axis) for axis in EXPERT_AXES}),
    )


def _checked(side: str, sizes: Mapping[str, int], names: Axes) -> dict[str, int]:
    if unknown := set(sizes) - set(names):
        raise ValueError(f"{side} has no axis {sorted(unknown)}: its axes are {names}")
    sizes = {name: sizes.get(name, 1) for name in names}
    if bad := {n: s for n, s in sizes.items() if s < 1}:
        raise ValueError(f"{side} axis sizes must be at least 1, got {bad}")
    return sizes


def _text(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{n}={s}" for n, s in sizes.items())


def _cuts(sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    """(axis, devices inside one step of it) from outermost to innermost, axes of size 1 left out."""
    inside, cuts = math.prod(sizes.values()), []
    for name, size in sizes.items():
        inside //= size
        if size > 1:
            cuts.append((name, inside))
    return cuts


def _at(cuts: list[tuple[str, int]], outer: int) -> tuple[str, int]:
    """The axis that a block of `outer` devices is still to be cut along: the first one with a finer cut."""
    return next((axis, inside) for axis, inside in cuts if inside < outer)


ALONE = Fold(atoms=(), dense=DenseView((), (), (), ()), expert=ExpertView((), (), (), ()))
"""No mesh at all: for calling layers outside shard_map, as in a notebook. Every collective over it is the identity."""
