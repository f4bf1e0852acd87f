"""A disk, a file, a thread or a device that fails: the caller learns it at once, nothing hangs, nothing stays behind,
and once it is mended the answers are exact again."""

import errno
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from checkpoints import tiny_checkpoint
from engines import config_for, engine_for
from faults_support import (
    Death,
    Fault,
    Holdings,
    ReadEffect,
    die,
    failing_reads,
    failing_stream,
    failure_of,
    files_away,
    logits_of,
    own_descriptors,
    read_error,
    read_half_a_page,
    read_nothing,
)

import zinfer
from zinfer.config import resolve_settings
from zinfer.nvme.reader import DiskReadError
from zinfer.offload.host_memory import HostBuffer
from zinfer.offload.slots import Slot
from zinfer.offload.source import DiskSource, HostSource
from zinfer.offload.stream import CopyStream, open_stream

HOMES_THAT_LOAD = ("resident", "host", "mixed")
HOMES_THAT_READ = ("disk", "mixed")
STREAMED = ("host", "disk", "mixed")
READS = (read_error, read_nothing, read_half_a_page, die)
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"), num_layers=5, shards=2)


@cache
def resident_logits(folder: Path, device: str) -> torch.Tensor:
    with engine_for(folder, "resident", device=device) as engine:
        return logits_of(engine).clone()


@pytest.fixture
def expected(original: Path, device: str) -> torch.Tensor:
    """What the undamaged model says on the device."""
    return resident_logits(original, device)


