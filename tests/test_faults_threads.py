"""Threads that die or cannot be had: whoever waits for their work learns it, and nothing hangs."""

import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from checkpoints import tiny_checkpoint
from engines import config_for, engine_for
from faults_support import Fault, Holdings, failure_of, logits_of
from threads import within

import zinfer
from zinfer.nvme.file_identity import FileIdentity
from zinfer.nvme.reader import DiskReadError, Reader
from zinfer.offload.block import Block, Extent, SlabLayout
from zinfer.offload.host_memory import HostBuffer
from zinfer.offload.source import DiskSource
from zinfer.offload.staging import StagingRing
from zinfer.offload.stream import HostStream
from zinfer.offload.trace import Trace
from zinfer.offload.transfer import Target, Transfer
from zinfer.offload.transfer_lane import TransferLane

PAGE = 4096
BEYOND_CALENDARS_NS = 10**12 * 10**9  # the year 33658; file systems with 64-bit times hold it
NO_THREADS = RuntimeError("can't start new thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"), num_layers=3)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "data.bin"
    path.write_bytes(bytes(range(256)) * 16 * 8)
    return path


def buffer_of(nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, nbytes))


def refuse_threads(patched: pytest.MonkeyPatch, name: str, fault: Fault) -> None:
    """Threads of that name cannot be started, as where the system's limit is reached."""
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if name in thread.name and fault.strikes():
            raise NO_THREADS
        real(thread)

    patched.setattr(threading.Thread, "start", start)


@pytest.mark.parametrize("lane", ["disk", "host"])
@pytest.mark.parametrize("role", ["load", "send"])
def test_a_lane_whose_threads_cannot_be_started(
    folder: Path, monkeypatch: pytest.MonkeyPatch, lane: str, role: str
) -> None:
    before, fault = Holdings.now(), Fault()
    refuse_threads(monkeypatch, f"zinfer-{lane}-{role}", fault)
    error = failure_of(lambda: zinfer.init_inference(folder, config_for(folder, "mixed", 2, "cpu")), fault)
    assert error is NO_THREADS
    fault.armed = False
    with engine_for(folder, "mixed") as engine:
        logits_of(engine)
    assert Holdings.now() <= before, "the lane's other thread is still there"


def test_a_reader_whose_threads_cannot_be_started(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, fault = Holdings.now(), Fault(num_good=3)
    with engine_for(folder, "resident") as twin:
        expected = logits_of(twin)
    refuse_threads(monkeypatch, "zinfer-read", fault)
    error = failure_of(lambda: zinfer.init_inference(folder, config_for(folder, "disk", 2, "cpu")), fault)
    assert error is NO_THREADS
    fault.armed = False
    with engine_for(folder, "disk") as engine:
        assert torch.equal(logits_of(engine), expected)
    assert Holdings.now() <= before, "the threads that could be started are still there"


def test_a_request_that_failed_for_want_of_a_thread_writes_no_more(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once its future is done the caller may use the buffer again."""
    gate, begun, real = threading.Event(), threading.Event(), os.preadv

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int, *flags: int) -> int:
        begun.set()
        assert gate.wait(20)
        return real(fd, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", preadv)
    reader = Reader(num_threads=2, block_bytes=PAGE)
    try:
        first = reader.read_async(file, 0, buffer_of(PAGE))
        assert begun.wait(20)
        with monkeypatch.context() as patched:
            refuse_threads(patched, "zinfer-read", Fault())
            buffer = buffer_of(PAGE)
            second = reader.read_async(file, PAGE, buffer)
        is_refused = second.done()
        if is_refused:
            assert second.exception() is NO_THREADS
            buffer[:] = b"\xa5" * PAGE
        gate.set()
        first.result(20)
        reader.read(file, 0, buffer_of(PAGE))  # by the one thread, after whatever waited before it
        if not is_refused:  # the one thread has it in its queue
            second.result(20)
            assert bytes(buffer) == file.read_bytes()[PAGE : 2 * PAGE]
        else:
            assert bytes(buffer) == b"\xa5" * PAGE, "it was written to after its request was over"
    finally:
        gate.set()
        reader.close()


def test_a_file_dated_beyond_calendars_is_an_error_and_no_hang(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged inode may say anything."""
    reader = Reader(num_threads=1)
    real = FileIdentity.of
    try:
        reader.read(file, 0, buffer_of(PAGE))

        def of(path: Path) -> FileIdentity:
            found = real(path)
            return FileIdentity(found.device, found.inode, found.num_bytes, BEYOND_CALENDARS_NS)

        monkeypatch.setattr(FileIdentity, "of", of)
        error = reader.read_async(file, 0, buffer_of(PAGE)).exception(timeout=3)
        assert isinstance(error, DiskReadError)
        assert "has changed since" in str(error)
    finally:
        reader.close()


class FullTrace(Trace):
    """Has no room for another slice."""

    def add(self, lane: str, name: str, begin_s: float, end_s: float) -> None:
        raise MemoryError("no room for another slice")


def test_a_lane_that_cannot_trace_a_load_fails_the_transfer(file: Path) -> None:
    """Its thread goes on, and whoever waits for the transfer gets the error."""
    layout = SlabLayout.pack([("weight", torch.uint8, (PAGE,))])
    block = Block(0, "block", layout, (Extent(file, 0, PAGE, torch.uint8, 0, torch.uint8),))
    ring, reader, stream = StagingRing(), Reader(num_threads=1), HostStream()
    ring.add(HostBuffer(2 * PAGE))
    lane = TransferLane("disk", stream, ring, FullTrace())
    try:
        for _ in range(2):
            target = Target(torch.zeros(PAGE, dtype=torch.uint8), stream)
            transfer = Transfer("block", DiskSource(block, reader, 2 * PAGE), target)
            lane.submit(transfer)
            answer = within(3, lambda transfer=transfer: (transfer.failure(),))
            assert answer is not None, "it hangs"
            assert isinstance(answer[0], MemoryError)
    finally:
        lane.close()
        reader.close()
