"""The reader delivers a file's bytes, directly or through the page cache, leaks nothing and never hangs."""

import errno
import fcntl
import logging
import os
import threading
import time
from concurrent.futures import wait
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reader_support import (
    FILE_BYTES,
    PAGE,
    buffer_of,
    contents,
    file,
    open_descriptors_of,
    reader,
    refuse_direct,
    shared_file,
)

from zinfer.nvme.aligned import align_up, covering_range
from zinfer.nvme.page_cache import CachedPages
from zinfer.nvme.reader import Reader

__all__ = ["contents", "file", "reader", "shared_file"]  # fixtures


@given(
    offset=st.integers(0, FILE_BYTES - 1),
    nbytes=st.integers(1, FILE_BYTES),
    num_pages=st.integers(1, 40),
    num_threads=st.integers(1, 8),
    direct=st.booleans(),
    cached=st.booleans(),
)
def test_any_range_equals_the_files_bytes(
    shared_file: Path,
    contents: bytes,
    offset: int,
    nbytes: int,
    num_pages: int,
    num_threads: int,
    direct: bool,
    cached: bool,
) -> None:
    nbytes = min(nbytes, FILE_BYTES - offset)
    start, covered = covering_range(offset, nbytes)
    required = offset + nbytes - start
    buffer = buffer_of(covered)
    reader = Reader(num_threads=num_threads, block_bytes=num_pages * PAGE)
    with pytest.MonkeyPatch.context() as patched:
        if not direct:
            refuse_direct(patched)
        patched.setattr(CachedPages, "hold", lambda *_: cached)
        reader.read(shared_file, start, buffer, required=required)
    try:
        assert direct or reader.buffered_files == [shared_file]
        assert buffer[offset - start : required] == contents[offset : offset + nbytes]
        assert required <= reader.bytes_read <= covered
        assert reader.bytes_read == min(covered, FILE_BYTES - start), "the margins up to the end of the file count"
    finally:
        reader.close()


def test_many_reads_at_once_land_apart(shared_file: Path, contents: bytes, reader: Reader) -> None:
    buffers = [buffer_of(3 * PAGE) for _ in range(34)]
    futures = [reader.read_async(shared_file, i * PAGE, buffer) for i, buffer in enumerate(buffers)]
    for future in futures:
        future.result(timeout=30)
    for index, buffer in enumerate(buffers):
        assert buffer == contents[index * PAGE : (index + 3) * PAGE]
    assert reader.bytes_read == 34 * 3 * PAGE


