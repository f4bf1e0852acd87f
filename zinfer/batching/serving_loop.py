"""The thread that runs a model's requests: it owns the batcher, the scheduler, the pages and the device's stream.

[Note: one owner] Other threads only put commands into the loop's queue and read events from their handles; the loop
takes commands between two passes, and no more than `_MAX_COMMANDS`, so that a flood of calls does not starve passes.
So a signal, which Python delivers to the main thread, cannot interrupt any
bookkeeping. A pass that fails ends its requests with the error, and the loop continues with the next ones; if cleaning
up after the failure fails too, the loop ends and refuses later requests.

Among ranks that compute a model together, the first one's loop leads the others' (`zinfer.batching.lockstep`); a pass
that fails on one of them ends the loops of all.
"""

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Final, Protocol

import torch

from zinfer.batching.batcher import Batcher
from zinfer.batching.handle import Event, Handle, Token
from zinfer.batching.lockstep import Leader
from zinfer.batching.request import Request
from zinfer.errors import PlanError, RankError
from zinfer.nvme.pool import call_all, start_thread
from zinfer.requests.completion import Completion
from zinfer.scheduling.pass_order import PassOrder

_MAX_COMMANDS: Final = 4096
"""Between two passes. All requests that arrive within a usual pass still join the next one."""


class Call(Protocol):
    """The requests of one call, and where their results go."""

    @property
    def requests(self) -> Sequence[Request]: ...

    def put(self, event: Event | BaseException) -> None:
        """As `Handle.put`."""