@pytest.fixture
def folder(original: Path, expected: torch.Tensor, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A checkpoint to be damaged; whatever befalls it, no more is held in the end."""
    before = Holdings.now()
    yield Path(shutil.copytree(original, tmp_path / "model"))
    for error in (OUT_OF_MEMORY, getattr(request.node, "callspec", None) and request.node.callspec.params.get("error")):
        if isinstance(error, BaseException):
            error.with_traceback(None)  # it outlives the test, and its frames hold what failed
    assert Holdings.now() <= before


def make(
    folder: Path, homes: str, device: str, open_one: Callable[[torch.device], CopyStream] = open_stream
) -> zinfer.InferenceEngine:
    return zinfer.InferenceEngine(folder, resolve_settings(config_for(folder, homes, 2, device)), open_stream=open_one)


def check_read_failure(error: BaseException, effect: object, folder: Path) -> None:
    if effect is die:
        assert isinstance(error, Death)
        return
    assert isinstance(error, DiskReadError)
    assert error.errno == errno.EIO
    assert Path(str(error.filename)).parent == folder
    assert error.offset >= 0
    assert str(error.filename) in str(error)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("homes", HOMES_THAT_LOAD)
@pytest.mark.parametrize("effect", READS)
def test_reads_that_fail_while_loading(
    folder: Path, expected: torch.Tensor, device: str, homes: str, effect: ReadEffect
) -> None:
    before, fault = Holdings.now(), Fault()
    with failing_reads(effect, fault):
        for _ in range(2):
            error = failure_of(lambda: make(folder, homes, device), fault, f"loading, {homes}")
            check_read_failure(error, effect, folder)
            del error
            assert Holdings.now() <= before
        fault.armed = False
        with engine_for(folder, homes, device=device) as engine:
            assert torch.equal(logits_of(engine), expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("homes", HOMES_THAT_READ)
@pytest.mark.parametrize("effect", READS)
def test_reads_that_fail_while_running(
    folder: Path, expected: torch.Tensor, device: str, homes: str, effect: ReadEffect
) -> None:
    fault = Fault(armed=False)
    with failing_reads(effect, fault), engine_for(folder, homes, device=device) as engine:
        assert torch.equal(logits_of(engine), expected)
        descriptors = len(own_descriptors())
        for _ in range(2):
            fault.armed = True
            check_read_failure(failure_of(lambda: logits_of(engine), fault, f"running, {homes}"), effect, folder)
            fault.armed = False
            assert torch.equal(logits_of(engine), expected)
        assert len(own_descriptors()) == descriptors


@pytest.mark.sampled(2)
@pytest.mark.parametrize("homes", HOMES_THAT_LOAD)
def test_files_that_vanish_while_loading(folder: Path, expected: torch.Tensor, device: str, homes: str) -> None:
    """After their headers were read, before their weights are."""

    def vanish_first() -> None:
        def vanish(found: torch.device) -> CopyStream:
            for shard in folder.glob("*.safetensors"):
                shard.unlink()
            return open_stream(found)

        make(folder, homes, device, vanish)

    saved = {shard: shard.read_bytes() for shard in folder.glob("*.safetensors")}
    error = failure_of(vanish_first, label=f"vanished while loading, {homes}")
    assert isinstance(error, DiskReadError)
    assert error.errno == errno.ENOENT
    assert Path(str(error.filename)) in saved
    for shard, content in saved.items():
        shard.write_bytes(content)
    with engine_for(folder, homes, device=device) as engine:
        assert torch.equal(logits_of(engine), expected)


@pytest.mark.parametrize("homes", HOMES_THAT_READ)
def test_files_that_vanish_while_running(folder: Path, expected: torch.Tensor, device: str, homes: str) -> None:
    with engine_for(folder, homes, device=device) as engine:
        for _ in range(2):
            assert torch.equal(logits_of(engine), expected)
            with files_away(folder):
                error = failure_of(lambda: logits_of(engine), label=f"vanished while running, {homes}")
                assert isinstance(error, DiskReadError)
                assert error.errno == errno.ENOENT
                assert Path(str(error.filename)).parent == folder
        assert torch.equal(logits_of(engine), expected)


@pytest.mark.parametrize("homes", HOMES_THAT_READ)
def test_a_file_that_vanishes_before_its_first_read(
    folder: Path, expected: torch.Tensor, device: str, homes: str
) -> None:
    """It is not open yet."""
    with engine_for(folder, homes, device=device) as engine:
        with files_away(folder):
            error = failure_of(lambda: logits_of(engine), label=f"vanished before the first read, {homes}")
            assert isinstance(error, DiskReadError)
            assert error.errno == errno.ENOENT
        assert torch.equal(logits_of(engine), expected)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", ["copy", "mark", "after"])
@pytest.mark.parametrize("error", [OUT_OF_MEMORY, RuntimeError("CUDA error: unspecified"), Death()], ids=repr)
@pytest.mark.parametrize("homes", STREAMED)
def test_a_device_that_fails_while_running(
    folder: Path, expected: torch.Tensor, device: str, homes: str, error: BaseException, method: str
) -> None:
    """In the lanes' threads: they send what was read."""
    fault = Fault(armed=False)
    engine = make(folder, homes, device, lambda found: failing_stream(found, method, error, fault))
    try:
        for _ in range(2):
            assert torch.equal(logits_of(engine), expected)
            fault.armed = True
            assert failure_of(lambda: logits_of(engine), fault, f"{method}, {homes}") is error
            fault.armed = False
        assert torch.equal(logits_of(engine), expected)
    finally:
        engine.destroy()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("homes", ["resident", "mixed"])
@pytest.mark.parametrize("num_good", [0, 2])
def test_a_device_that_fails_while_loading(
    folder: Path, expected: torch.Tensor, device: str, homes: str, num_good: int
) -> None:
    before, fault = Holdings.now(), Fault(num_good=num_good)

    def load() -> None:
        make(folder, homes, device, lambda found: failing_stream(found, "copy", OUT_OF_MEMORY, fault))

    assert failure_of(load, fault, f"copy while loading, {homes}") is OUT_OF_MEMORY
    assert Holdings.now() <= before
    fault.armed = False
    with engine_for(folder, homes, device=device) as engine:
        assert torch.equal(logits_of(engine), expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("homes", ["resident", *STREAMED])
@pytest.mark.parametrize("num_good", [0, 1])
def test_a_device_without_room_for_slots(
    folder: Path, expected: torch.Tensor, device: str, monkeypatch: pytest.MonkeyPatch, homes: str, num_good: int
) -> None:
    before, fault, real = Holdings.now(), Fault(num_good=num_good), Slot.allocate

    def allocate(nbytes: int, stream: CopyStream) -> Slot:
        if fault.strikes():
            raise OUT_OF_MEMORY
        return real(nbytes, stream)

    monkeypatch.setattr(Slot, "allocate", allocate)
    error = failure_of(lambda: make(folder, homes, device), fault, f"slot {num_good}, {homes}")
    assert error is OUT_OF_MEMORY
    assert Holdings.now() <= before
    fault.armed = False
    with engine_for(folder, homes, device=device) as engine:
        assert torch.equal(logits_of(engine), expected)


@pytest.mark.parametrize("homes", ["host", "mixed", "disk"])
def test_a_host_without_room(
    folder: Path, expected: torch.Tensor, device: str, monkeypatch: pytest.MonkeyPatch, homes: str
) -> None:
    """The third buffer, a staging slot or a slab, cannot be had."""
    before, fault, real = Holdings.now(), Fault(num_good=2), HostBuffer.__init__

    def allocate(buffer: HostBuffer, nbytes: int, *, pin: bool = False) -> None:
        if fault.strikes():
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        real(buffer, nbytes, pin=pin)

    monkeypatch.setattr(HostBuffer, "__init__", allocate)
    error = failure_of(lambda: make(folder, homes, device), fault, f"no host memory, {homes}")
    assert isinstance(error, OSError)
    assert error.errno == errno.ENOMEM
    assert Holdings.now() <= before
    fault.armed = False
    with engine_for(folder, homes, device=device) as engine:
        assert torch.equal(logits_of(engine), expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("source", "step"), [(DiskSource, "load"), (DiskSource, "send"), (HostSource, "send")])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "lane"), MemoryError(), Death()], ids=repr)
def test_a_failure_in_a_lane(
    folder: Path,
    expected: torch.Tensor,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    source: type[DiskSource] | type[HostSource],
    step: str,
    error: BaseException,
) -> None:
    fault, real = Fault(armed=False), getattr(source, step)

    def fail(*args: object) -> object:
        if fault.strikes():
            raise error
        return real(*args)

    monkeypatch.setattr(source, step, fail)
    homes = "disk" if source is DiskSource else "host"
    with engine_for(folder, homes, device=device) as engine:
        assert torch.equal(logits_of(engine), expected)
        fault.armed = True
        assert failure_of(lambda: logits_of(engine), fault, f"{step}, {homes}") is error
        fault.armed = False
        assert torch.equal(logits_of(engine), expected)