def test_callers_on_many_threads_open_a_file_once(shared_file: Path, contents: bytes) -> None:
    reader = Reader(num_threads=8, block_bytes=PAGE)
    together = threading.Barrier(8)
    wrong: list[int] = []

    def read(index: int) -> None:
        buffer = buffer_of(4 * PAGE)
        together.wait()
        reader.read(shared_file, index * PAGE, buffer)
        if buffer != contents[index * PAGE : (index + 4) * PAGE]:
            wrong.append(index)

    threads = [threading.Thread(target=read, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == []
    assert open_descriptors_of(shared_file) == 2, "for direct reads, and for what is cached"
    reader.close()
    assert open_descriptors_of(shared_file) == 0


def test_the_unaligned_tail_may_be_short_of_the_aligned_range(file: Path, contents: bytes, reader: Reader) -> None:
    start = 36 * PAGE
    buffer = buffer_of(4 * PAGE)
    reader.read(file, start, buffer, required=FILE_BYTES - start)
    assert buffer[: FILE_BYTES - start] == contents[start:]


def test_short_reads_are_gone_on_with(file: Path, contents: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int, *flags: int) -> int:
        return real(fd, [memoryview(buffers[0])[:PAGE]], offset, *flags)

    monkeypatch.setattr(os, "preadv", preadv)
    reader = Reader(num_threads=2, block_bytes=8 * PAGE)
    buffer = buffer_of(24 * PAGE)
    reader.read(file, PAGE, buffer)
    assert buffer == contents[PAGE : 25 * PAGE]
    assert reader.bytes_read == 24 * PAGE
    reader.close()


def test_odd_short_reads_of_a_buffered_file_are_gone_on_with(
    file: Path, contents: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A direct read stops at an odd count where the file ends; a buffered one may stop anywhere."""
    real = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int, *flags: int) -> int:
        return real(fd, [memoryview(buffers[0])[:1001]], offset, *flags)

    monkeypatch.setattr(os, "preadv", preadv)
    refuse_direct(monkeypatch)
    reader = Reader(num_threads=2, block_bytes=8 * PAGE)
    buffer = buffer_of(40 * PAGE)
    reader.read(file, 0, buffer, required=FILE_BYTES)
    assert buffer[:FILE_BYTES] == contents
    assert reader.bytes_read == FILE_BYTES
    reader.close()


def test_refused_direct_io_is_said_once_and_the_file_is_read(
    tmp_path: Path, contents: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = [tmp_path / f"{index}.bin" for index in range(3)]
    for path in files:
        path.write_bytes(contents)
    refuse_direct(monkeypatch)
    reader = Reader(num_threads=2, block_bytes=2 * PAGE)
    with caplog.at_level(logging.DEBUG):
        for path in files + files:
            buffer = buffer_of(align_up(FILE_BYTES))
            reader.read(path, 0, buffer, required=FILE_BYTES)
            assert buffer[:FILE_BYTES] == contents
    said = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 1
    assert str(tmp_path) in said[0].getMessage()
    assert "refuses direct I/O; reading through the page cache" in said[0].getMessage()
    assert sorted(reader.buffered_files) == files
    reader.close()


def test_direct_io_refused_at_the_first_read_falls_back_too(
    file: Path, contents: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Some file systems open with O_DIRECT and refuse to read."""
    monkeypatch.setattr(CachedPages, "hold", lambda *_: False)
    real = os.preadv

    def preadv(fd: int, buffers: object, offset: int, *flags: int) -> int:
        time.sleep(0.002)
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", preadv)
    reader = Reader(num_threads=4, block_bytes=PAGE)
    try:
        buffer = buffer_of(8 * PAGE)
        reader.read(file, 0, buffer)
        assert buffer == contents[: 8 * PAGE]
        assert reader.buffered_files == [file]
        assert [record.levelno >= logging.WARNING for record in caplog.records] == [True]
    finally:
        reader.close()
    assert open_descriptors_of(file) == 0


def test_close_with_reads_pending(file: Path, contents: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    real, begun = os.preadv, list[int]()

    def slow(fd: int, buffers: object, offset: int, *flags: int) -> int:
        begun.append(offset)
        time.sleep(0.1)
        return real(fd, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", slow)
    before = set(threading.enumerate())
    reader = Reader(num_threads=2, block_bytes=PAGE)
    buffers = [buffer_of(4 * PAGE) for _ in range(20)]
    futures = [reader.read_async(file, index * PAGE, buffer) for index, buffer in enumerate(buffers)]
    reader.close()
    assert len(begun) < 4 * len(buffers), "close waits for the reads under way alone"
    assert not wait(futures, timeout=0).not_done, "a pending read would leave its waiter hanging"
    assert set(threading.enumerate()) <= before
    assert open_descriptors_of(file) == 0
    after_close = [bytes(buffer) for buffer in buffers]
    cancelled = 0
    for index, future in enumerate(futures):
        if future.exception() is None:
            assert after_close[index] == contents[index * PAGE : (index + 4) * PAGE]
        else:
            assert "the reader was closed before the read began" in str(future.exception())
            cancelled += 1
    assert cancelled > 0
    time.sleep(0.15)
    assert [bytes(buffer) for buffer in buffers] == after_close
    reader.close()


def test_readers_come_and_go_without_a_trace(file: Path) -> None:
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        reader = Reader(num_threads=4, block_bytes=PAGE)
        reader.read(file, 0, buffer_of(8 * PAGE))
        reader.close()
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors
