"""Which launcher started this process, and which GPUs it drives: from made-up environments and drivers."""

import ctypes
import subprocess
from pathlib import Path

import pytest
import yaml

from mesh.gpus import cuda_uuids, num_installed, visible_gpus
from mesh.launchers import Start, detect, first_host, local_device_ids

LAUNCH = Path(__file__).parents[2] / "scripts" / "launch"
ALONE = Start("one process", None, 1, 0)
PLAIN = dict(COORDINATOR_ADDRESS="10.0.0.1:1234", NUM_PROCESSES="4", PROCESS_ID="3")
HNP = "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"  # job number 373920 * 4096
OPEN_MPI = dict(
    OMPI_COMM_WORLD_SIZE="8", OMPI_COMM_WORLD_RANK="5", OMPI_COMM_WORLD_LOCAL_RANK="1", OMPI_COMM_WORLD_LOCAL_SIZE="4",
    OMPI_MCA_orte_hnp_uri=HNP,
)  # fmt: skip
HNP_IPV6 = dict(OMPI_MCA_orte_hnp_uri="4096.0;tcp6://[fe80::b9b,26::2]:4")
SLURM = dict(
    SLURM_NTASKS="16", SLURM_PROCID="9", SLURM_LOCALID="1", SLURM_NODEID="2", SLURM_STEP_TASKS_PER_NODE="4(x3),2(x2)",
    SLURM_STEP_NODELIST="node[007-011]", SLURM_JOB_ID="8195",
)  # fmt: skip
MPICH = dict(PMI_SIZE="4", PMI_RANK="2", MPI_LOCALRANKID="0", MPI_LOCALNRANKS="2", COORDINATOR_ADDRESS="a:1")
JOB = dict(JOB_COMPLETION_INDEX="2", HOSTNAME="moex-2", NUM_PROCESSES="4", JOB_SUBDOMAIN="pods")
JOBSET = dict(JOB_COMPLETION_INDEX="1", JOBSET_NAME="moex", REPLICATED_JOB_NAME="worker", NUM_PROCESSES="6")


def without(environ, *names):
    return {name: value for name, value in environ.items() if name not in names}


@pytest.mark.parametrize(
    "environ, want",
    [
        ({}, ALONE),
        (dict(HOME="/root"), ALONE),
        (PLAIN, Start("environment", "10.0.0.1:1234", 4, 3)),
        (PLAIN | dict(NUM_PROCESSES="1", PROCESS_ID="0"), Start("environment", "10.0.0.1:1234", 1, 0)),
        (OPEN_MPI, Start("Open MPI", "10.96.0.1:62624", 8, 5, 1, 4)),
        (OPEN_MPI | HNP_IPV6, Start("Open MPI", "[fe80::b9b]:61441", 8, 5, 1, 4)),
        (OPEN_MPI | dict(COORDINATOR_ADDRESS="a:1"), Start("Open MPI", "a:1", 8, 5, 1, 4)),
        (SLURM, Start("SLURM", "node007:61443", 16, 9, 1, 4)),
        (SLURM | dict(SLURM_STEP_NUM_TASKS="16"), Start("SLURM", "node007:61443", 16, 9, 1, 4)),
        (SLURM | dict(SLURM_NODEID="4", JAX_COORDINATOR_PORT="77"), Start("SLURM", "node007:77", 16, 9, 1, 2)),
        (OPEN_MPI | SLURM, Start("Open MPI", "10.96.0.1:62624", 8, 5, 1, 4)),
        # srun --mpi=pmi2 repeats its numbers; mpiexec inside a job has daemons started by srun.
        (SLURM | dict(PMI_SIZE="16", PMI_RANK="9"), Start("SLURM", "node007:61443", 16, 9, 1, 4)),
        (SLURM | MPICH, Start("MPICH", "a:1", 4, 2, 0, 2)),
        (JOB, Start("Kubernetes", "moex-0.pods:55527", 4, 2)),
        (JOB | dict(HOSTNAME="the-node", COORDINATOR_ADDRESS="a:1"), Start("Kubernetes", "a:1", 4, 2)),
        (JOBSET, Start("Kubernetes", "moex-worker-0-0.moex:55527", 6, 1)),
        (JOBSET | dict(REPLICATED_JOB_REPLICAS="2", JOB_INDEX="1"), Start("Kubernetes", "moex-worker-0-0.moex:55527", 6, 4)),
        # Where a launcher was recognised, plain variables may repeat it; its local numbers stay.
        (SLURM | PLAIN | dict(NUM_PROCESSES="16", PROCESS_ID="9"), Start("environment", "10.0.0.1:1234", 16, 9, 1, 4)),
        # One task under a launcher (a notebook in a SLURM allocation) is a process alone.
        (SLURM | dict(SLURM_NTASKS="1", SLURM_PROCID="0"), ALONE),
        (dict(SLURM_NTASKS="1", SLURM_PROCID="0"), ALONE),
        (dict(SLURM_NTASKS="4", NUM_PROCESSES="1"), ALONE),
        (dict(JOB_COMPLETION_INDEX="0", NUM_PROCESSES="1"), ALONE),
    ],
)  # fmt: skip
def test_launchers(environ, want):
    assert detect(environ) == want


