"""Launchers' variables tell a process who it is among the others."""

import os
import socket
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from commands import start

from zinfer.comm import get_local_rank
from zinfer.errors import ConfigError
from zinfer.ranks.environment import is_several, own_rank, read_environment, spoken_rank

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
    for name in (*VARIABLES, "ZINFER_RANKS_KEY", "SLURMD_NODENAME", "SLURM_JOB_ID", "SLURM_STEP_ID"):
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
        (TORCHRUN | MASTER | {"MASTER_PORT": "295000"}, "MASTER_PORT is 295000, which is no port: .* end with 65535"),
        (TORCHRUN | MASTER | {"MASTER_PORT": "0"}, "MASTER_PORT is 0, which is no port: they begin with 1"),
        (TORCHRUN | MASTER | {"LOCAL_RANK": "-1"}, "LOCAL_RANK is '-1', not a number"),
        (TORCHRUN | MASTER | {"WORLD_SIZE": "9" * 5000}, f"WORLD_SIZE is '{'9' * 40}', not a number"),
        (TORCHRUN | MASTER | {"ZINFER_RANKS_KEY": "abc"}, "ZINFER_RANKS_KEY has 3 characters; give all"),
    ],
)
def test_incomplete_variables_are_named(environment: Callable[..., None], variables: dict[str, str], said: str) -> None:
    environment(**variables)
    with pytest.raises(ConfigError, match=said):
        read_environment()


@pytest.mark.parametrize(
    ("variables", "rank"),
    [({}, 0), ({"WORLD_SIZE": "2"}, None), ({"WORLD_SIZE": "2", "RANK": "abc"}, None), (TORCHRUN | MASTER, 4)],
)
def test_messages_of_a_rank_need_no_variables(
    environment: Callable[..., None], variables: dict[str, str], rank: int | None
) -> None:
    environment(**variables)
    assert spoken_rank() == rank


def test_a_bad_local_rank_is_named_to_scripts(environment: Callable[..., None]) -> None:
    assert get_local_rank() == 0
    environment(LOCAL_RANK="first")
    with pytest.raises(ConfigError, match="LOCAL_RANK is 'first', not a number"):
        get_local_rank()


def test_ranks_without_a_launcher_share_the_users_key(environment: Callable[..., None], tmp_path: Path) -> None:
    environment(**TORCHRUN, **MASTER, XDG_CACHE_HOME=f"{tmp_path}")
    with ThreadPoolExecutor(8) as threads:
        keys = {own.key for own in threads.map(lambda _: read_environment(), range(32))}
    [key] = keys
    file = tmp_path / "zinfer" / "ranks.key"
    assert [each.name for each in file.parent.iterdir()] == [file.name]
    assert (len(key) >= 32, stat.S_IMODE(file.stat().st_mode)) == (True, 0o600)
    assert key not in repr(read_environment())
    file.chmod(0o640)
    with pytest.raises(ConfigError, match=r"ranks.key must belong to you, and be readable by nobody else"):
        read_environment()
    file.unlink()
    assert read_environment().key != key
    if os.geteuid():
        file.unlink()
        file.parent.chmod(0o500)
        with pytest.raises(ConfigError, match=r"Permission denied.; set ZINFER_RANKS_KEY to one secret for all"):
            read_environment()
    environment(XDG_CACHE_HOME=f"{file}")
    with pytest.raises(ConfigError, match=r"Not a directory.; set ZINFER_RANKS_KEY to one secret for all"):
        read_environment()
    environment(ZINFER_RANKS_KEY="k" * 16)
    assert read_environment().key == "k" * 16


@pytest.mark.sampled(3)
@pytest.mark.parametrize("command", ["run", "bench", "probe"])
@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": ""}, "RANK is '', not a number of processes, a rank or a port"),
        ({"RANK": "abc"}, "RANK is 'abc', not a number of processes, a rank or a port"),
        ({"RANK": "1", "MASTER_ADDR": "127.0.0.1"}, "MASTER_PORT is not set, which 2 processes need"),
    ],
)
def test_commands_say_one_sentence_of_bad_variables(
    tmp_path: Path, command: str, variables: dict[str, str], said: str
) -> None:
    model = str(Path(__file__).resolve().parent.parent / "examples" / "demo" / "model")
    files = ["--model", model, "--input", "in.jsonl", "--output", "out.jsonl"] if command == "run" else []
    files = ["--model", model] if command == "bench" else files
    process = start([command, *files], tmp_path, warm=True, variables={"WORLD_SIZE": "2", **variables})
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert "Traceback" not in err
    assert " ".join(err.split()).startswith(f"zinfer: error: {said}"), err
