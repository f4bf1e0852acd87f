"""Fixtures of the whole suite."""

import gc
import os
import signal
import threading
from collections.abc import Generator, Sequence
from operator import itemgetter
from typing import Any, Final
from zlib import crc32

import pytest
import torch
from hypothesis import settings
from threads import settled_threads

# Triton decides when it is imported and when a kernel is decorated: without a GPU its interpreter runs the kernels.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ.get("TRITON_INTERPRET") == "1":
    import interpreting

    interpreting.hasten()

# Under `nohup` and behind `&` these are ignored, in every process that a test starts as well.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

START_COMMANDS: Final = (
    "test_bench_kill.py",
    "test_cli_kill.py",
    "test_corruptions.py",
    "test_faults_jobs.py",
    "test_hosts.py",
    "test_lost_streams.py",
    "test_packed_cache_processes.py",
    "test_quantize_cli.py",
    "test_ranks_jobs.py",
    "test_serve.py",
    "test_serve_batches.py",
    "test_serve_processes.py",
    "test_spill_file.py",
)
"""Files that fork commands: they stay in one process, whose server imports torch and transformers once."""

# A loaded machine is slow at times; that is no fault of the property.
settings.register_profile("zinfer", deadline=None)
settings.load_profile("zinfer")


@pytest.fixture(scope="module", autouse=True)
def without_old_engines() -> None:
    """Engines that another file's tests left to the collector end now, not while threads are counted."""
    if any(thread.name.startswith("zinfer-") for thread in threading.enumerate()):
        gc.collect()
        settled_threads()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Each device that this machine may have; tests with it are marked `gpu` for cuda."""
    return str(request.param)


@pytest.fixture
def kernel_device(device: str) -> str:
    """As `device`, for tests that run Triton kernels: compiled ones on cuda, interpreted ones on the CPU."""
    from zinfer.kernels.launching import INTERPRETED

    if (device == "cuda") is INTERPRETED:
        pytest.skip("with a GPU the kernels are compiled" if device == "cpu" else "TRITON_INTERPRET is set")
    return device


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty` gives NaN, or 77 where there is no NaN: what a kernel leaves out is seen."""
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        found = empty(*args, **kwargs)
        return found.fill_(float("nan") if found.is_floating_point() else 77)

    monkeypatch.setattr(torch, "empty", poisoned)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the tests marked slow too")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadfile``: as xdist does, but with the files that fork commands as one."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "commands" if file.endswith(START_COMMANDS) else file

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Nothing of what is imported and collected is garbage: no collection looks for it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Modules and tests outlive everything: no collection of a test's walks through their million objects again."""
    gc.collect()
    gc.freeze()


def is_slow(item: pytest.Item) -> bool:
    """Whether only ``--all`` runs it: marked so, or an interpreted kernel in a second dtype of the same format."""
    if item.get_closest_marker("gpu"):
        return False
    if item.get_closest_marker("slow"):
        return True
    params = getattr(item, "callspec", None)
    dtype = params.params.get("dtype", torch.float16) if params else torch.float16
    return "kernel_device" in getattr(item, "fixturenames", ()) and dtype is not torch.float16


def left_out(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Cases of tests marked ``sampled(n)`` that only ``--all`` runs: all but about one in n, at least one stays.

    Their names decide, so that every run takes the same ones, and neighbours differ in all parameters.
    """
    groups: dict[str, list[tuple[int, pytest.Item]]] = {}
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is not None and not item.get_closest_marker("gpu"):
            name = item.nodeid.partition("[")[0]
            groups.setdefault(name, []).append((crc32(item.nodeid.encode()) % mark.args[0], item))
    return {item for cases in groups.values() for rest, item in cases if rest != min(cases, key=itemgetter(0))[0]}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave slow tests out unless asked for; skip the `gpu` tests without a CUDA device, each saying so."""
    if not config.getoption("--all"):
        out = left_out(items) | {item for item in items if is_slow(item)}
        config.hook.pytest_deselected(items=[item for item in items if item in out])
        items[:] = [item for item in items if item not in out]
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
