"""detect: which launcher started this process, from made-up environments."""

import pytest

from mesh.distributed import Start, detect

PLAIN = dict(COORDINATOR_ADDRESS="10.0.0.1:1234", NUM_PROCESSES="4", PROCESS_ID="3")
OPEN_MPI = dict(OMPI_COMM_WORLD_SIZE="8", OMPI_COMM_WORLD_RANK="5")
SLURM = dict(SLURM_NTASKS="16", SLURM_PROCID="0")


@pytest.mark.parametrize(
    "environ, want",
    [
        ({}, Start("one process", None, 1, 0)),
        (dict(HOME="/root"), Start("one process", None, 1, 0)),
        (PLAIN, Start("environment", "10.0.0.1:1234", 4, 3)),
        (OPEN_MPI, Start("Open MPI", None, 8, 5)),
        (SLURM, Start("SLURM", None, 16, 0)),
        (PLAIN | OPEN_MPI | SLURM, Start("environment", "10.0.0.1:1234", 4, 3)),
        (OPEN_MPI | SLURM, Start("Open MPI", None, 8, 5)),
        # One task under a launcher (a notebook in a SLURM allocation) is a process alone.
        (dict(SLURM_NTASKS="1", SLURM_PROCID="0"), Start("one process", None, 1, 0)),
        (dict(SLURM_NTASKS="4"), Start("one process", None, 1, 0)),
        (PLAIN | dict(NUM_PROCESSES="1", PROCESS_ID="0"), Start("environment", "10.0.0.1:1234", 1, 0)),
    ],
)
def test_launchers(environ, want):
    assert detect(environ) == want


@pytest.mark.parametrize("missing", PLAIN)
def test_incomplete_plain_variables_are_named(missing):
    environ = {name: value for name, value in PLAIN.items() if name != missing}
    with pytest.raises(ValueError, match=rf"set but \['{missing}'\] missing"):
        detect(environ | SLURM)


@pytest.mark.parametrize(
    "environ, message",
    [
        (PLAIN | dict(PROCESS_ID="4"), "environment: process 4 of 4 processes"),
        (PLAIN | dict(PROCESS_ID="-1"), "process -1 of 4"),
        (PLAIN | dict(NUM_PROCESSES="four"), "NUM_PROCESSES='four' must be a whole number"),
        (dict(SLURM_NTASKS="4", SLURM_PROCID="4"), "SLURM: process 4 of 4 processes"),
        (dict(OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="x"), "OMPI_COMM_WORLD_RANK='x'"),
    ],
)
def test_wrong_numbers_are_named(environ, message):
    with pytest.raises(ValueError, match=message):
        detect(environ)
