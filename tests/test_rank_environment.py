"""Launchers' variables tell a process who it is among the others."""

import socket
from collections.abc import Callable

import pytest

from zinfer.errors import ConfigError
from zinfer.ranks.environment import is_several, own_rank, read_environment

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MASTER = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
SLURM = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "4"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_SIZE": "4", "PMI_RANK": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
TORCHRUN = {"WORLD_SIZE": "6", "RANK": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "run"}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    for name in (*VARIABLES, "SLURMD_NODENAME", "SLURM_JOB_ID", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)

    def give(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return give


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        (SLURM, (5, 8, 1, 4)),
        (OPEN_MPI, (3, 4, 1, 2)),
        (MPICH, (2, 4, 0, 2)),
        (TORCHRUN, (4, 6, 0, 2)),
        ({**SLURM, **TORCHRUN}, (4, 6, 0, 2)),
    ],
)
def test_launchers_tell_who_a_process_is(
    environment: Callable[..., None], variables: dict[str, str], found: tuple[int, int, int, int]
) -> None:
    environment(**variables)
    assert is_several() == ("RANK" in variables), "a process of its own in an allocation"
    environment(**MASTER)
    assert is_several()
    own = read_environment()
    assert (own.rank, own.size, own.local_rank, own.num_local) == found
    assert own_rank() == own.rank
    assert (own.address, own.ports, own.host) == ("node0", (29500,), socket.gethostname())


def test_slurm_names_hosts_and_torchruns_own_port_is_left_to_it(environment: Callable[..., None]) -> None:
    environment(**TORCHRUN, **MASTER, SLURMD_NODENAME="node7", SLURM_STEP_ID="3", TORCHELASTIC_USE_AGENT_STORE="True")
    own = read_environment()
    assert own.host == "node7"
    assert len(set(own.ports)) > 1
    assert all(20000 <= port < 32000 for port in own.ports)
    environment(SLURMD_NODENAME="node8", SLURM_STEP_ID="4", RANK="5")
    other = read_environment()
    assert (other.job, other.ports) == (own.job, own.ports), "steps of their own start torchrun on each host"
    environment(MASTER_PORT="29501")
    assert not set(read_environment().ports) & set(own.ports)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"WORLD_SIZE": "2", **MASTER}, "RANK or SLURM_PROCID or .* is not set; start the processes with torchrun"),
        ({"WORLD_SIZE": "2", "RANK": "one", **MASTER}, "RANK is 'one', not a number"),
        ({"WORLD_SIZE": "2", "RANK": "2", **MASTER}, "rank 2 is not one of 2 ranks"),
        ({"WORLD_SIZE": "2", "RANK": "1", "MASTER_PORT": "1"}, "MASTER_ADDR is not set, which 2 processes need"),
        ({"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "node0"}, "MASTER_PORT is not set, which 2 processes need"),
        (TORCHRUN | MASTER | {"MASTER_PORT": "295000"}, "MASTER_PORT is 295000, which is no port: they end with 65535"),
    ],
)
def test_incomplete_variables_are_named(environment: Callable[..., None], variables: dict[str, str], said: str) -> None:
    environment(**variables)
    with pytest.raises(ConfigError, match=said):
        read_environment()
