"""Start-up of `jax.distributed`: always, also for one process, since saving on preemption hangs on it.

`mesh.launchers` says which process this is and which GPUs it drives, `mesh.roll_call` brings all processes together and
checks them; then JAX starts, and the devices it found are checked once more and shown as one table.
"""

import os
import re
import socket
from collections.abc import Mapping, MutableMapping, Sequence

import jax

from mesh.gpus import num_installed, visible_gpus
from mesh.launchers import Peer, Start, detect, local_device_ids
from mesh.roll_call import StartError, check_equal, roll_call

__all__ = ["Start", "StartError", "check_devices", "describe", "detect", "initialise", "spare_threads"]

THREADS_PER_CPU_DEVICE = 8
"""Of XLA's CPU backend with several devices: most collectives of a step that are under way at once, and one to spare."""
TIMEOUT_S = 120.0
"""How long to wait for the other processes where COORDINATOR_TIMEOUT_S doesn't say."""

MOST_TIMEOUT_S = 7 * 86400.0
"""A week; much longer ones don't fit the clocks below."""


def initialise(start: Start | None = None, environ: Mapping[str, str] = os.environ) -> Start:
    """Initialises `jax.distributed` once, before the first use of a device; a second call changes nothing.

    Raises ValueError when the launcher's variables don't fit, and StartError, on all processes, when not all of them come
    within COORDINATOR_TIMEOUT_S seconds, or hosts, GPUs and counts don't make up a mesh. Nothing has been compiled then.
    """
    start = start or detect(environ)
    if jax.distributed.is_initialized():
        return start
    spare_threads()
    gpus, timeout_s = visible_gpus(environ), _timeout_s(environ)
    ids = local_device_ids(start, len(gpus), environ)
    # Without GPUs several processes need gloo; one alone sums the same bits as it would without jax.distributed.
    jax.config.update("jax_cpu_collectives_implementation", "gloo" if start.num_processes > 1 else None)
    if start.num_processes == 1:
        start = start._replace(coordinator=f"127.0.0.1:{_free_port()}")
    else:
        start = start._replace(peers=roll_call(start, _report(start, gpus, ids, environ), timeout_s))
    jax.distributed.initialize(
        coordinator_address=start.coordinator,
        num_processes=start.num_processes,
        process_id=start.process_id,
        local_device_ids=ids,
        initialization_timeout=max(int(timeout_s), 10),  # all are there: this is the time of JAX's own start
        cluster_detection_method="deactivate",  # JAX would choose other GPUs where `ids` is None
    )
    check_devices(start, jax.devices())
    return start


def spare_threads(environ: MutableMapping[str, str] = os.environ) -> None:
    """Gives XLA's CPU backend threads enough for the collectives of several CPU devices, before it starts.

    It runs independent collectives of a program side by side, and each holds a thread until its partners arrive; with the
    default of one thread a device, devices now and then wait for each other for ever. PJRT_NPROC, where set, stands.
    """
    flag = re.search(r"--xla_force_host_platform_device_count=(\d+)", environ.get("XLA_FLAGS", ""))
    num_devices = max(jax.config.jax_num_cpu_devices, int(flag[1]) if flag else 1)
    if num_devices > 1:
        environ.setdefault("PJRT_NPROC", str(THREADS_PER_CPU_DEVICE * num_devices))


def check_devices(start: Start, devices: Sequence[jax.Device]) -> None:
    """Raises StartError unless the devices come from as many processes as were started, each with the same number."""
    counts = {i: sum(d.process_index == i for d in devices) for i in sorted({d.process_index for d in devices})}
    if len(counts) != start.num_processes:
        raise StartError(
            f"{start.launcher} started {start.num_processes} processes, but the {len(devices)} devices belong to "
            f"{len(counts)}: each process must see a device of the same platform (JAX_PLATFORMS, CUDA_VISIBLE_DEVICES)"
        )
    hosts = _hosts(start)
    check_equal({i: (hosts.get(i, "its host"), n) for i, n in counts.items()}, f"{devices[0].platform} devices")


def describe(start: Start) -> list[tuple[str, str]]:
    """(name, text) lines for a person: the processes, and for each its host and the devices it drives."""
    hosts, by_id, devices = _hosts(start), {peer.process_id: peer for peer in start.peers}, jax.devices()
    lines = [("processes", f"{jax.process_count()} ({start.launcher}); {len(devices)} devices")]
    if start.num_processes > 1:
        lines[0] = (lines[0][0], f"{lines[0][1]}; process 0 at {start.coordinator}")
    for process in range(jax.process_count()):
        own = [d for d in devices if d.process_index == process]
        kinds = " + ".join(sorted({d.device_kind for d in own}))
        text = f"{hosts.get(process, '?')}: {len(own)} x {kinds}, devices {_ranges([d.id for d in own])}"
        peer = by_id.get(process)
        if peer and peer.gpus:
            text += f"; GPUs {_ranges(peer.local_ids)} of {peer.num_visible} visible"
        lines.append((f"process {process}", text))
    return lines


def _report(start: Start, gpus: Sequence[str], ids: Sequence[int] | None, environ: Mapping[str, str]) -> Peer:
    ids = tuple(range(len(gpus))) if ids is None else tuple(ids)
    return Peer(
        start.process_id,
        start.num_processes,
        socket.gethostname(),
        gpus=tuple(gpus[i] for i in ids) if gpus else (),
        local_ids=ids,
        num_visible=len(gpus),
        num_installed=num_installed() if gpus else 0,
        chosen=bool(environ.get("LOCAL_DEVICE_IDS") or environ.get("JAX_LOCAL_DEVICE_IDS")),
    )


def _hosts(start: Start) -> dict[int, str]:
    return {peer.process_id: peer.host for peer in start.peers} or {jax.process_index(): socket.gethostname()}


def _ranges(numbers: Sequence[int]) -> str:
    """0-3,8 for 0, 1, 2, 3, 8."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(f"{a}-{b}" if a < b else f"{a}" for a, b in runs)


def _timeout_s(environ: Mapping[str, str]) -> float:
    text = environ.get("COORDINATOR_TIMEOUT_S", "")
    try:
        seconds = float(text or TIMEOUT_S)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MOST_TIMEOUT_S:
        raise ValueError(
            f"COORDINATOR_TIMEOUT_S={text!r} must be a number of seconds above 0, at most {MOST_TIMEOUT_S:g}"
        )
    return seconds


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
