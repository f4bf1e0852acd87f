"""A pool with a fixed number of threads, all started before the first call, so that no start can fail later."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

Result = TypeVar("Result")


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
        self.num_threads = num_threads
        self._threads: list[threading.Thread] = []
        try:
            for number in range(num_threads):
                thread = threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.close()
            raise

    def submit(self, call: Callable[[], Result]) -> "Future[Result]":
        """Queue a call; its future is cancelled if the pool is closed before the call starts.

        Raises:
            RuntimeError: the pool is closed.
        """
        future: Future[Result] = Future()
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the pool is closed")
            self._calls.put((future, call))
        return future

    def close(self) -> None:
        """Cancel calls not started, wait for those under way, end the threads; may be called again."""
        with self._lock:
            self._is_closed = True
        with suppress(queue.Empty):
            while True:
                item = self._calls.get_nowait()
                if item is not None:
                    item[0].cancel()
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
