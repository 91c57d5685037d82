"""Devices and named axes: one mesh of atoms, seen as a dense and as an expert factorisation."""

from mesh.build import abstract_mesh, build_mesh
from mesh.fold import ALONE, Fold, fold
from mesh.partition import Placement, place, sharded

__all__ = ["ALONE", "Fold", "Placement", "abstract_mesh", "build_mesh", "fold", "place", "sharded"]