class ServingLoop:
    """Runs requests until `close`; any thread may submit and cancel.

    Args:
        batcher: only the loop calls it from now on.
        device: the batcher's device.
        closers: called on the loop's thread at its end, the last one first, even if others raise.
        leader: tells the ranks that follow this one; None: there are none.
    """

    def __init__(
        self,
        batcher: Batcher,
        device: torch.device,
        closers: Sequence[Callable[[], object]],
        leader: Leader | None = None,
    ) -> None:
        self._batcher = batcher
        self._closers = closers
        self._leader = leader
        self._handles: dict[Request, Call] = {}  # of unfinished requests
        self._commands: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._process_id = os.getpid()
        self._closing = False
        self._failure: BaseException | None = None
        self._order = threading.Lock()  # after `_closing` is set, no command is queued
        self._over = threading.Lock()  # held while the thread runs
        self._over.acquire()
        if device.type == "cuda":  # the weights were loaded on other streams
            torch.cuda.synchronize(device)
        self._thread = start_thread("zinfer-serve", partial(self._run, device), self._end_with)
        if leader is not None:
            leader.on_failure(lambda failure: self._commands.put(lambda: None))  # the loop looks

    def submit(self, handle: Handle) -> None:
        """Start the requests of a handle, all in the same pass if they fit.

        Raises:
            RuntimeError: the loop was closed or has ended, or the caller is the loop's own thread.
        """
        self._post(partial(self._admit, handle))

    def cancel(self, handle: Handle) -> None:
        """End a handle's unfinished requests; their completions get the reason "cancelled". Never blocks."""
        if not handle.is_over:
            self._commands.put(partial(self._cancel, handle))

    def drop_prefixes(self) -> None:
        """Drop the prefix cache between two passes.

        Raises:
            RuntimeError: requests are under way; or as `submit`.
        """
        done: Future[BaseException | None] = Future()

        def drop() -> None:
            try:
                done.set_result(self._drop_prefixes())
            except BaseException as error:
                done.set_result(error)
                raise

        self._post(drop)
        if (failure := done.result()) is not None:
            raise failure

    @property
    def is_closed(self) -> bool:
        """Whether it takes no more requests."""
        return self._closing

    def check_open(self) -> None:
        """Raise RuntimeError if the loop was closed or has ended; RankError if another rank ended it."""
        if self._closing:
            if isinstance(self._failure, RankError):
                raise self._failure
            raise RuntimeError("this LLM was closed; make a new one") from self._failure

    def close(self) -> None:
        """End the unfinished requests with an error, and wait until the closers have run. May be called again.

        Ctrl-C ends only the wait. The error of a closer is raised by the first call that waits.

        Raises:
            RuntimeError: a pass of this thread is under way, as in a forward hook.
        """
        if self._is_own_thread():
            raise RuntimeError(
                "close was called within a pass of this LLM, in a forward hook perhaps, and the weights are in use; "
                "let the pass return first (`cancel`, or leaving `stream` early, ends requests)"
            )
        self.stop()
        with self._over:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def stop(self) -> None:
        """As `close`, without waiting."""
        with self._order:
            self._closing = True
        self._commands.put(lambda: None)

    def close_with(self, owner: object) -> None:
        """Close when ``owner`` is garbage-collected or the process ends; not in a forked process."""
        weakref.finalize(owner, _end, self)

    def _is_own_thread(self) -> bool:
        return threading.get_ident() == self._thread.ident

    def _check_caller(self) -> None:
        if self._is_own_thread():
            raise RuntimeError("an LLM was called within a pass of its own, in a forward hook perhaps; call it after")

    def _post(self, command: Callable[[], object]) -> None:
        self._check_caller()
        with self._order:
            self.check_open()
            self._commands.put(command)

    def _run(self, device: torch.device) -> None:
        error: BaseException = RuntimeError("this LLM was closed; make a new one")
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            self._serve()
            if self._leader is not None:
                self._leader.send(is_last=True)
        except BaseException as failure:  # `abort` failed too: raised by the next call or `close`
            self._failure = error = failure
        self.stop()
        try:
            call_all([self._take_rest, partial(self._end_all, error), *reversed(self._closers)])
        finally:
            del error
        self._over.release()

    def _end_with(self, failure: BaseException) -> None:
        """Let the next call or `close` raise an error of the end."""
        self._failure = failure
        self._over.release()

    def _take_rest(self) -> None:
        call_all([self._commands.get() for _ in range(self._commands.qsize())])

    def _serve(self) -> None:
        num_taken = 0  # commands since the last pass
        while not self._closing:
            try:
                if self._handles and (num_taken >= _MAX_COMMANDS or self._commands.empty()):
                    num_taken = 0
                    self._pass(self._batcher.order())
                else:
                    if self._leader is not None and self._commands.empty():
                        self._leader.send()
                    num_taken += 1
                    self._commands.get()()
            except BaseException as error:  # a hook may raise anything
                if self._leader is not None:
                    self._leader.fail(error)
                    raise
                self._batcher.abort()
                self._end_all(error)

    def _pass(self, order: PassOrder) -> None:
        if self._leader is not None:
            self._leader.send(order)
        events = self._batcher.step(order)
        if self._leader is not None:
            self._leader.checksum.add(self._batcher.pass_sizes[-1:], self._batcher.received_ids)
        for request, event in events:
            self._deliver(request, event)

    def _admit(self, handle: Handle) -> None:
        try:
            if self._leader is not None:
                self._leader.admit(handle)
            self._begin(handle)
        except BaseException as error:  # or, not being among those under way, it would hear of nothing
            handle.put(error)
            raise

    def _begin(self, call: Call) -> None:
        if self._handles and (self._batcher.has_known or any(each.known_ids is not None for each in call.requests)):
            call.put(RuntimeError("a call with known tokens shares its passes with no other; wait for the one before"))
            return
        if not self._handles:
            self._batcher.begin(call.requests)
        for request in call.requests:
            self._handles[request] = call
            try:
                self._batcher.add(request)
            except PlanError as error:
                self._deliver(request, Completion.failed(request.prompt_index, request.sample_index, str(error)))

    def _cancel(self, handle: Handle) -> None:
        if self._leader is not None:
            self._leader.cancel(handle)
        self._end_requests(handle.requests)

    def _end_requests(self, requests: Sequence[Request]) -> None:
        for request, completion in self._batcher.cancel([each for each in requests if each in self._handles]):
            self._deliver(request, completion)

    def _drop_prefixes(self) -> RuntimeError | None:
        """Drop the prefix cache; returns the error if that is not possible."""
        if self._leader is not None:
            self._leader.drop_prefixes()
        if self._handles:
            return RuntimeError("requests of this LLM are under way; wait for their completions, or cancel them")
        self._batcher.forget_prefixes()
        return None

    def _deliver(self, request: Request, event: Token | Completion) -> None:
        call = self._handles.pop(request) if isinstance(event, Completion) else self._handles[request]
        call.put((request, event))

    def _end_all(self, error: BaseException) -> None:
        for call in dict.fromkeys(self._handles.values()):
            call.put(error)
        self._handles.clear()


def _end(loop: ServingLoop) -> None:
    if os.getpid() == loop._process_id:
        loop.stop()
        if not loop._is_own_thread():
            with loop._over:
                pass
