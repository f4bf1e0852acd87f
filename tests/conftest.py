"""Fixtures of the whole suite."""

import gc
import os
import signal
import threading
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import commands
import pytest
import torch
from hypothesis import settings
from stand_in import use_server
from threads import settled_threads

# Each process of pytest-xdist uses one of several GPUs.
WORKER: Final = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
if WORKER.isdecimal() and (gpus := len(list(Path("/dev").glob("nvidia[0-9]*")))) > 1:
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", str(int(WORKER) % gpus))

# Triton decides when it is imported and when a kernel is decorated: without a GPU its interpreter runs the kernels.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ.get("TRITON_INTERPRET") == "1":
    import interpreting

    interpreting.hasten()

# torch looks up the name of each address that it connects to; a name server that loses a query costs 5 s by default.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Names that are no folders are looked up in the cache alone; `hub_server.py` is the hub of tests that download.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Under `nohup` and behind `&` these are ignored, in every process that a test starts as well.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

FIRST: Final = (
    "test_ranks_jobs.py",
    "test_plan_cli.py",
    "test_docs.py",
    "test_serve.py",
    "test_serve_hostile.py",
    "test_tensor_parallel.py",
    "test_serve_batches.py",
    "test_serve_processes.py",
    "test_job_plan.py",
    "test_llm.py",
    "test_cli_kill.py",
    "test_job_sizes.py",
    "test_mesh.py",
    "test_pipeline_llm.py",
    "test_lockstep.py",
    "test_mii.py",
)
"""Files that take long, and wait for processes now and then: what begins last is short."""

ALONE: Final = frozenset(
    f"test_{name}.py"
    for name in (
        *("async_copy", "busy_device", "cli_kill", "cuda_stream", "enforced_cap", "faults_memory", "footprint"),
        *("given_back", "host_kv_cache", "host_memory", "peer_communicator", "probe_measures", "probe_rates"),
        *("ranks", "ranks_on_gpus", "tensor_parallel"),
    )
)
"""Files whose tests measure a GPU, fill it or use several; on GPUs they are marked `alone`."""


@pytest.fixture(scope="module", autouse=True)
def without_old_engines() -> None:
    """Engines that another file's tests left to the collector end now, not while threads are counted."""
    if any(thread.name.startswith("zinfer-") for thread in threading.enumerate()):
        gc.collect()
        settled_threads()


@pytest.fixture(scope="module", autouse=True)
def own_findings(tmp_path_factory: pytest.TempPathFactory) -> Generator[None, Any, Any]:
    """What a file's tests measure of this machine decides nothing in another file, and this user's findings nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


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
def pytest_configure_node(node: Any) -> None:
    """Let the processes of xdist share this one's server of commands and ranks."""
    node.workerinput["server"] = commands.share_server()


def load_profiles(*, is_all: bool) -> None:
    """Settings of properties: fewer examples by default, and of kernels that Triton interprets the fewest."""
    # A loaded machine is slow at times; that is no fault of the property.
    settings.register_profile("zinfer", deadline=None, max_examples=100 if is_all else 20)
    settings.load_profile("zinfer")
    is_short = not is_all and os.environ.get("TRITON_INTERPRET") == "1"
    settings.register_profile("kernels", settings.get_profile("zinfer"), max_examples=8 if is_short else 25)


def pytest_configure(config: pytest.Config) -> None:
    load_profiles(is_all=config.getoption("--all"))
    if (given := getattr(config, "workerinput", None)) is not None:
        use_server(given["server"])


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
    """Cases of tests marked ``sampled(n)`` that only ``--all`` runs: all but one in n; one that is not slow stays.

    Their names decide, so that every run takes the same ones, and neighbours differ in all parameters.
    """
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") is not None and not item.get_closest_marker("gpu") and not is_slow(item):
            groups.setdefault(item.nodeid.partition("[")[0], []).append(item)
    out: set[pytest.Item] = set()
    for cases in groups.values():
        (share,) = cases[0].get_closest_marker("sampled").args  # type: ignore[union-attr]
        cases.sort(key=lambda item: crc32(item.nodeid.encode()))
        out.update(cases[max(len(cases) // share, 1) :])
    return out


@pytest.hookimpl(tryfirst=True)  # before pytest leaves tests out by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave slow tests out unless asked for, order files, and skip the `gpu` tests without a CUDA device."""
    if not config.getoption("--all"):
        out = left_out(items) | {item for item in items if is_slow(item)}
        config.hook.pytest_deselected(items=[item for item in items if item in out])
        items[:] = [item for item in items if item not in out]
    for item in items:
        if item.path.name in ALONE:
            item.add_marker(pytest.mark.alone)
    items.sort(key=lambda item: FIRST.index(item.path.name) if item.path.name in FIRST else len(FIRST))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