@pytest.mark.parametrize("missing", PLAIN)
def test_incomplete_plain_variables_are_named(missing):
    with pytest.raises(ValueError, match=rf"set but \['{missing}'\] missing"):
        detect(without(PLAIN, missing))


@pytest.mark.parametrize(
    "environ, message",
    [
        (PLAIN | dict(PROCESS_ID="4"), "environment: process 4 of 4 processes: the numbers run from 0 to 3"),
        (PLAIN | dict(PROCESS_ID="-1"), "process -1 of 4"),
        (PLAIN | dict(NUM_PROCESSES="four"), "NUM_PROCESSES='four' must be a whole number"),
        (PLAIN | dict(COORDINATOR_ADDRESS="host0"), "COORDINATOR_ADDRESS='host0' must be HOST:PORT"),
        (SLURM | dict(SLURM_PROCID="16"), "SLURM: process 16 of 16 processes"),
        (SLURM | dict(NUM_PROCESSES="4"), "NUM_PROCESSES=4, but SLURM started 16 .SLURM_NTASKS.: set them alike"),
        (SLURM | PLAIN, "NUM_PROCESSES=4, but SLURM started 16"),
        (SLURM | dict(NUM_PROCESSES="1"), "NUM_PROCESSES=1, but SLURM started 16"),
        (SLURM | dict(SLURM_STEP_TASKS_PER_NODE="4x3"), "SLURM_STEP_TASKS_PER_NODE='4x3'"),
        (dict(SLURM_NTASKS="4"), "SLURM_NTASKS=4, but srun hasn't started this process .*start it with srun"),
        (SLURM | dict(SLURM_STEP_NUM_TASKS="1"), "SLURM_NTASKS=16, but srun hasn't started .*SLURM_STEP_NUM_TASKS='1'"),
        (dict(SLURM_NTASKS="4", SLURM_PROCID="0"), "set NUM_PROCESSES=1 to train with this process alone"),
        (OPEN_MPI | dict(OMPI_COMM_WORLD_RANK="x"), "OMPI_COMM_WORLD_RANK='x'"),
        (without(OPEN_MPI, "OMPI_MCA_orte_hnp_uri"), "Open MPI 5.*; set COORDINATOR_ADDRESS=HOST:PORT on all 8 processes"),
        (without(MPICH, "COORDINATOR_ADDRESS"), "MPICH: .*set COORDINATOR_ADDRESS"),
        (without(JOB, "NUM_PROCESSES"), "Kubernetes: .*set NUM_PROCESSES to the number of pods"),
        (without(JOB, "JOB_SUBDOMAIN"), "JOB_SUBDOMAIN='' and HOSTNAME='moex-2'; set the first two"),
        (JOB | dict(HOSTNAME="the-node"), "HOSTNAME='the-node'"),
        (JOBSET | dict(REPLICATED_JOB_REPLICAS="2"), "REPLICATED_JOB_REPLICAS=2, but JOB_INDEX isn't set"),
        (JOBSET | dict(REPLICATED_JOB_REPLICAS="4", JOB_INDEX="0"), "NUM_PROCESSES=6 doesn't divide by"),
    ],
)  # fmt: skip
def test_wrong_variables_are_named(environ, message):
    with pytest.raises(ValueError, match=message):
        detect(environ)


@pytest.mark.parametrize(
    "nodes, host",
    [("node001", "node001"), ("a,b[1-2]", "a"), ("n[001-015],m", "n001"), ("n[001,07-15]", "n001"), ("n[2-3]-ib,x", "n2-ib")],
)  # fmt: skip
def test_first_host_of_a_node_list(nodes, host):
    assert first_host(nodes) == host


ALL = None


