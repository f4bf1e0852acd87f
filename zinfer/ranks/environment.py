"""What the environment says of this process among the others: torchrun's, SLURM's, Open MPI's and MPICH's variables."""

import os
import secrets
import socket
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from zlib import crc32

from zinfer.errors import ConfigError

_SIZE: Final = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_RANK: Final = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_LOCAL_RANK: Final = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
_NUM_LOCAL: Final = ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_TORCHRUN_JOB: Final = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
_OTHER_JOB: Final = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE")
_NUM_PORTS: Final = 8
_FIRST_PORT: Final = 20000
_LAST_PORT: Final = 32000  # below those that the kernel hands out
_MOST_PORT: Final = 65535
_MOST_DIGITS: Final = 9
KEY: Final = "ZINFER_RANKS_KEY"
"""Names the secret that the ranks of a job have in common; launchers of zinfer draw one for each job."""
_KEY_FILE: Final = "ranks.key"
_KEY_BYTES: Final = 32
_LEAST_KEY: Final = 16  # characters


@dataclass(frozen=True)
class RankEnvironment:
    """This process among those that were started together.

    Attributes:
        rank: its number, from 0.
        size: the number of processes.
        local_rank: its number on this host; None: not stated.
        num_local: the processes on this host; None: not stated.
        host: the name of this host.
        address: of the host of rank 0.
        ports: of that host; rank 0 listens on the first that is free. 0: any.
        job: a name that the processes share.
        key: the secret that they share, which proves that a connection is one of theirs.
    """

    rank: int
    size: int
    local_rank: int | None
    num_local: int | None
    host: str
    address: str
    ports: tuple[int, ...]
    job: str
    key: str = field(repr=False)


def is_several() -> bool:
    """Whether the environment says that this process is one of several."""
    return num_started() > 1


def num_started() -> int:
    """Return the number of processes that were started together; 1 if this one runs alone.

    SLURM and MPI set their variables for a single process too, so theirs count only together with `MASTER_ADDR`.
    """
    return _number(_SIZE if "MASTER_ADDR" in os.environ else _SIZE[:1]) or 1


def num_in_step() -> int:
    """Return the number of processes that SLURM or MPI started together, also without `MASTER_ADDR`; 1 if none did."""
    return _number(_SIZE) or 1


def own_rank() -> int:
    """Return the rank of this process; 0 if it runs alone."""
    return _needed(_RANK) if is_several() else 0


def spoken_rank() -> int | None:
    """Return the rank of this process for messages; None if the variables are such that no rank is known."""
    try:
        return own_rank()
    except ConfigError:
        return None


def own_local_rank() -> int:
    """Return the number of this process on its host, as `LOCAL_RANK` states it; 0 if it was started alone."""
    return _number(_LOCAL_RANK[:1]) or 0


def host_name() -> str:
    """Return the name of this host: SLURM's for it, if any, else its own."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def read_environment() -> RankEnvironment:
    """Return what the variables say of this process, which is one of several.

    Raises:
        ConfigError: variables are missing, or are not numbers in their range.
    """
    size, rank = _needed(_SIZE), _needed(_RANK)
    if rank >= size:
        raise ConfigError(f"rank {rank} is not one of {size} ranks, which count from 0; start them with torchrun")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise ConfigError(f"{name} is not set, which {size} processes need to find each other; start with torchrun")
    address, port = os.environ["MASTER_ADDR"], _needed(("MASTER_PORT",))
    if not 0 < port <= _MOST_PORT:
        raise ConfigError(f"MASTER_PORT is {port}, which is no port: they begin with 1 and end with {_MOST_PORT}")
    names = _TORCHRUN_JOB if "RANK" in os.environ else _OTHER_JOB
    job = "/".join([str(size), *(os.environ.get(name, "") for name in names)])
    ports: tuple[int, ...] = (port,)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # the launcher itself listens on that port
        seeds = (f"{address}:{port}/{job}/{number}" for number in range(_NUM_PORTS))
        ports = tuple(_FIRST_PORT + crc32(seed.encode()) % (_LAST_PORT - _FIRST_PORT) for seed in seeds)
    return RankEnvironment(
        rank, size, _number(_LOCAL_RANK), _number(_NUM_LOCAL), host_name(), address, ports, job, _read_key()
    )


def draw_key() -> str:
    """Return a new secret for the ranks of one job."""
    return secrets.token_hex(_KEY_BYTES)


def _read_key() -> str:
    """Return the secret of the launch, or else the user's own, which the first rank writes to a file.

    Raises:
        ConfigError: it is too short, or others may read the file, or the file cannot be written.
    """
    stated = os.environ.get(KEY)
    if stated is not None:
        if len(stated) < _LEAST_KEY:
            raise ConfigError(f"{KEY} has {len(stated)} characters; give all ranks one secret of {_LEAST_KEY} or more")
        return stated
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        file = (cache if cache.is_absolute() else Path.home() / ".cache") / "zinfer" / _KEY_FILE
        return _key_in(file)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"the ranks' key cannot be kept in ~/.cache/zinfer/{_KEY_FILE} ({why}); set {KEY} to one secret for all "
            "ranks"
        ) from error


def _key_in(file: Path) -> str:
    """Return the key of a file, which is made if it is not there: of ranks that start together one makes it."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        made = file.with_name(f".{_KEY_FILE}.{secrets.token_hex(8)}")
        made.touch(0o600, exist_ok=False)
        try:
            made.write_text(draw_key())
            with suppress(FileExistsError):
                os.link(made, file)
        finally:
            made.unlink()
    with file.open() as opened:
        status = os.fstat(opened.fileno())
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise ConfigError(f"{file} must belong to you, and be readable by nobody else: remove it, or set {KEY}")
        found = opened.read().strip()
    if len(found) < _LEAST_KEY:
        raise ConfigError(f"{file} is damaged; remove it, and the next job makes another, or set {KEY}")
    return found


def _number(names: Sequence[str]) -> int | None:
    for name in names:
        if (text := os.environ.get(name)) is not None:
            if not text.isdecimal() or len(text) > _MOST_DIGITS:
                raise ConfigError(f"{name} is {text[:40]!r}, not a number of processes, a rank or a port")
            return int(text)
    return None


def _needed(names: Sequence[str]) -> int:
    if (found := _number(names)) is None:
        raise ConfigError(f"{' or '.join(names)} is not set; start the processes with torchrun")
    return found
