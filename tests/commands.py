"""Runs `zinfer` in child processes: cold starts, as users run it, or warm ones if a test is not about the start.

A warm process is forked, by multiprocessing's server, from one that has only imported the modules of commands. It has
its own memory, descriptors, session and signals, and can be killed. It saves the seconds of importing torch and
transformers. All processes of pytest-xdist share a server.
The replicas that it starts are warm as well, by `stand_in.py`, and so are ranks, which a command forks.
On a machine with a GPU every start is cold, because CUDA does not survive a fork.
"""

import atexit
import gc
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.forkserver import _forkserver  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any, Final

import torch
from stand_in import PYTHON, SCRIPT, SERVER, Ends

_COMMANDS: Final = [f"zinfer.{name}" for name in ("cli", "jobs.job", "jobs.summary", "store.writing", "store.progress")]
_TESTS: Final = ["hypothesis", "pytest"]  # of the functions that ranks run
Preparation = tuple[Callable[..., None], tuple[Any, ...]]
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # for the server: of ranks, each wait that is over is a warning
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload([*_COMMANDS, *_TESTS])


def share_server() -> dict[str, Any]:
    """Start the server; returns how other processes reach it by `use_server`. This one outlives them."""
    _forkserver.ensure_running()
    names = ("_forkserver_address", "_forkserver_authkey")  # the latter from Python 3.14 on
    return {name: getattr(_forkserver, name) for name in names if hasattr(_forkserver, name)}


def variables_of_others() -> dict[str, str]:
    """What the environment says to processes whose `sys.executable` is `stand_in.SCRIPT`."""
    return {PYTHON: sys.executable, SERVER: repr(share_server())}


class Forked:
    """A command in a forked process, with what tests use of `subprocess.Popen`: pipes, signals, an exit code."""

    def __init__(self, *args: Any) -> None:
        out, out_end = os.pipe()
        err, err_end = os.pipe()
        self.stdout, self.stderr = os.fdopen(out), os.fdopen(err)
        self._process = context.Process(target=run_command, args=(Ends(out_end, err_end), *args))
        self._process.start()
        os.close(out_end)
        os.close(err_end)
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, a signal's number negative; None while the process lives."""
        if self.returncode is None and self._process.exitcode is not None:
            self.returncode = self._process.exitcode
            self._process.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._process.join(timeout)
        if (code := self.poll()) is None:
            raise TimeoutError(f"process {self.pid} lives after {timeout} s")
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What is left of stdout and stderr, once the process has ended."""
        with ThreadPoolExecutor(2) as readers, self.stdout, self.stderr:
            said = [readers.submit(pipe.read) for pipe in (self.stdout, self.stderr)]
            try:
                self.wait(timeout)
            except TimeoutError:
                self.kill()  # or its pipes would never end
                raise
            return said[0].result(), said[1].result()

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Process = Forked | subprocess.Popen[str]


def kill_group(process: Process, number: signal.Signals) -> None:
    """Send a signal to a process's group. A warm process makes it a moment after it was started."""
    while True:
        try:
            os.killpg(process.pid, number)
            return
        except ProcessLookupError:
            assert process.poll() is None, "it has ended"
            time.sleep(0.001)


def start(
    arguments: Sequence[str | Path],
    folder: Path,
    *,
    warm: bool,
    limit_bytes: int | None = None,
    prepare: Preparation | None = None,
    variables: Mapping[str, str] | None = None,
    warms_others: bool = True,
) -> Process:
    """`zinfer` with these arguments, in ``folder`` and in a session of its own.

    Args:
        warm: fork it, where there is no GPU.
        limit_bytes: no file that it writes may become larger.
        prepare: a function of a module, with arguments, to call before the command.
        variables: added to its environment.
        warms_others: the `zinfer` processes that a warm one starts are warm too.
    """
    words = [str(each) for each in arguments]
    if warm and not torch.cuda.is_available():
        others = variables_of_others() if warms_others else {}
        return Forked(words, folder, {**os.environ, **others, **(variables or {})}, limit_bytes, prepare)
    program = ["-m", "zinfer"]
    if prepare is not None:
        function, given = prepare
        program = ["-c", _PREPARED, str(Path(__file__).parent), function.__module__, function.__name__, repr(given)]
    return subprocess.Popen(
        [sys.executable, *program, *words],
        cwd=folder,
        env={**os.environ, **(variables or {}), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: _limit(limit_bytes),
    )


_PREPARED: Final = """
import ast, importlib, sys
folder, module, name, given = (sys.argv.pop(1) for _ in range(4))
sys.path.insert(0, folder)
getattr(importlib.import_module(module), name)(*ast.literal_eval(given))
from zinfer.cli import main
main()
"""


def run_command(
    ends: Ends,
    words: list[str],
    folder: Path,
    environment: dict[str, str],
    limit_bytes: int | None,
    prepare: Preparation | None,
) -> None:
    from zinfer.cli import main

    forget_garbage()
    os.setsid()
    ends.take_over()
    os.environ.clear()
    os.environ.update(environment, OMP_NUM_THREADS="1")
    if PYTHON in environment:
        sys.executable = str(SCRIPT)
    os.chdir(folder)
    _limit(limit_bytes)
    _customize()
    if prepare is not None:
        function, given = prepare
        function(*given)
    sys.argv[:] = ["zinfer", *words]
    try:
        main()
    finally:
        run_exit_functions()


def _customize() -> None:
    """Run the `sitecustomize` that PYTHONPATH has, as a cold process does when it starts."""
    for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if folder and (file := Path(folder, "sitecustomize.py")).is_file():
            exec(compile(file.read_text(), file, "exec"), {"__name__": "sitecustomize"})
            return


def give_stdin(text: str) -> None:
    """A preparation: let a pipe with this text, at most 64 KiB, be the process's stdin."""
    out_end, in_end = os.pipe()
    os.write(in_end, text.encode())
    os.close(in_end)
    os.dup2(out_end, 0)
    sys.stdin = os.fdopen(0, closefd=False)


def forget_garbage() -> None:
    """Nothing that the server has imported is garbage: no collection of a process that it forks walks through that."""
    gc.freeze()


def run_exit_functions() -> None:
    """End threads and call what `atexit` has, as every process does at its end but one of multiprocessing."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def _limit(limit_bytes: int | None) -> None:
    if limit_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
