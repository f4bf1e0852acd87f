"""`Replica`: one process that computes, as the server sees it."""

import asyncio
import itertools
import logging
import signal
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from typing import Final

from zinfer.errors import ConfigError, JobError
from zinfer.requests.completion import CompletionDelta
from zinfer.requests.sampling_params import SamplingParams
from zinfer.scheduling.precedence import FIRST_COME, Precedence
from zinfer.serve.errors import Lost, ReplicaGone, RequestFailed
from zinfer.serve.inbox import Inbox
from zinfer.serve.known_prefixes import KnownPrefixes
from zinfer.serve.messages import (
    Cancel,
    Close,
    Connection,
    Deltas,
    Embed,
    Embedded,
    Failed,
    FromEngine,
    Load,
    Ready,
    Refused,
    Submit,
    Unusable,
)
from zinfer.serve.replica_process import ReplicaProcess
from zinfer.serve.tasks import beside

_CLOSE_S: Final = 30.0
_FIRST_PAUSE_S: Final = 1.0  # doubled until the process answers a request
_LONGEST_PAUSE_S: Final = 60.0
_MOST_SILENT_S: Final = 60
"""Of a replica that takes requests; then it hangs. The thread that says each second that it lives neither computes nor
copies, however long a pass takes, and waits for nothing but the interpreter's lock."""
_MOST_SILENT_LOADING_S: Final = 600
"""Of one that loads: to pin the memory of a large model may take minutes, in one call that keeps the lock."""
log = logging.getLogger("zinfer.serve")


