"""`local_client`: a client of a server that is started for a model's folder, and ends with the chat."""

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

from zinfer.chat.client import ChatClient
from zinfer.errors import ConfigError, JobError
from zinfer.nvme.temporary_folder import temporary_folder

_LOOK_EVERY_S: Final = 0.1
_CLOSE_S: Final = 60.0
_EXIT_UNUSABLE: Final = 2
_PR_SET_PDEATHSIG: Final = 1


@asynccontextmanager
async def local_client(words: Sequence[str], options: Mapping[str, Any]) -> AsyncGenerator[ChatClient, None]:
    """Start a server, wait until its model is loaded, yield a client of it, and end it.

    Args:
        words: options of `zinfer serve`: the model, and how it is computed.
        options: as for `ChatClient`.

    Raises:
        ConfigError: the model or its settings cannot be used.
        JobError: the server failed.
    """
    with temporary_folder("chat") as folder:
        path, log = folder / "socket", folder / "log"
        command = [sys.executable, "-m", "zinfer", "serve", "--uds", str(path), "--drain", "0", *words]
        with log.open("wb") as said:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env={name: value for name, value in os.environ.items() if name != "ZINFER_API_KEY"},
                start_new_session=True,  # Ctrl-C is for the chat
                preexec_fn=_end_with_parent,
            )
        try:
            async with ChatClient("http://localhost", options=options, uds=path) as client:
                await _wait_until_ready(process, client, log)
                yield client
        finally:
            with suppress(ProcessLookupError):
                process.terminate()
            await _ended(process)


async def _wait_until_ready(process: asyncio.subprocess.Process, client: ChatClient, log: Path) -> None:
    while process.returncode is None:
        if await client.is_ready():
            return
        await asyncio.sleep(_LOOK_EVERY_S)
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["it printed nothing"]
    reason = lines[-1].removeprefix("zinfer: ").removeprefix("error: ")
    if process.returncode == _EXIT_UNUSABLE:
        raise ConfigError(reason)
    raise JobError(f"the model's server ended with exit code {process.returncode}: {reason}")


async def _ended(process: asyncio.subprocess.Process) -> None:
    try:
        await asyncio.wait_for(process.wait(), _CLOSE_S)
    except TimeoutError:
        process.kill()
        await process.wait()


def _end_with_parent() -> None:
    """Ask the system to end this process with its parent, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
