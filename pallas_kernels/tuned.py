"""What `benchmarks/gpu.py --tune` found best on a device, kept as JSON beside each op: settings by shape.

Settings never change a result's bits, only how a kernel cuts its work.
"""

import functools
import json
import re
from pathlib import Path
from typing import Any

from pallas_kernels import compat


def file_of(op: str, device_kind: str) -> Path:
    """Where the settings of an op on a kind of device are kept, e.g. permute/tuned/nvidia_h200.json."""
    name = re.sub(r"[^a-z0-9]+", "_", device_kind.lower()).strip("_")
    return Path(__file__).parent / op / "tuned" / f"{name}.json"


def settings(op: str, shape: str) -> dict[str, Any]:
    """Keyword arguments of the op's configuration for the device compiled for; empty where none were measured."""
    return dict(_all_of(op, compat.device_kind()).get(shape, {}))


@functools.cache
def _all_of(op: str, device_kind: str) -> dict[str, dict[str, Any]]:
    file = file_of(op, device_kind)
    return json.loads(file.read_text()) if file.exists() else {}
