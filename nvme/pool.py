"""Threads of which none ends unseen: one with a work of its own, or a pool that takes calls.

[Note: no thread ends unseen] Python prints the error that ends a thread, and whoever waits for that thread waits for
ever; of an error in a future's callback it only writes a log line. So every thread is started by `start_thread` and
every callback is added by `when_done`, which demand the function that tells whoever waits.
"""

import os
import queue
import threading
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, Final, NoReturn, TypeAlias, TypeVar

Result = TypeVar("Result")
Failed: TypeAlias = Callable[[BaseException], object]

_EXIT_CODE: Final = 1


def start_thread(name: str, work: Callable[[], object], failed: Failed, *, daemon: bool = True) -> threading.Thread:
    """Start a thread ([Note: no thread ends unseen]).

    Args:
        work: what the thread does.
        failed: called on the thread with the error that has ended the work; tells whoever waits for the thread. If it
            fails too, the process ends (`end_process`).

    Raises:
        RuntimeError: the thread cannot be started.
    """
    thread = threading.Thread(target=_run, args=(work, failed), name=name, daemon=daemon)
    thread.start()
    return thread


def when_done(future: "Future[Result]", call: Callable[["Future[Result]"], object], failed: Failed) -> None:
    """Call with a future once it is done, on the thread that ends it, or at once; ``failed`` as in `start_thread`."""
    future.add_done_callback(lambda done: _run(partial(call, done), failed))


def call_all(calls: Iterable[Callable[[], object]]) -> None:
    """Make calls in their order, all of them even if some fail; the error of the last one that does is raised."""
    with ExitStack() as owned:
        for call in reversed([*calls]):
            owned.callback(call)


def end_process(failure: BaseException) -> NoReturn:
    """End this process at once, with the error on stderr and exit code 1: others wait for what nobody does any more."""
    name, text = threading.current_thread().name, "".join(traceback.format_exception(failure))
    said = f"{text}zinfer: error: {name} failed, for which others wait: {type(failure).__name__}: {failure}\n"
    with suppress(OSError):  # not by print: another thread may hold the stream
        os.write(2, said.encode(errors="backslashreplace"))
    os._exit(_EXIT_CODE)


def _run(work: Callable[[], object], failed: Failed) -> None:
    try:
        work()
    except BaseException as failure:
        try:
            failed(failure)
        except BaseException as error:
            end_process(error)


class Pool:
    """Threads that take calls from one queue, in order.

    Unlike `concurrent.futures.ThreadPoolExecutor` it starts its threads at once: the executor may accept a call, fail
    to start a thread for it, raise that error, and still run the call later.

    Raises:
        RuntimeError: a thread cannot be started; those already started have ended.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False
        self._failure: BaseException | None = None
        self.num_threads = num_threads
        self._threads: list[threading.Thread] = []
        try:
            for number in range(num_threads):
                self._threads.append(start_thread(f"{name}-{number}", self._work, self._fail))
        except BaseException:
            self.close()
            raise

    def submit(self, call: Callable[[], Result]) -> "Future[Result]":
        """Queue a call; its future is cancelled if the pool is closed before the call starts.

        Raises:
            RuntimeError: the pool is closed, or a thread of it has failed.
        """
        future: Future[Result] = Future()
        with self._lock:
            if self._failure is not None:
                raise RuntimeError("a thread of the pool has failed") from self._failure
            if self._is_closed:
                raise RuntimeError("the pool is closed")
            self._calls.put((future, call))
        return future

    def close(self) -> None:
        """Cancel calls not started, wait for those under way, end the threads; may be called again."""
        with self._lock:
            self._is_closed = True
        for future in self._drop_calls():
            future.cancel()
        self._calls.put(None)  # each thread passes it on
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            if future.set_running_or_notify_cancel():
                try:
                    result = call()
                except BaseException as failure:  # raised where the future is waited for
                    future.set_exception(failure)
                else:
                    future.set_result(result)
            del item, future, call  # or their buffers would stay alive while the thread waits
        self._calls.put(None)

    def _fail(self, failure: BaseException) -> None:
        """Take no more calls; those not started raise the error that has ended a thread."""
        with self._lock:
            self._failure = failure
        for future in self._drop_calls():
            if future.set_running_or_notify_cancel():
                future.set_exception(failure)
        self._calls.put(None)

    def _drop_calls(self) -> list["Future[Any]"]:
        """Take the calls not started out of the queue."""
        found = []
        with suppress(queue.Empty):
            while True:
                item = self._calls.get_nowait()
                if item is not None:
                    found.append(item[0])
        return found
