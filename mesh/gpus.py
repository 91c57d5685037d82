"""The GPUs of this host as the driver names them, asked before JAX starts: what two processes could share unawares.

Variables don't tell: under SLURM's device constraint each task sees its own GPU as number 0, and CUDA_VISIBLE_DEVICES
may hold numbers, GPU-... or MIG-... names. The driver answers for exactly what this process will get.
"""

import ctypes
import os
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any


def visible_gpus(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """UUIDs of the GPUs that JAX will find, by CUDA's numbers; none where JAX has no CUDA plugin or JAX_PLATFORMS no GPU."""
    platforms = [name for name in environ.get("JAX_PLATFORMS", "").split(",") if name]
    if platforms and not {"cuda", "gpu"} & set(platforms):
        return ()
    if not any("cuda" in plugin.name for plugin in metadata.entry_points(group="jax_plugins")):
        return ()
    return cuda_uuids()


def cuda_uuids(load: Callable[[str], Any] = ctypes.CDLL) -> tuple[str, ...]:
    """UUIDs of the GPUs (or MIG instances) CUDA shows this process; none when there is no working driver."""
    try:
        driver = load("libcuda.so.1")
        uuid_of = driver.cuDeviceGetUuid_v2
    except (OSError, AttributeError):
        return ()
    count, device, uuid = ctypes.c_int(), ctypes.c_int(), (ctypes.c_ubyte * 16)()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    uuids = []
    for number in range(count.value):
        if driver.cuDeviceGet(ctypes.byref(device), number) or uuid_of(ctypes.byref(uuid), device):
            return ()
        uuids.append(bytes(uuid).hex())
    return tuple(uuids)


def num_installed(folder: Path = Path("/proc/driver/nvidia/gpus")) -> int:
    """Number of GPUs in this host, also those that this process may not use; 0 where the driver doesn't list them."""
    return len(list(folder.iterdir())) if folder.is_dir() else 0
