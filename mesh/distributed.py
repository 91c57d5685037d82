"""Start-up of `jax.distributed`: always, also for one process, since saving on preemption hangs on it.

Recognised, first match wins: plain variables (COORDINATOR_ADDRESS, NUM_PROCESSES, PROCESS_ID), Open MPI, SLURM.
Without any of them the process is alone.
"""

import os
import socket
from collections.abc import Mapping
from typing import NamedTuple

import jax


class Start(NamedTuple):
    """How this process joins: the launcher it was recognised by, address of process 0 (None: found by JAX), its place."""

    launcher: str
    coordinator: str | None
    num_processes: int
    process_id: int


def detect(environ: Mapping[str, str] = os.environ) -> Start:
    """Reads the launcher's variables.  Raises ValueError that names the variable when they are incomplete or wrong."""
    plain = ("COORDINATOR_ADDRESS", "NUM_PROCESSES", "PROCESS_ID")
    given = [name for name in plain if name in environ]
    if given:
        if missing := [name for name in plain if name not in environ]:
            raise ValueError(f"{given} set but {missing} missing: set all of {plain}, or none for one process")
        return _checked(Start("environment", environ[plain[0]], _int(environ, plain[1]), _int(environ, plain[2])))
    for launcher, size, rank in (
        ("Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        ("SLURM", "SLURM_NTASKS", "SLURM_PROCID"),
    ):
        if size in environ and rank in environ and _int(environ, size) > 1:
            return _checked(Start(launcher, None, _int(environ, size), _int(environ, rank)))
    return Start("one process", None, 1, 0)


def initialise(start: Start | None = None, *, timeout_s: int = 120) -> Start:
    """Initialises `jax.distributed` once, before the first use of a device; a second call changes nothing.

    Raises RuntimeError that names the coordinator when it cannot be reached within `timeout_s` seconds.
    """
    start = start or detect()
    if jax.distributed.is_initialized():
        return start
    # Without GPUs several processes need gloo; one alone sums the same bits as it would without jax.distributed.
    jax.config.update("jax_cpu_collectives_implementation", "gloo" if start.num_processes > 1 else None)
    if start.num_processes == 1:
        start = start._replace(coordinator=f"127.0.0.1:{_free_port()}")
    try:
        jax.distributed.initialize(
            coordinator_address=start.coordinator,
            num_processes=start.num_processes,
            process_id=start.process_id,
            local_device_ids=_local_device_ids(),
            initialization_timeout=timeout_s,
        )
    except RuntimeError as error:
        raise RuntimeError(
            f"process {start.process_id} of {start.num_processes} ({start.launcher}) could not join the coordinator at "
            f"{start.coordinator or 'the address JAX derived'} within {timeout_s} s: {error}"
        ) from error
    return start


def describe(start: Start) -> str:
    """One line: process, launcher, host and the devices this process drives."""
    local = [f"{d.device_kind}:{d.id}" for d in jax.local_devices()]
    place = f"process {jax.process_index()}/{jax.process_count()} ({start.launcher}) on {socket.gethostname()}"
    return f"{place}: {', '.join(local)}"


def _checked(start: Start) -> Start:
    if not 0 <= start.process_id < start.num_processes:
        raise ValueError(f"{start.launcher}: process {start.process_id} of {start.num_processes} processes")
    return start


def _int(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ValueError(f"{name}={environ[name]!r} must be a whole number") from None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _local_device_ids() -> list[int] | None:
    """GPUs named in CUDA_VISIBLE_DEVICES by position; None leaves the choice of all visible ones to JAX."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return list(range(len(visible.split(",")))) if visible else None
