"""Which implementation of an op is taken where, and why not another."""

import functools
import logging
from collections.abc import Mapping

import jax

from pallas_kernels import compat

ORDER = ("mosaic", "xla", "reference")
"""Names of implementations, the first that runs is taken."""

HOPPER = ("H100", "H200", "H800", "H20", "GH200")


def why_not_hopper() -> str:
    """Why a Hopper kernel cannot run where this is traced; "" on such a GPU, in a compile for one and in the interpreter."""
    if compat.interpreting():
        return ""
    described = jax.sharding.get_abstract_mesh().abstract_device  # of a mesh without real devices
    if described is None and jax.default_backend() != "gpu":
        return f"it needs a Hopper GPU, and the back end is {jax.default_backend()}"
    kind = described.device_kind if described is not None else jax.devices()[0].device_kind
    if any(name in kind.split() for name in HOPPER):
        return ""
    return f"it needs a Hopper GPU, and the device is {kind}"


def choose(op: str, wanted: str | None, reasons: Mapping[str, str]) -> str:
    """The implementation to take.

    Args:
      op: name, for messages.  wanted: an implementation's name, or None for the first that runs.
      reasons: why each can't do this call, "" where it can.

    Raises ValueError for an unknown name, NotImplementedError with the reason for a named one that can't.
    """
    if wanted is None:
        taken = next(name for name in ORDER if name in reasons and not reasons[name])
        if taken != "mosaic" and "mosaic" in reasons and not why_not_hopper():
            _say_once(op, taken, reasons["mosaic"])
        return taken
    if wanted not in reasons:
        raise ValueError(f"{op} implementation={wanted!r}: choose one of {tuple(reasons)}, or None")
    if reasons[wanted]:
        raise NotImplementedError(f"{op} implementation={wanted!r}: {reasons[wanted]}")
    return wanted


@functools.cache
def _say_once(op: str, taken: str, reason: str) -> None:
    """On a GPU that has kernels, a slower path shouldn't go unnoticed."""
    logging.getLogger("pallas_kernels").warning("%s runs as %s: %s", op, taken, reason)
