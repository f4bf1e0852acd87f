"""Work that Ctrl-C does not break off: giving back what an engine holds."""

import _thread
import threading
from collections.abc import Callable


class Uninterrupted:
    """Does its work once, on a thread of its own: a KeyboardInterrupt strikes who waits for it, and never the work.

    A call after one that was interrupted waits for the same work. Errors of the work reach the first who waits.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self._work: Callable[[], object] | None = work
        self._turn = threading.Lock()
        self._failure: BaseException | None = None

    def __call__(self) -> None:
        """Return when the work is done."""
        over = threading.Lock()  # no Event: an interrupt in its Python code could leave its lock taken
        over.acquire()

        def run() -> None:
            try:
                self._run()
            finally:
                over.release()

        def begin() -> None:
            threading.Thread(target=run, name="zinfer-close", daemon=True).start()

        try:
            # `Thread.start` waits in Python code, where Ctrl-C could leave its lock taken: so it is called over there.
            _thread.start_new_thread(begin, ())
        except RuntimeError:  # no thread to be had, or the interpreter ends
            self._run()
        else:
            over.acquire()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _run(self) -> None:
        with self._turn:
            work, self._work = self._work, None
            if work is not None:
                try:
                    work()
                except BaseException as failure:  # raised again by who waits
                    self._failure = failure
