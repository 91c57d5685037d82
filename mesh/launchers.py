"""Which launcher started this process, and its place among the others: read from environment variables alone.

Recognised, first match wins: Open MPI, a step of SLURM's srun, MPICH and Intel MPI, an indexed Job or JobSet of
Kubernetes. COORDINATOR_ADDRESS, NUM_PROCESSES and PROCESS_ID complete what a launcher leaves open, and suffice alone.
"""

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

PLAIN = ("COORDINATOR_ADDRESS", "NUM_PROCESSES", "PROCESS_ID")
KUBERNETES_PORT = 55527
FIRST_PORT, NUM_PORTS = 61440, 4096
"""Ports above those that Linux gives to outgoing connections; a job's number chooses one of them."""


class Peer(NamedTuple):
    """One process's report: its host, the GPUs it drives (UUIDs, positions among the visible ones), how many there are."""

    process_id: int
    num_processes: int
    host: str
    gpus: tuple[str, ...] = ()
    local_ids: tuple[int, ...] = ()
    num_visible: int = 0
    num_installed: int = 0
    chosen: bool = False  # by LOCAL_DEVICE_IDS


class Start(NamedTuple):
    """How this process joins: its launcher, the address of process 0 (None: alone), its place, its place on the host.

    `local_rank` and `local_size` count the processes of this run on this host; None where the launcher doesn't say.
    `peers` are the reports of all processes once they have come together.
    """

    launcher: str
    coordinator: str | None
    num_processes: int
    process_id: int
    local_rank: int | None = None
    local_size: int | None = None
    peers: tuple[Peer, ...] = ()


class _Place(NamedTuple):
    """What one launcher's variables tell; None for what they leave open, with the reason where that is the coordinator."""

    launcher: str
    size_name: str
    size: int | None
    rank: int | None
    coordinator: str | None
    no_coordinator: str
    local_rank: int | None = None
    local_size: int | None = None


def detect(environ: Mapping[str, str] = os.environ) -> Start:
    """Reads the launcher's variables.  Raises ValueError that names the variable when they are incomplete or wrong."""
    place = next((p for find in (_open_mpi, _slurm, _mpich, _kubernetes) if (p := find(environ))), None)
    given = [name for name in PLAIN if name in environ]
    num_processes = _optional(environ, "NUM_PROCESSES")
    if place is None:
        if not given:
            _refuse_unlaunched(environ)
        if not given or (given == ["NUM_PROCESSES"] and num_processes == 1):
            return Start("one process", None, 1, 0)
        if missing := [name for name in PLAIN if name not in environ]:
            raise ValueError(f"{given} set but {missing} missing: set all of {PLAIN}, or none for one process")
        place = _Place("environment", "NUM_PROCESSES", None, None, None, "")
    elif place.size is not None and num_processes not in (None, place.size):
        raise ValueError(
            f"NUM_PROCESSES={num_processes}, but {place.launcher} started {place.size} ({place.size_name}): set them "
            "alike, or leave NUM_PROCESSES out"
        )
    size = place.size if num_processes is None else num_processes
    if size is None:
        raise ValueError(
            f"{place.launcher}: the environment doesn't tell how many processes there are: set NUM_PROCESSES to the "
            f"number of {place.size_name}"
        )
    if size == 1 and len(given) < len(PLAIN):
        return Start("one process", None, 1, 0)
    rank = _optional(environ, "PROCESS_ID")
    rank = place.rank if rank is None else rank
    if rank is None:
        raise ValueError(
            f"{place.launcher}: PROCESS_ID is missing: set it to 0 ... {size - 1}, another on each process"
        )
    coordinator = environ.get("COORDINATOR_ADDRESS") or place.coordinator
    if coordinator is None:
        raise ValueError(
            f"{place.launcher}: {place.no_coordinator}; set COORDINATOR_ADDRESS=HOST:PORT on all {size} processes, with "
            "the host of process 0 and a free port there"
        )
    split_address(coordinator)
    if not 0 <= rank < size:
        raise ValueError(
            f"{place.launcher}: process {rank} of {size} processes: the numbers run from 0 to {size - 1}; correct "
            "PROCESS_ID or NUM_PROCESSES"
        )
    launcher = "environment" if len(given) == len(PLAIN) else place.launcher
    return Start(launcher, coordinator, size, rank, place.local_rank, place.local_size)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT or [IPV6]:PORT.  Raises ValueError with the address when it is neither."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"COORDINATOR_ADDRESS={address!r} must be HOST:PORT, such as host0:1234")
    return host.strip("[]"), int(port)


