"""Backends keep one contract; GPUDirect Storage fills device memory through kvikio and is given up with a word."""

import errno
import importlib.util
import logging
import mmap
import os
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvikio_support import PretendCuFile, PretendDeviceMemory, PretendIOFuture, install_kvikio
from reader_support import FILE_BYTES, PAGE, buffer_of, contents, file, open_descriptors_of, shared_file

from zinfer.nvme.aligned import align_up
from zinfer.nvme.backend import Backend, Buffer, OpenFile
from zinfer.nvme.gds import GdsBackend, GdsUnavailable, choose_backend
from zinfer.nvme.reader import DiskReadError, Reader
from zinfer.nvme.threads import ThreadsBackend

MIB = 1 << 20

__all__ = ["contents", "file", "shared_file"]  # fixtures


@pytest.fixture
def kvikio(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    return install_kvikio(monkeypatch, PretendCuFile)


@pytest.fixture(params=["threads", "gds, host memory", "gds, device memory"])
def backend(request: pytest.FixtureRequest, kvikio: SimpleNamespace) -> Iterator[Backend]:
    opened = choose_backend(request.param != "threads", num_threads=3)
    yield opened
    opened.close()


@pytest.fixture
def on_device(request: pytest.FixtureRequest) -> bool:
    """Whether the `backend` of the test is to fill device memory."""
    return "device" in request.node.callspec.params["backend"]


def target(memory: memoryview, on_device: bool) -> Buffer:
    return PretendDeviceMemory(memory) if on_device else memory


@given(start=st.integers(0, 41), num_pages=st.integers(1, 41), block_pages=st.integers(1, 9))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_requests_give_the_bytes_up_to_the_end_and_their_number(
    backend: Backend, on_device: bool, shared_file: Path, contents: bytes, start: int, num_pages: int, block_pages: int
) -> None:
    opened = backend.open(shared_file)
    memory = buffer_of(num_pages * PAGE)
    expected = contents[start * PAGE : (start + num_pages) * PAGE]
    assert opened.start(target(memory, on_device), start * PAGE).result(timeout=30) == len(expected)
    assert memory[: len(expected)] == expected
    opened.close()


def test_a_reader_over_any_backend(
    backend: Backend, on_device: bool, file: Path, contents: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    reader = Reader(block_bytes=2 * PAGE, backend=backend)
    assert reader.backend is backend
    memories = [buffer_of(align_up(FILE_BYTES)) for _ in range(6)]
    futures = [reader.read_async(file, 0, target(memory, on_device), FILE_BYTES) for memory in memories]
    for future, memory in zip(futures, memories, strict=True):
        future.result(timeout=30)
        assert memory[:FILE_BYTES] == contents
    assert reader.bytes_read == 6 * FILE_BYTES
    with pytest.raises(DiskReadError, match=f"the file ends after {FILE_BYTES} bytes"):
        reader.read(file, 36 * PAGE, target(buffer_of(2 * PAGE), on_device))
    with pytest.raises(ValueError, match="is not a multiple of 4096"):
        reader.read(file, 0, target(buffer_of(2 * PAGE)[:100], on_device))
    os.truncate(file, PAGE)
    with pytest.raises(DiskReadError, match="the file has changed since it was opened") as caught:
        reader.read(file, 0, target(memories[0], on_device))
    assert caught.value.errno == errno.ESTALE
    reader.close()
    assert open_descriptors_of(file) == 0
    with pytest.raises(RuntimeError, match="closed"):
        reader.read(file, 0, target(memories[0], on_device))
    assert caplog.records == []


def test_files_that_cannot_be_opened(backend: Backend, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file") as caught:
        backend.open(tmp_path / "gone.bin")
    assert caught.value.errno == errno.ENOENT


def test_a_failure_of_kvikio_says_file_offset_and_its_words(
    file: Path, kvikio: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Reader(block_bytes=2 * PAGE, backend=GdsBackend(num_threads=2))
    memory = PretendDeviceMemory(buffer_of(8 * PAGE))
    with monkeypatch.context() as patched:

        def fail(self: PretendIOFuture) -> int:
            raise RuntimeError("cuFile error: GPU page pinning failed")

        patched.setattr(PretendIOFuture, "get", fail)
        with pytest.raises(DiskReadError, match=r"data\.bin: reading at byte \d+: kvikio: cuFile error: GPU") as caught:
            reader.read(file, 0, memory)
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(file))
    reader.read(file, 0, memory)
    reader.close()
    assert open_descriptors_of(file) == 0


def test_a_file_that_cufile_refuses_leaves_no_descriptor(
    file: Path, kvikio: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: PretendCuFile, path: Path) -> None:
        raise RuntimeError("cuFile handle registration failed")

    monkeypatch.setattr(PretendCuFile, "__init__", refuse)
    reader = Reader(backend=GdsBackend(num_threads=2))
    with pytest.raises(DiskReadError, match=r"data\.bin: reading at byte 0: kvikio: cuFile handle registration failed"):
        reader.read(file, 0, buffer_of(PAGE))
    assert open_descriptors_of(file) == 0
    reader.close()


def test_kvikio_is_given_as_many_threads_as_requests(kvikio: SimpleNamespace) -> None:
    """Its own default is one, whatever is under way."""
    GdsBackend(num_threads=6).close()
    assert kvikio.settings == {"num_threads": 6}


def test_gds_is_used_where_it_works_and_wanted(kvikio: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    for use_gds, expected in ((True, GdsBackend), (False, ThreadsBackend)):
        chosen = choose_backend(use_gds, num_threads=2)
        assert type(chosen) is expected
        assert chosen.reads_device_memory == use_gds
        chosen.close()
    assert caplog.records == []


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("package", r"kvikio cannot be imported \(.*\); pip install '\.\[gds\]'"),
        ("library", r"kvikio cannot be imported \(libcufile\.so\.0.*\); pip install '\.\[gds\]'"),
        ("cufile", "kvikio does not use cuFile here; install libcufile"),
        ("driver", "the nvidia-fs driver is not loaded; load NVIDIA's driver with `modprobe nvidia-fs`"),
    ],
)
def test_without_gds_threads_read_and_one_warning_says_what_helps(
    file: Path,
    contents: bytes,
    kvikio: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    missing: str,
    words: str,
) -> None:
    kvikio.compatibility, kvikio.driver = missing == "cufile", missing != "driver"
    if missing == "package":
        monkeypatch.setitem(sys.modules, "kvikio", None)
    if missing == "library":
        monkeypatch.delitem(sys.modules, "kvikio")
        (file.parent / "kvikio.py").write_text("raise RuntimeError('libcufile.so.0: cannot open shared object file')")
        monkeypatch.syspath_prepend(file.parent)
    with caplog.at_level(logging.DEBUG):
        reader = Reader(backend=choose_backend(True, num_threads=2))
    assert type(reader.backend) is ThreadsBackend
    [said] = caplog.records
    assert said.levelno == logging.WARNING
    assert "GPUDirect Storage is not used" in said.getMessage()
    with pytest.raises(GdsUnavailable, match=words):
        raise GdsUnavailable(said.getMessage())
    buffer = buffer_of(2 * PAGE)
    reader.read(file, 0, buffer)
    assert buffer == contents[: 2 * PAGE]
    reader.close()


class FromMemory(Backend):
    """A backend of a few lines: files held in memory, requests done before `start` returns."""

    name = "memory"
    reads_device_memory = False

    def __init__(self, in_memory: bool = False) -> None:
        self.closed = 0
        self.started: list[int] = []
        self._in_memory = in_memory

    def open(self, path: Path) -> OpenFile:
        return HeldFile(path, self._in_memory, self.started)

    def close(self) -> None:
        self.closed += 1


class HeldFile(OpenFile):
    direct = False

    def __init__(self, path: Path, in_memory: bool, started: list[int]) -> None:
        self.path, self._in_memory, self._started = path, in_memory, started
        self._content = path.read_bytes()

    def in_memory(self, offset: int, num_bytes: int) -> bool:
        return self._in_memory

    def start(self, buffer: Buffer, offset: int) -> "Future[int]":
        assert isinstance(buffer, memoryview)
        self._started.append(buffer.nbytes)
        part = self._content[offset : offset + buffer.nbytes]
        buffer[: len(part)] = part
        done: Future[int] = Future()
        done.set_result(len(part))
        return done

    def close(self) -> None:
        self._content = b""


def test_the_contract_is_all_that_a_reader_asks_for(file: Path, contents: bytes) -> None:
    backend = FromMemory()
    reader = Reader(block_bytes=PAGE, backend=backend)
    buffer = buffer_of(8 * PAGE)
    reader.read(file, PAGE, buffer)
    assert buffer == contents[PAGE : 9 * PAGE]
    assert (reader.bytes_read, reader.buffered_files) == (8 * PAGE, [file])
    reader.close()
    assert backend.closed == 1


@pytest.mark.parametrize(
    ("in_memory", "block", "expected"),
    [
        (False, MIB, [MIB] * 8),
        (True, MIB, [4 * MIB] * 2),
        (True, MIB // 2, [MIB // 2] * 16),
        (True, 8 * MIB, [8 * MIB]),
    ],
)
def test_bytes_in_memory_are_copied_in_large_requests(
    tmp_path: Path, in_memory: bool, block: int, expected: list[int]
) -> None:
    (tmp_path / "data.bin").write_bytes(bytes(8 * MIB))
    backend = FromMemory(in_memory)
    with closing(Reader(block_bytes=block, backend=backend)) as reader:
        reader.read(tmp_path / "data.bin", 0, buffer_of(8 * MIB))
    assert backend.started == expected


def test_threads_fill_host_memory_only(file: Path) -> None:
    reader = Reader()
    with pytest.raises(AssertionError, match="host memory only"):
        reader.read(file, 0, PretendDeviceMemory(buffer_of(PAGE)))
    reader.close()


@pytest.mark.gpu
def test_gds_fills_a_tensor_on_the_device(tmp_path: Path, contents: bytes) -> None:
    """The real thing; what keeps it from running is the reason of the skip."""
    if importlib.util.find_spec("kvikio") is None:
        pytest.skip("kvikio is absent: pip install '.[gds]'")
    try:
        backend = GdsBackend(num_threads=4)
    except GdsUnavailable as reason:
        pytest.skip(str(reason))
    path = tmp_path / "large.bin"
    path.write_bytes(contents * 200)
    num_bytes = path.stat().st_size
    tensor = torch.zeros(align_up(num_bytes), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    reader = Reader(backend=backend, block_bytes=1 << 20)
    reader.read(path, 0, tensor, required=num_bytes)
    assert bytes(tensor[:num_bytes].cpu().numpy()) == contents * 200
    assert reader.bytes_read == num_bytes
    memory = memoryview(mmap.mmap(-1, PAGE))
    reader.read(path, PAGE, memory)
    assert memory == contents[PAGE : 2 * PAGE]
    reader.close()
