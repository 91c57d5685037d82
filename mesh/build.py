"""From a fold to a mesh: on real devices (NVLink domain innermost) or in the abstract."""

import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from mesh.fold import Fold


def device_order(devices):
    """Devices in the order of the line that a fold cuts: by NVLink domain or slice, host process, local number.

    The innermost axes (tp, etp, ep) thus fall into one domain first.
    """
    return sorted(devices, key=lambda d: (getattr(d, "slice_index", None) or 0, d.process_index, d.id))


def build_mesh(fold: Fold, devices) -> Mesh:
    """The mesh of the fold's atoms over all `devices`.  Raises ValueError, with both numbers, when they don't match."""
    devices = list(devices)
    if len(devices) != fold.num_devices:
        raise ValueError(
            f"the mesh needs {fold.num_devices} devices ({fold.describe()}), but {len(devices)} are visible: "
            "change the sizes under --parallel, or leave dp and edp at 0 to have them fill the devices"
        )
    return Mesh(np.array(device_order(devices)).reshape(fold.shape), fold.names, axis_types=_auto(fold))


def abstract_mesh(fold: Fold) -> AbstractMesh:
    """The same mesh without devices: traces and shapes at any scale, on any machine."""
    return AbstractMesh(fold.shape, fold.names, axis_types=_auto(fold))


def _auto(fold: Fold):
    return (AxisType.Auto,) * len(fold.names)