def local_device_ids(start: Start, num_visible: int, environ: Mapping[str, str] = os.environ) -> tuple[int, ...] | None:
    """The GPUs this process drives, as positions among those that CUDA shows it; None for all of them.

    LOCAL_DEVICE_IDS (or JAX_LOCAL_DEVICE_IDS) decides where it is set. Else a process alone on its host drives all; of
    several, one that sees a single GPU was bound to it by the launcher, and those that see the whole host's share them
    evenly in the order of their local ranks. JAX's own rule takes the local rank for a position even where the launcher
    bound the process to one GPU, and one GPU where one process has the host.

    Raises ValueError with the numbers when the GPUs can't be shared so.
    """
    name = next((n for n in ("LOCAL_DEVICE_IDS", "JAX_LOCAL_DEVICE_IDS") if environ.get(n)), None)
    if name:
        return _given_ids(name, environ[name], num_visible)
    rank, size = start.local_rank, start.local_size
    if not num_visible or rank is None or size is None or size == 1:
        return None
    if not 0 <= rank < size:
        raise ValueError(f"{start.launcher}: local process {rank} of {size} processes of this host")
    if num_visible == 1:
        return (0,)
    on_node = _optional(environ, "SLURM_GPUS_ON_NODE") or num_visible
    per_task = environ.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2]  # 4 or h100:4, also where nothing is bound
    if per_task == str(num_visible) or on_node > num_visible:
        return None  # SLURM has bound each task to several
    remedy = "start as many processes as GPUs, one for each host, or set LOCAL_DEVICE_IDS on each"
    if num_visible % size:
        raise ValueError(
            f"{size} processes of this host see {num_visible} GPUs, which don't divide among them: {remedy}"
        )
    share = num_visible // size
    if share > 1 and environ.get("CUDA_VISIBLE_DEVICES") and "SLURM_GPUS_ON_NODE" not in environ:
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES shows {num_visible} GPUs to each of {size} processes of this host, and whether they are "
            f"the same ones can't be told: {remedy}"
        )
    return tuple(range(rank * share, (rank + 1) * share))


def _given_ids(name: str, text: str, num_visible: int) -> tuple[int, ...]:
    try:
        ids = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{name}={text!r} must be whole numbers with commas between them, such as 0,1") from None
    if len(set(ids)) < len(ids) or min(ids) < 0:
        raise ValueError(f"{name}={text!r} must name each GPU once, from 0")
    if num_visible and max(ids) >= num_visible:
        raise ValueError(
            f"{name}={text!r}, but this process sees {num_visible} GPUs: they are 0 ... {num_visible - 1}, in the order of "
            "CUDA_VISIBLE_DEVICES where that is set"
        )
    return ids


def _open_mpi(environ: Mapping[str, str]) -> _Place | None:
    size, rank = "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"
    if size not in environ or rank not in environ:
        return None
    # Up to Open MPI 4 mpirun leaves its own address: 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911, or tcp6://[fe80::1]:4
    uri = re.match(r"(\d+)\..*?;tcp6?://(?:\[([^],]+)|([^,:]+))", environ.get("OMPI_MCA_orte_hnp_uri", ""))
    coordinator = None
    if uri:
        job, ipv6, ipv4 = uri.groups()
        coordinator = f"{ipv4 or f'[{ipv6}]'}:{FIRST_PORT + int(job) // 4096 % NUM_PORTS}"
    return _Place(
        "Open MPI", size, _int(environ, size), _int(environ, rank), coordinator,
        "OMPI_MCA_orte_hnp_uri doesn't give the host of mpirun (Open MPI 5 no longer sets it)",
        _optional(environ, "OMPI_COMM_WORLD_LOCAL_RANK"), _optional(environ, "OMPI_COMM_WORLD_LOCAL_SIZE"),
    )  # fmt: skip


def _slurm(environ: Mapping[str, str]) -> _Place | None:
    size, rank, nodes = "SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_NODELIST"
    if any(name not in environ for name in (size, rank, nodes)):
        return None
    if environ.get("SLURM_STEP_NUM_TASKS", environ[size]) != environ[size]:
        return None  # salloc's shell: a step of one task that shows the job's number
    # Under srun MPI's variables repeat SLURM's. When they don't, srun has started the daemons of an mpiexec.
    pmi = [_optional(environ, name) for name in ("PMI_SIZE", "PMI_RANK")]
    if None not in pmi and pmi != [_int(environ, size), _int(environ, rank)]:
        return None
    coordinator = None
    if job := _optional(environ, "SLURM_JOB_ID"):
        port = environ.get("JAX_COORDINATOR_PORT") or FIRST_PORT + job % NUM_PORTS
        coordinator = f"{first_host(environ[nodes])}:{port}"
    return _Place(
        "SLURM", size, _int(environ, size), _int(environ, rank), coordinator, "SLURM_JOB_ID isn't set",
        _optional(environ, "SLURM_LOCALID"), _tasks_on_node(environ),
    )  # fmt: skip


