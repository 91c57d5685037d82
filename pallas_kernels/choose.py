"""Which implementation of an op runs: the one asked for, or the first that can."""

import functools
import logging
from collections.abc import Mapping

ORDER = ("mosaic", "xla", "reference")
"""From fast to plain."""

_log = logging.getLogger(__name__)


def choose(op: str, implementation: str | None, reasons: Mapping[str, str]) -> str:
    """The implementation's name. `reasons` has why each one cannot run this call ("" where it can).

    Raises ValueError for a name that doesn't exist; NotImplementedError with the reason for one that cannot run. Without a
    name the first that runs is taken, and the log tells once for each reason why a faster one was passed over.
    """
    if implementation is None:
        for name in ORDER:
            if not reasons[name]:
                return name
            _tell_once(op, name, reasons[name])
        raise NotImplementedError(f"no implementation of {op} runs here: {dict(reasons)}")
    if implementation not in ORDER:
        raise ValueError(f"implementation={implementation!r}: choose one of {ORDER}, or None")
    if reasons[implementation]:
        raise NotImplementedError(f"{op} implementation={implementation!r}: {reasons[implementation]}")
    return implementation


@functools.cache
def _tell_once(op: str, name: str, reason: str) -> None:
    _log.info("%s passes over its implementation %s: %s", op, name, reason)