class Replica:
    """Starts a process that computes, sends it requests, and starts it again when it ends by itself or hangs.

    Args:
        index: of this replica, from 0.
        process: perhaps started already.

    Attributes:
        ready: what the model takes; None while the process starts.
        load: the process's last counters.
        num_restarts: how often the process was started again.
        outstanding: prompt tokens and most new tokens of the requests under way.
        prefixes: of texts that it has computed, without those in the background.
        num_under_way: sequences of requests under way; ``num_background`` of them give way to others.
    """

    def __init__(self, index: int, process: ReplicaProcess) -> None:
        self.index = index
        self.ready: Ready | None = None
        self.load: Load | None = None
        self.num_restarts = 0
        self.outstanding = self.num_under_way = self.num_background = 0
        self.prefixes = KnownPrefixes(0)
        self._process = process
        self._numbers = itertools.count()
        self._named: dict[int, object] = {}  # requests under way, as their callers name them
        self._inboxes: dict[int, Inbox] = {}
        self._vectors: dict[int, asyncio.Future[bytes]] = {}
        self._connection: Connection | None = None
        self._running: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._was_ready = self._has_answered = False
        self._num_received = 0

    async def start(self) -> None:
        """Start the process, and wait until its model is loaded.

        Raises:
            ConfigError: the model or its settings cannot be used.
            JobError: the process failed or ended.
        """
        first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._running = asyncio.create_task(self._run(first))
        await first

    async def complete(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        precedence: Precedence = FIRST_COME,
        *,
        name: object = None,
    ) -> AsyncGenerator[CompletionDelta, None]:
        """Yield what the ``n`` completions of a prompt get, token by token; leaving it early cancels them.

        Args:
            precedence: those in the background give way to others, and are yielded whole.
            name: of the request, in `Lost`.

        Raises:
            Lost: the process ended or hangs, or the request's pass failed.
            ReplicaGone: the process is not ready.
            RequestFailed: the request cannot be computed.
            ConfigError: the engine refuses the request.
        """
        if self._connection is None or self.ready is None:
            raise ReplicaGone("the model is loading; try again in a while")
        connection, number, tokens = self._connection, next(self._numbers), len(prompt_ids) + params.most_new_tokens
        inbox = self._inboxes[number] = Inbox()
        self._named[number] = name
        self._count(tokens, params.n, precedence.is_background)
        connection.send(Submit(number, prompt_ids, params, precedence))
        if not precedence.is_background:
            self.prefixes.add(prompt_ids)
        num_left = params.n
        try:
            while num_left:
                for delta in await inbox.take():
                    num_left -= delta.completion is not None
                    if delta.completion is not None and not precedence.is_background:
                        self.prefixes.add([*prompt_ids, *delta.completion.token_ids])
                    yield delta
        except (ReplicaGone, RequestFailed, ConfigError):
            num_left = 0
            raise
        finally:
            self._count(-tokens, -params.n, precedence.is_background)
            del self._inboxes[number], self._named[number]
            if num_left:
                connection.send(Cancel(number))

    async def embed(self, token_ids: list[int], *, name: object = None) -> bytes:
        """Return the vector of a row of tokens, as `Embedded`. Arguments and errors are those of `complete`."""
        if self._connection is None or self.ready is None:
            raise ReplicaGone("the model is loading; try again in a while")
        connection, number = self._connection, next(self._numbers)
        found: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._vectors[number] = found
        self._named[number] = name
        self._count(len(token_ids), 1, False)
        connection.send(Embed(number, token_ids))
        try:
            return await found
        finally:
            self._count(-len(token_ids), -1, False)
            del self._vectors[number], self._named[number]
            if found.cancelled():
                connection.send(Cancel(number))

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for pages, without those in the background."""
        running = 0 if self.load is None else self.load.num_running - self.load.num_background
        return max(self.num_under_way - self.num_background - running, 0)

    def _count(self, tokens: int, sequences: int, is_background: bool) -> None:
        self.outstanding += tokens
        self.num_under_way += sequences
        self.num_background += sequences if is_background else 0

    @property
    def is_coming_back(self) -> bool:
        """Whether it is started, or started again."""
        return self._running is not None and not self._running.done() and not self._closing.is_set()

    async def close(self) -> None:
        """End the process; requests under way fail."""
        self._closing.set()
        if self._connection is not None:
            self._connection.send(Close())
        if self._running is not None:
            if self._connection is None:  # it loads
                self._process.send_signal(signal.SIGTERM)
            await asyncio.wait((self._running,), timeout=_CLOSE_S)
            self._running.cancel()
            with suppress(asyncio.CancelledError):
                await self._running

    async def _run(self, first: "asyncio.Future[None]") -> None:
        pause_s = 0.0
        while True:
            try:
                reason = await self._run_once(first)
            except OSError as error:
                reason = JobError(f"replica {self.index} cannot be started: {error}")
            except Exception as error:  # of what its process sent
                log.exception("zinfer: replica %d failed", self.index)
                reason = JobError(f"replica {self.index} failed: {type(error).__name__}: {error}")
            if not first.done():
                first.set_exception(reason)
                return
            if self._closing.is_set():
                return
            self._lose(str(reason), [*self._named])
            pause_s = 0.0 if self._has_answered else pause_s
            pause_s = min(max(2 * pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
            log.warning("zinfer: %s; it is started again in %.0f s", reason, pause_s)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), pause_s)
                return
            self.num_restarts += 1

    async def _run_once(self, first: "asyncio.Future[None]") -> Exception:
        """Run a process until it ends; returns why it did."""
        arrived: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = Connection(reader, writer, FromEngine)
            if not arrived.done():
                arrived.set_result(connection)

        self._was_ready = self._has_answered = False
        process = self._process
        process.socket.unlink(missing_ok=True)
        async with await asyncio.start_unix_server(accept, process.socket):
            process.start()
            ending = asyncio.create_task(process.wait())
            try:
                await asyncio.wait((arrived, ending), return_when=asyncio.FIRST_COMPLETED)
                told: Exception | None = None
                if arrived.done():
                    self._connection = arrived.result()
                    told = await self._read_watched(self._connection, first)
                    self._connection = self.ready = None
                await asyncio.wait((ending,), timeout=_CLOSE_S)
                exit_code = ending.result() if ending.done() else None
                return told or JobError(f"replica {self.index} {_how_ended(exit_code)}")
            finally:
                self._connection = self.ready = self.load = None
                process.send_signal(signal.SIGKILL)
                await ending
                await asyncio.to_thread(process.kill)

    async def _read_watched(self, connection: Connection, first: "asyncio.Future[None]") -> Exception | None:
        hung: list[JobError] = []
        async with beside(self._kill_if_silent(hung)):
            told = await self._read(connection, first)
        return hung[0] if hung else told

    async def _kill_if_silent(self, hung: list[JobError]) -> None:
        """Kill the process, and fail its requests, once nothing has come from it for long; ``hung`` gets the error.

        Seconds in which this process was held up too do not count.
        """
        num_silent, num_before = 0, -1
        while num_silent < (_MOST_SILENT_S if self._was_ready else _MOST_SILENT_LOADING_S):
            await asyncio.sleep(1)
            num_silent = num_silent + 1 if self._num_received == num_before else 0
            num_before = self._num_received
        hung.append(JobError(f"replica {self.index} has said nothing for {num_silent} s and was killed"))
        self.ready = None
        self._lose(str(hung[0]), [*self._named])
        self._process.send_signal(signal.SIGKILL)

    async def _read(self, connection: Connection, first: "asyncio.Future[None]") -> Exception | None:
        """Hand messages to their requests until the connection ends; returns the error that the process told."""
        told: Exception | None = None
        while (message := await connection.receive()) is not None:
            self._num_received += 1
            match message:
                case Deltas(deltas):
                    for number, delta in deltas:
                        self._has_answered |= delta.completion is not None
                        if (inbox := self._inboxes.get(number)) is not None:  # else it was cancelled
                            inbox.put(delta)
                case Embedded(vectors):
                    self._has_answered = True
                    for number, vector in vectors:
                        if (found := self._vectors.get(number)) is not None and not found.done():
                            found.set_result(vector)
                case Refused(number, text, is_invalid):
                    self._fail(number, ConfigError(text) if is_invalid else RequestFailed(text))
                case Failed(numbers, text, is_over):
                    self.ready = None if is_over else self.ready  # it ends in a moment
                    self._lose(text, numbers, *[] if is_over else ["send the request again"])
                case Load():
                    self.load = message
                case Ready():
                    if self.num_restarts:
                        log.warning("zinfer: replica %d takes requests again", self.index)
                    self.ready, self._was_ready = message, True
                    self.prefixes = KnownPrefixes(message.most_tokens)
                    if not first.done():
                        first.set_result(None)
                case Unusable(text, is_usage):
                    told = ConfigError(text) if is_usage else JobError(text)
        await connection.close()
        return told

    def _fail(self, number: int, error: Exception) -> None:
        if (inbox := self._inboxes.get(number)) is not None:
            inbox.put(error)
        elif (found := self._vectors.get(number)) is not None and not found.done():
            found.set_exception(error)

    def _lose(self, reason: str, numbers: Sequence[int], *remedy: str) -> None:
        """Let requests fail together."""
        lost = Lost(reason, [self._named[number] for number in numbers if number in self._named], *remedy)
        for number in numbers:
            self._fail(number, lost)


def _how_ended(exit_code: int | None) -> str:
    if exit_code is None:
        return "has closed its connection"
    if exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"