def first_host(nodes: str) -> str:
    """The first of SLURM's host list: node001 of node[001-015,020]-ib,other3, with what follows the bracket."""
    first = re.match(r"([^,\[]*)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodes)
    assert first, nodes
    return "".join(part or "" for part in first.groups())


def _tasks_on_node(environ: Mapping[str, str]) -> int | None:
    """Entry SLURM_NODEID of a list like 4(x2),3, which stands for 4, 4, 3."""
    counts: list[int] = []
    for entry in filter(None, environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(",")):
        if not (parts := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry)):
            raise ValueError(
                f"SLURM_STEP_TASKS_PER_NODE={environ['SLURM_STEP_TASKS_PER_NODE']!r} isn't a list like 4(x2),3"
            )
        counts += [int(parts[1])] * int(parts[2] or 1)
    node = _optional(environ, "SLURM_NODEID") or 0
    if counts and not (0 <= node < len(counts) and counts[node] > 0):
        raise ValueError(
            f"SLURM_NODEID={node} has no tasks in SLURM_STEP_TASKS_PER_NODE={environ['SLURM_STEP_TASKS_PER_NODE']!r}"
        )
    return counts[node] if counts else None


def _refuse_unlaunched(environ: Mapping[str, str]) -> None:
    """A job of several tasks whose script doesn't call srun would train alone, or once for each task."""
    if (_optional(environ, "SLURM_NTASKS") or 1) > 1:
        raise ValueError(
            f"SLURM_NTASKS={environ['SLURM_NTASKS']}, but srun hasn't started this process (SLURM_STEP_NODELIST="
            f"{environ.get('SLURM_STEP_NODELIST', '')!r}, SLURM_STEP_NUM_TASKS={environ.get('SLURM_STEP_NUM_TASKS', '')!r}"
            "): start it with srun, or set NUM_PROCESSES=1 to train with this process alone"
        )


def _mpich(environ: Mapping[str, str]) -> _Place | None:
    size, rank = "PMI_SIZE", "PMI_RANK"
    if size not in environ or rank not in environ:
        return None
    local = lambda *names: next((n for name in names if (n := _optional(environ, name)) is not None), None)
    return _Place(
        "MPICH", size, _int(environ, size), _int(environ, rank), None, "its variables don't name the host of process 0",
        local("MPI_LOCALRANKID", "PMI_LOCAL_RANK"), local("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    )  # fmt: skip


def _kubernetes(environ: Mapping[str, str]) -> _Place | None:
    """An indexed Job, alone or as a JobSet's only replicated Job.

    Kubernetes itself sets JOB_COMPLETION_INDEX and, in the pod of an indexed Job, HOSTNAME=JOB-INDEX. The rest comes
    from the manifest: NUM_PROCESSES, and JOBSET_NAME or JOB_SUBDOMAIN (a plain Job's headless service). With hostNetwork
    HOSTNAME is the node's, so REPLICATED_JOB_NAME is needed, too; of several replicas (REPLICATED_JOB_REPLICAS) JOB_INDEX.
    """
    if "JOB_COMPLETION_INDEX" not in environ:
        return None
    index, replicas = _int(environ, "JOB_COMPLETION_INDEX"), _optional(environ, "REPLICATED_JOB_REPLICAS") or 1
    num_processes, rank = _optional(environ, "NUM_PROCESSES"), index
    if replicas > 1 and num_processes:
        if "JOB_INDEX" not in environ:
            raise ValueError(
                f"REPLICATED_JOB_REPLICAS={replicas}, but JOB_INDEX isn't set: take it from the pod's labels"
            )
        if num_processes % replicas:
            raise ValueError(f"NUM_PROCESSES={num_processes} doesn't divide by REPLICATED_JOB_REPLICAS={replicas}")
        rank += _int(environ, "JOB_INDEX") * (num_processes // replicas)
    job_set, replicated, host = (environ.get(n, "") for n in ("JOBSET_NAME", "REPLICATED_JOB_NAME", "HOSTNAME"))
    subdomain = environ.get("JOB_SUBDOMAIN") or job_set
    first = None
    if job_set and replicated:
        first = f"{job_set}-{replicated}-0-0"
    elif host.endswith(f"-{index}") and replicas == 1:
        first = f"{host.removesuffix(f'-{index}')}-0"
    port = environ.get("JAX_COORDINATOR_PORT") or KUBERNETES_PORT
    return _Place(
        "Kubernetes", "pods of the Job (completions; of a JobSet times replicas)", None, rank,
        f"{first}.{subdomain}:{port}" if first and subdomain else None,
        f"the name of pod 0 doesn't follow from JOBSET_NAME={job_set!r}, REPLICATED_JOB_NAME={replicated!r}, "
        f"JOB_SUBDOMAIN={environ.get('JOB_SUBDOMAIN', '')!r} and HOSTNAME={host!r}; set the first two (a JobSet) or "
        "JOB_SUBDOMAIN (a Job: its headless service), or",
    )  # fmt: skip


def _optional(environ: Mapping[str, str], name: str) -> int | None:
    return _int(environ, name) if environ.get(name) else None


def _int(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ValueError(f"{name}={environ[name]!r} must be a whole number") from None