@pytest.mark.parametrize(
    "rank, size, num_visible, environ, want",
    [
        (None, None, 8, {}, ALL),  # the launcher doesn't say: plain variables, Kubernetes
        (0, 1, 8, {}, ALL),  # one task for the node
        (3, 8, 0, {}, ALL),  # CPUs
        (3, 8, 8, {}, (3,)),  # every task sees the node's
        (3, 8, 8, dict(CUDA_VISIBLE_DEVICES="0,1,2,3,4,5,6,7"), (3,)),
        (3, 8, 1, {}, (0,)),  # bound by --gpus-per-task=1
        (1, 2, 8, {}, (4, 5, 6, 7)),
        (1, 2, 8, dict(SLURM_GPUS_ON_NODE="8", CUDA_VISIBLE_DEVICES="0,1,2,3,4,5,6,7"), (4, 5, 6, 7)),
        (1, 2, 4, dict(SLURM_GPUS_ON_NODE="8", CUDA_VISIBLE_DEVICES="0,1,2,3"), ALL),  # bound to four of eight
        (1, 2, 4, dict(SLURM_GPUS_PER_TASK="h100:4"), ALL),
        (3, 8, 8, dict(SLURM_GPUS_PER_TASK="1", SLURM_GPUS_ON_NODE="8"), (3,)),  # asked for, but not bound
        (3, 8, 8, dict(LOCAL_DEVICE_IDS="1,0"), (1, 0)),
        (None, None, 8, dict(JAX_LOCAL_DEVICE_IDS="7"), (7,)),
    ],
)
def test_local_devices(rank, size, num_visible, environ, want):
    assert local_device_ids(Start("SLURM", "a:1", 16, 0, rank, size), num_visible, environ) == want


@pytest.mark.parametrize(
    "size, num_visible, environ, message",
    [
        (8, 4, {}, "8 processes of this host see 4 GPUs.*set LOCAL_DEVICE_IDS on each"),
        (3, 8, {}, "3 processes of this host see 8 GPUs"),
        (2, 4, dict(CUDA_VISIBLE_DEVICES="GPU-a,GPU-b,GPU-c,GPU-d"), "shows 4 GPUs to each of 2 processes"),
        (2, 2, dict(LOCAL_DEVICE_IDS="2"), "LOCAL_DEVICE_IDS='2', but this process sees 2 GPUs: they are 0 ... 1"),
        (2, 2, dict(LOCAL_DEVICE_IDS="0,0"), "must name each GPU once"),
        (2, 2, dict(LOCAL_DEVICE_IDS="GPU-a"), "must be whole numbers"),
    ],
)
def test_local_devices_that_do_not_fit(size, num_visible, environ, message):
    with pytest.raises(ValueError, match=message):
        local_device_ids(Start("Open MPI", "a:1", 16, 0, 0, size), num_visible, environ)


class Driver:
    """Stands for libcuda with `count` GPUs; each call writes through the pointers it is given and returns an error code."""

    def __init__(self, count: int, broken: str = ""):
        self.count, self.broken = count, broken

    def cuInit(self, flags):
        return int(self.broken == "init")

    def cuDeviceGetCount(self, count):
        count._obj.value = self.count
        return 0

    def cuDeviceGet(self, device, number):
        device._obj.value = 100 + number
        return 0

    def cuDeviceGetUuid_v2(self, uuid, device):
        ctypes.memset(uuid, device.value - 100, 16)
        return int(self.broken == "uuid")


def test_the_driver_names_the_visible_gpus(tmp_path):
    assert cuda_uuids(lambda name: Driver(2)) == ("00" * 16, "01" * 16)
    assert cuda_uuids(lambda name: Driver(0)) == cuda_uuids(lambda name: Driver(2, "init")) == ()
    assert cuda_uuids(lambda name: Driver(2, "uuid")) == cuda_uuids(lambda name: object()) == ()
    assert visible_gpus(dict(JAX_PLATFORMS="cpu")) == ()
    for folder in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / folder).mkdir()
    assert (num_installed(tmp_path), num_installed(tmp_path / "none")) == (2, 0)


@pytest.mark.needs_gpu
def test_the_driver_and_jax_count_the_same_gpus(devices):
    assert len(visible_gpus()) == len(devices)


@pytest.mark.parametrize("script", ["slurm.sbatch", "mpirun.sh"])
def test_launch_scripts_parse(script):
    done = subprocess.run(["bash", "-n", str(LAUNCH / script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_jobset_manifest_gives_what_is_recognised():
    manifest = yaml.safe_load((LAUNCH / "jobset.yaml").read_text())
    (replicated,) = manifest["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    labels = {"jobset-name": manifest["metadata"]["name"], "replicatedjob-name": replicated["name"]}
    environ = {"JOB_COMPLETION_INDEX": "3", "HOSTNAME": "moex-worker-0-3"}
    for variable in job["template"]["spec"]["containers"][0]["env"]:
        if "value" in variable:
            environ[variable["name"]] = variable["value"]
        else:
            path = variable["valueFrom"]["fieldRef"]["fieldPath"]
            environ[variable["name"]] = labels[
                path.removeprefix("metadata.labels['jobset.sigs.k8s.io/").removesuffix("']")
            ]
    assert replicated["replicas"] == 1 and job["completions"] == job["parallelism"]
    assert detect(environ) == Start("Kubernetes", "moex-worker-0-0.moex:55527", job["completions"], 3)
