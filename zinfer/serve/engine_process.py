"""The process of one replica: it loads the model and completes the requests that the server's process sends."""

import asyncio
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, Protocol, Self

from zinfer.batching.async_llm import AsyncLLM
from zinfer.config import resolve_settings
from zinfer.errors import CheckpointError, ConfigError, PlanError, SilentRankError
from zinfer.jobs.rehearsal import Rehearsal
from zinfer.jobs.request import Pooling
from zinfer.nvme.pool import end_process, start_thread
from zinfer.planning.latency import LOADS, describe_latency, usual_lengths
from zinfer.probe.limits import choose_device
from zinfer.ranks.environment import own_rank
from zinfer.ranks.group import join_group
from zinfer.ranks.open_models import fail_models, failing_together
from zinfer.ranks.rank_watch import watch_job
from zinfer.scheduling.page_allocator import max_tokens_alone
from zinfer.serve.embedding_engine import EmbeddingEngine
from zinfer.serve.engine_report import EngineReport
from zinfer.serve.engine_requests import EngineRequests
from zinfer.serve.first_passes import compute_first_passes
from zinfer.serve.messages import (
    Alive,
    Cancel,
    Connection,
    Ready,
    Submit,
    ToEngine,
    Unusable,
)
from zinfer.serve.tasks import beside

_LOAD_EVERY_S: Final = 1.0
_ALIVE_EVERY_S: Final = 1.0
_EXIT_ORPHANED: Final = 1
_TOLD_S: Final = 3.0  # until requests have failed and their callers know why


def compute(
    socket_path: str, model: str, config: Any, stated: Mapping[str, Any], end: Callable[[SilentRankError], object]
) -> None:
    """Load a model and compute until the server ends; ranks that follow another compute along until it ends.

    Args:
        stated: keys beside the configuration, as keyword arguments of `LLM`.
        end: ends this process, from another thread, once another rank does not answer or stands still in a pass.

    Raises:
        ConfigError, CheckpointError, PlanError: as `LLM`.
        RuntimeError: the model's passes have ended by a failure.
        RankError: another rank failed.
    """

    def load() -> AsyncLLM:
        return AsyncLLM(model, config, beside_load=Rehearsal(model, config, stated).beside_load, **stated)

    def load_warm() -> CompletionEngine:
        loaded = load()
        compute_first_passes(loaded.llm)
        return CompletionEngine(loaded)

    with _failing_with_silent_ranks(config, stated, end):
        if own_rank() > 0:
            with load().llm:
                return
        asyncio.run(run_engine(socket_path, load_warm))


@contextmanager
def _failing_with_silent_ranks(
    config: Any, stated: Mapping[str, Any], end: Callable[[SilentRankError], object]
) -> Iterator[None]:
    """Let the model and its requests fail once a rank is silent; then ``end`` what waits for that rank for good."""
    group = join_group(choose_device(resolve_settings(config, stated, swaps=True)).type)
    if group is None:
        yield
        return

    ending: list[threading.Thread] = []

    def end_later(failure: SilentRankError) -> None:
        time.sleep(_TOLD_S)
        end(failure)

    def fail(failure: SilentRankError) -> None:
        # First: the main thread may be done as soon as the model has failed.
        ending.append(start_thread("zinfer-end", partial(end_later, failure), end_process, daemon=False))
        fail_models(failure)

    with failing_together():
        watch = watch_job(group, fail)
        try:
            yield
        finally:
            watch.end()
            for each in ending:
                each.join()


def embed(socket_path: str, model: str, config: Any, stated: Mapping[str, Any], pooling: Pooling) -> None:
    """Load a model, and embed until the server ends; raises as `EmbeddingEngine`."""
    asyncio.run(run_engine(socket_path, lambda: EmbeddingEngine(model, config, stated, pooling)))


class Engine(Protocol):
    """A loaded model that serves one connection."""

    async def __aenter__(self) -> Any: ...
    async def __aexit__(self, *_: Any) -> Any: ...
    async def serve(self, connection: Connection, messages: "asyncio.Queue[ToEngine | None]") -> None:
        """Do what messages ask for until one asks for the end, or None: the other end has gone."""


async def run_engine(socket_path: str, load: Callable[[], Engine]) -> None:
    """Load a model, and serve it over a Unix socket until the other end closes the connection or asks for the end.

    Args:
        load: makes the engine, on another thread. An error that it raises is told to the server, and raised.
    """
    reader, writer = await asyncio.open_unix_connection(socket_path)
    connection = Connection(reader, writer, ToEngine)
    messages: asyncio.Queue[ToEngine | None] = asyncio.Queue()
    try:
        async with (
            beside(_receive(connection, messages), tell_life(connection)) as (receiving, _),
            await _load(connection, load, receiving) as engine,
        ):
            freeze_loaded()
            await engine.serve(connection, messages)
    finally:
        await connection.close()


def freeze_loaded() -> None:
    """Free what is garbage now, and never look again at the objects that are left.

    Commands do so after their imports (`zinfer.cli.ending.importing`); a model on a GPU imports compilers later. To
    look through all modules takes a third of a second, in which nothing is answered or launched.
    """
    gc.collect()
    gc.freeze()


async def _receive(connection: Connection, messages: "asyncio.Queue[ToEngine | None]") -> None:
    while (message := await connection.receive()) is not None:
        messages.put_nowait(message)
    messages.put_nowait(None)


async def tell_life(connection: Connection) -> None:
    """Say each second that this process runs, until cancelled."""
    while True:
        connection.send(Alive())
        await asyncio.sleep(_ALIVE_EVERY_S)


async def _load(connection: Connection, load: Callable[[], Engine], receiving: "asyncio.Task[None]") -> Engine:
    loading = asyncio.create_task(asyncio.to_thread(load))
    await asyncio.wait((loading, receiving), return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():  # nobody waits for the model any more
        os._exit(_EXIT_ORPHANED)
    try:
        return loading.result()
    except Exception as error:
        is_usage = isinstance(error, ConfigError | CheckpointError | PlanError)
        connection.send(Unusable(str(error) or type(error).__name__, is_usage))
        raise


class CompletionEngine:
    """Completes prompts."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    async def __aenter__(self) -> Self:
        await self._llm.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._llm.__aexit__(*error)

    async def serve(self, connection: Connection, messages: "asyncio.Queue[ToEngine | None]") -> None:
        """As `Engine.serve`."""
        llm, requests = self._llm.llm, EngineRequests(self._llm.llm, connection)
        budget = llm.batching
        lengths = usual_lengths(llm.limits.most_tokens)
        latency = describe_latency(llm.predict_latency(*lengths, LOADS), *lengths)
        most_tokens = max_tokens_alone(budget.num_pages, budget.page_size)
        connection.send(Ready(llm.vocab_size, llm.limits, most_tokens, latency, row_settings=llm.row_settings))
        try:
            async with beside(self._report(connection)):
                while isinstance(message := await messages.get(), Submit | Cancel):
                    if isinstance(message, Submit):
                        requests.submit(message)
                    else:
                        requests.cancel(message.number)
        finally:
            await requests.close()

    async def _report(self, connection: Connection) -> None:
        """Send the counters until the model is closed; raises what closed it."""
        report = await asyncio.to_thread(EngineReport, self._llm.llm)
        while True:
            connection.send(await asyncio.to_thread(report.make))
            await asyncio.sleep(_LOAD_EVERY_S)
