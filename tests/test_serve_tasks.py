"""What runs beside the requests of a server does not end unseen: the process ends, or begins it again."""

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import psutil
import pytest
from test_serve_embeddings import encoder

from zinfer.errors import JobError
from zinfer.jobs.request import Pooling
from zinfer.serve.embedding_engine import EmbeddingEngine
from zinfer.serve.messages import Embed, Embedded
from zinfer.serve.replica import Replica
from zinfer.serve.replica_process import ReplicaProcess
from zinfer.serve.tasks import beside, lasting

__all__ = ["encoder"]  # fixture

END_S: Final = 60
GARBAGE: Final = """
import socket, sys, time
with socket.socket(socket.AF_UNIX) as end:
    end.connect(sys.argv[2])
    end.sendall((5).to_bytes(8, "little") + b"?????")
    time.sleep(600)
"""
UNABLE: Final = """
import socket, sys
from msgspec import msgpack
from zinfer.requests.length_limits import LengthLimits
from zinfer.serve.messages import Ready
data = msgpack.encode(Ready(9, LengthLimits(), 9))
with socket.socket(socket.AF_UNIX) as end:
    end.connect(sys.argv[2])
    end.sendall(len(data).to_bytes(8, "little") + data)
"""
"""Is ready, and ends before it answers anything."""
FAMILY: Final = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, file=open(sys.argv[1], "w"), flush=True)
"""
"""Starts a process with a session of its own, as ranks have, and ends without it."""


def test_a_task_that_fails_ends_its_block() -> None:
    async def fail() -> None:
        raise OSError("gone")

    async def block() -> None:
        async with beside(fail()):
            await asyncio.Event().wait()

    with pytest.raises(OSError, match="gone"):
        asyncio.run(asyncio.wait_for(block(), END_S))


def test_a_task_that_is_to_last_begins_again(caplog: pytest.LogCaptureFixture) -> None:
    errors: list[Exception] = [OSError("gone")]

    async def work() -> None:
        if errors:
            raise errors.pop()

    asyncio.run(lasting("the work", work))
    assert "zinfer: the work failed, and begins again" in caplog.text
    assert "OSError: gone" in caplog.text


def test_embeddings_that_cannot_be_sent_end_the_process(encoder: Path) -> None:
    """As whatever fails between two passes; else all that come later would wait for ever."""

    def send(message: object) -> None:
        if isinstance(message, Embedded):
            raise ValueError("no message")

    async def serve() -> None:
        connection: Any = SimpleNamespace(send=send)
        messages: Any = asyncio.Queue()
        messages.put_nowait(Embed(0, [5, 6]))
        async with EmbeddingEngine(encoder, {}, {"device": "cpu"}, Pooling.MEAN) as engine:
            await asyncio.wait_for(engine.serve(connection, messages), END_S)

    with pytest.raises(ValueError, match="no message"):
        asyncio.run(serve())


def test_a_replica_that_sends_garbage_has_failed(tmp_path: Path) -> None:
    async def start() -> None:
        replica = Replica(0, ReplicaProcess([sys.executable, "-c", GARBAGE], tmp_path / "socket"))
        await asyncio.wait_for(replica.start(), END_S)

    with pytest.raises(JobError, match="replica 0 failed: ValidationError"):
        asyncio.run(start())


def test_no_process_outlives_its_replica(tmp_path: Path) -> None:
    async def start() -> None:
        command = [sys.executable, "-c", FAMILY, str(tmp_path / "child")]
        await Replica(0, ReplicaProcess(command, tmp_path / "socket")).start()

    with pytest.raises(JobError, match="replica 0 ended with exit code 0"):
        asyncio.run(start())
    assert not psutil.pid_exists(int((tmp_path / "child").read_text()))


def test_a_replica_that_answers_nothing_is_started_again_after_longer_pauses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def start() -> None:
        replica = Replica(0, ReplicaProcess([sys.executable, "-c", UNABLE], tmp_path / "socket"))
        await replica.start()
        async with asyncio.timeout(END_S):
            while "it is started again in 2 s" not in caplog.text:
                await asyncio.sleep(0.05)
        await replica.close()

    asyncio.run(start())
    assert "it is started again in 1 s" in caplog.text
