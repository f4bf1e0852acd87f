"""The reader delivers a file's bytes or an error that says file, place and reason; it leaks nothing and never hangs."""

import errno
import fcntl
import logging
import mmap
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zinfer.nvme.aligned import align_up, covering_range
from zinfer.nvme.reader import DiskReadError, Reader

PAGE = 4096
FILE_BYTES = 37 * PAGE + 1234
POISON = 0xA5


@pytest.fixture(scope="module")
def contents() -> bytes:
    """Bytes in which every aligned page differs from every other."""
    return b"".join(index.to_bytes(4, "big") for index in range(FILE_BYTES // 4 + 1))[:FILE_BYTES]


@pytest.fixture(scope="module")
def shared_file(tmp_path_factory: pytest.TempPathFactory, contents: bytes) -> Path:
    path = tmp_path_factory.mktemp("reader") / "data.bin"
    path.write_bytes(contents)
    return path


@pytest.fixture
def file(tmp_path: Path, contents: bytes) -> Path:
    """A file of one test's own, to be damaged."""
    path = tmp_path / "data.bin"
    path.write_bytes(contents)
    return path


@pytest.fixture
def reader() -> Iterator[Reader]:
    opened = Reader(num_threads=3, block_bytes=PAGE)
    yield opened
    opened.close()


def buffer_of(nbytes: int) -> memoryview:
    """Page-aligned bytes, poisoned."""
    memory = mmap.mmap(-1, max(nbytes, PAGE))
    view = memoryview(memory)[:nbytes]
    view[:] = bytes([POISON]) * nbytes
    return view


def open_descriptors(path: Path) -> int:
    """Descriptors of this process that are open on ``path``."""
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            count += os.readlink(link) == str(path)
        except FileNotFoundError:
            continue
    return count


@given(
    offset=st.integers(0, FILE_BYTES - 1),
    nbytes=st.integers(1, FILE_BYTES),
    num_pages=st.integers(1, 40),
    num_threads=st.integers(1, 8),
    direct=st.booleans(),
)
@settings(max_examples=80)
def test_any_range_equals_the_files_bytes(
    shared_file: Path, contents: bytes, offset: int, nbytes: int, num_pages: int, num_threads: int, direct: bool
) -> None:
    nbytes = min(nbytes, FILE_BYTES - offset)
    start, covered = covering_range(offset, nbytes)
    required = offset + nbytes - start
    buffer = buffer_of(covered)
    reader = Reader(num_threads=num_threads, block_bytes=num_pages * PAGE, direct=direct)
    try:
        reader.read(shared_file, start, buffer, required=required)
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


def test_callers_on_many_threads_share_one_descriptor(shared_file: Path, contents: bytes) -> None:
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
    assert open_descriptors(shared_file) == 1
    reader.close()
    assert open_descriptors(shared_file) == 0


def test_the_unaligned_tail_may_be_short_of_the_aligned_range(file: Path, contents: bytes, reader: Reader) -> None:
    start = 36 * PAGE
    buffer = buffer_of(4 * PAGE)
    reader.read(file, start, buffer, required=FILE_BYTES - start)
    assert buffer[: FILE_BYTES - start] == contents[start:]


@pytest.mark.parametrize("required", [FILE_BYTES - 36 * PAGE + 1, 4 * PAGE, None])
def test_a_byte_beyond_the_end_is_an_error(file: Path, reader: Reader, required: int | None) -> None:
    with pytest.raises(
        DiskReadError, match=rf"data\.bin: reading at byte \d+: the file ends after {FILE_BYTES} bytes"
    ) as caught:
        reader.read(file, 36 * PAGE, buffer_of(4 * PAGE), required=required)
    assert isinstance(caught.value, OSError)
    assert caught.value.filename == str(file)
    assert caught.value.errno
    assert 36 * PAGE <= caught.value.offset <= align_up(FILE_BYTES)


def test_a_range_wholly_beyond_the_end(file: Path, reader: Reader) -> None:
    with pytest.raises(DiskReadError, match=f"the file ends after {FILE_BYTES} bytes"):
        reader.read(file, 100 * PAGE, buffer_of(PAGE))


def test_an_empty_file(tmp_path: Path, reader: Reader) -> None:
    (tmp_path / "empty.bin").touch()
    with pytest.raises(DiskReadError, match=r"empty\.bin: reading at byte 0: the file ends after 0 bytes"):
        reader.read(tmp_path / "empty.bin", 0, buffer_of(PAGE))


def test_truncated_while_open_and_restored(file: Path, contents: bytes, reader: Reader) -> None:
    buffer = buffer_of(2 * PAGE)
    reader.read(file, 20 * PAGE, buffer)
    os.truncate(file, 20 * PAGE + 77)
    with pytest.raises(DiskReadError, match=f"the file ends after {20 * PAGE + 77} bytes") as caught:
        reader.read(file, 20 * PAGE, buffer)
    assert caught.value.filename == str(file)
    file.write_bytes(contents)
    buffer[:] = bytes(2 * PAGE)
    reader.read(file, 20 * PAGE, buffer)
    assert buffer == contents[20 * PAGE : 22 * PAGE]


def failing_preadv(monkeypatch: pytest.MonkeyPatch, at: int, code: int) -> None:
    real = os.preadv

    def preadv(fd: int, buffers: object, offset: int, *flags: int) -> int:
        if offset == at:
            raise OSError(code, os.strerror(code))
        return real(fd, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", preadv)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOMEM, errno.ESTALE])
def test_a_failed_read_says_file_offset_and_errno(
    file: Path, contents: bytes, reader: Reader, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    buffer = buffer_of(8 * PAGE)
    with monkeypatch.context() as patched:
        failing_preadv(patched, 5 * PAGE, code)
        future = reader.read_async(file, 0, buffer)
        with pytest.raises(DiskReadError) as caught:
            future.result(timeout=30)
    assert (caught.value.errno, caught.value.filename, caught.value.offset) == (code, str(file), 5 * PAGE)
    for part in (str(file), str(5 * PAGE), os.strerror(code)):
        assert part in str(caught.value)
    reader.read(file, 0, buffer)
    assert buffer == contents[: 8 * PAGE]


def test_a_failed_read_is_over_when_its_future_is(file: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller may use the buffer again once the future is done: no other part of the range still writes to it."""
    real = os.preadv

    def preadv(fd: int, buffers: object, offset: int, *flags: int) -> int:
        if offset == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        time.sleep(0.15)
        return real(fd, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", preadv)
    buffer = buffer_of(6 * PAGE)
    future = reader.read_async(file, 0, buffer)
    with pytest.raises(DiskReadError):
        future.result(timeout=30)
    buffer[:] = bytes([POISON]) * len(buffer)
    time.sleep(0.6)
    assert bytes(buffer) == bytes([POISON]) * len(buffer)


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


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def open_buffered_only(path: object, flags: int, *args: object, **kwargs: object) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_buffered_only)


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
    assert str(files[0]) in said[0].getMessage()
    assert "refuses direct I/O; reading through the page cache" in said[0].getMessage()
    assert sorted(reader.buffered_files) == files
    reader.close()


def test_direct_io_refused_at_the_first_read_falls_back_too(
    file: Path, contents: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Some file systems open with O_DIRECT and refuse to read."""
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
    assert open_descriptors(file) == 0


def test_direct_io_is_asked_for_unless_switched_off(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = os.open, []

    def opening(path: object, flags: int, *args: object, **kwargs: object) -> int:
        asked.append(bool(flags & os.O_DIRECT))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", opening)
    for direct in (True, False):
        reader = Reader(direct=direct)
        reader.read(file, 0, buffer_of(PAGE))
        assert asked[0] == direct
        assert direct or reader.buffered_files == [file]
        reader.close()
        asked.clear()


def test_a_missing_file(tmp_path: Path, reader: Reader) -> None:
    future = reader.read_async(tmp_path / "gone.bin", 0, buffer_of(PAGE))
    with pytest.raises(DiskReadError, match=r"gone\.bin: .*No such file or directory") as caught:
        future.result(timeout=30)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, str(tmp_path / "gone.bin"))
    (tmp_path / "gone.bin").write_bytes(bytes(PAGE))
    reader.read(tmp_path / "gone.bin", 0, buffer_of(PAGE))


@pytest.mark.parametrize("code", [errno.EACCES, errno.EMFILE])
def test_a_file_that_may_not_be_opened(file: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(path: object, *args: object, **kwargs: object) -> int:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(os, "open", refuse)
    future = reader.read_async(file, 0, buffer_of(PAGE))
    with pytest.raises(DiskReadError) as caught:
        future.result(timeout=30)
    assert (caught.value.errno, caught.value.filename) == (code, str(file))
    assert str(file) in str(caught.value)
    assert os.strerror(code) in str(caught.value)


def test_a_folder(tmp_path: Path, reader: Reader) -> None:
    with pytest.raises(DiskReadError) as caught:
        reader.read(tmp_path, 0, buffer_of(PAGE))
    assert caught.value.filename == str(tmp_path)


def test_unaligned_ranges_are_refused(file: Path, reader: Reader) -> None:
    page = buffer_of(2 * PAGE)
    for offset, buffer in ((1, page), (512, page), (0, page[:100])):
        with pytest.raises(
            ValueError, match=rf"data\.bin: range \({offset}, {len(buffer)}\) is not a multiple of {PAGE}"
        ):
            reader.read(file, offset, buffer)
    assert reader.bytes_read == 0


def test_an_unaligned_buffer_is_not_blamed_on_the_file_system(file: Path, reader: Reader) -> None:
    """It would take the whole file off direct I/O for good."""
    with pytest.raises((ValueError, AssertionError)):
        reader.read(file, 0, buffer_of(2 * PAGE)[8 : PAGE + 8])
    reader.read(file, 0, buffer_of(PAGE))
    assert reader.buffered_files == []


@pytest.mark.parametrize("block_bytes", [0, 100, PAGE + 512])
def test_a_block_size_that_direct_io_cannot_have(block_bytes: int) -> None:
    with pytest.raises((ValueError, AssertionError)):
        Reader(block_bytes=block_bytes)


def test_close_with_reads_pending(file: Path, contents: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def slow(fd: int, buffers: object, offset: int, *flags: int) -> int:
        time.sleep(0.05)
        return real(fd, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", slow)
    before = set(threading.enumerate())
    reader = Reader(num_threads=2, block_bytes=PAGE)
    buffers = [buffer_of(4 * PAGE) for _ in range(20)]
    futures = [reader.read_async(file, index * PAGE, buffer) for index, buffer in enumerate(buffers)]
    start_s = time.monotonic()
    reader.close()
    assert time.monotonic() - start_s < 1.5, "80 blocks of 0.05 s on 2 threads were not all waited for"
    assert not wait(futures, timeout=0).not_done, "a pending read would leave its waiter hanging"
    assert set(threading.enumerate()) <= before
    assert open_descriptors(file) == 0
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


def test_a_closed_reader_says_so(file: Path) -> None:
    reader = Reader()
    reader.close()
    with pytest.raises((RuntimeError, ValueError, DiskReadError), match=r"closed|shutdown"):
        reader.read(file, 0, buffer_of(PAGE))
    assert open_descriptors(file) == 0


def test_readers_come_and_go_without_a_trace(file: Path) -> None:
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        reader = Reader(num_threads=4, block_bytes=PAGE)
        reader.read(file, 0, buffer_of(8 * PAGE))
        reader.close()
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors
