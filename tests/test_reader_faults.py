"""A read that fails says file, place and reason, and is over when its future is."""

import errno
import os
import time
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path

import pytest
from reader_support import (
    FILE_BYTES,
    PAGE,
    POISON,
    buffer_of,
    contents,
    file,
    open_descriptors_of,
    reader,
    refuse_direct,
)

from zinfer.nvme.aligned import align_up
from zinfer.nvme.reader import DiskReadError, Reader
from zinfer.nvme.threads import ThreadsFile

__all__ = ["contents", "file", "reader"]  # fixtures


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


def test_the_lowest_of_several_errors_is_raised(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of them comes first: here the blocks end from the last one on."""
    monkeypatch.setattr(Reader, "_split", lambda *args, split=Reader._split: reversed(list(split(*args))))
    with closing(Reader(num_threads=1, block_bytes=PAGE)) as reader, pytest.raises(DiskReadError) as caught:
        reader.read(file, 36 * PAGE, buffer_of(4 * PAGE))
    assert caught.value.offset == 37 * PAGE < FILE_BYTES < 38 * PAGE


def test_a_range_wholly_beyond_the_end(file: Path, reader: Reader) -> None:
    with pytest.raises(DiskReadError, match=f"the file ends after {FILE_BYTES} bytes"):
        reader.read(file, 100 * PAGE, buffer_of(PAGE))


def test_an_empty_file(tmp_path: Path, reader: Reader) -> None:
    (tmp_path / "empty.bin").touch()
    with pytest.raises(DiskReadError, match=r"empty\.bin: reading at byte 0: the file ends after 0 bytes"):
        reader.read(tmp_path / "empty.bin", 0, buffer_of(PAGE))


def test_truncated_while_open_and_restored(file: Path, contents: bytes, reader: Reader) -> None:
    buffer = buffer_of(2 * PAGE)
    found = file.stat()
    reader.read(file, 20 * PAGE, buffer)
    os.truncate(file, 20 * PAGE + 77)
    with pytest.raises(DiskReadError, match=rf"\({FILE_BYTES} bytes then, {20 * PAGE + 77} now\)") as caught:
        reader.read(file, 20 * PAGE, buffer)
    assert caught.value.filename == str(file)
    file.write_bytes(contents)
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))
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


@pytest.mark.parametrize("direct", [True, False])
def test_a_disk_that_delivers_too_little_and_no_error(
    file: Path, contents: bytes, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    real = os.preadv
    if not direct:
        refuse_direct(monkeypatch)

    def preadv(fd: int, buffers: list[memoryview], offset: int, *flags: int) -> int:
        return 0 if offset >= 3 * PAGE else real(fd, [memoryview(buffers[0])[:PAGE]], offset, *flags)

    reader = Reader(num_threads=2, block_bytes=8 * PAGE)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(os, "preadv", preadv)
            with pytest.raises(DiskReadError, match=f"{3 * PAGE} bytes of {8 * PAGE} and no error") as caught:
                reader.read(file, 0, buffer_of(8 * PAGE))
        assert (caught.value.errno, caught.value.offset) == (errno.EIO, 0)
        buffer = buffer_of(8 * PAGE)
        reader.read(file, 0, buffer)
        assert buffer == contents[: 8 * PAGE]
    finally:
        reader.close()


@pytest.mark.parametrize("death", [SystemExit(3), KeyboardInterrupt(), MemoryError()], ids=repr)
def test_a_worker_that_dies_says_so_and_the_reader_goes_on(
    file: Path, contents: bytes, monkeypatch: pytest.MonkeyPatch, death: BaseException
) -> None:
    real = os.preadv

    def preadv(fd: int, buffers: object, offset: int, *flags: int) -> int:
        if offset % (3 * PAGE) == 0:
            raise death
        return real(fd, buffers, offset, *flags)

    reader = Reader(num_threads=2, block_bytes=PAGE)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(os, "preadv", preadv)
            futures = [reader.read_async(file, index * PAGE, buffer_of(9 * PAGE)) for index in range(6)]
            assert [future.exception(timeout=30) for future in futures] == 6 * [death], "more deaths than threads"
        buffer = buffer_of(24 * PAGE)
        reader.read_async(file, 0, buffer).result(timeout=30)
        assert buffer == contents[: 24 * PAGE]
    finally:
        reader.close()
    assert open_descriptors_of(file) == 0


def test_a_reader_closed_while_a_read_is_being_started(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks that were started are waited for; the future says why the others were not."""
    reader = Reader(num_threads=1, block_bytes=PAGE)
    real, started = ThreadsFile.start, []

    def start(opened: ThreadsFile, buffer: memoryview, offset: int) -> "Future[int]":
        if offset == 2 * PAGE:
            reader.backend.close()
        started.append(offset)
        return real(opened, buffer, offset)

    monkeypatch.setattr(ThreadsFile, "start", start)
    future = reader.read_async(file, 0, buffer_of(4 * PAGE))
    with pytest.raises(RuntimeError, match=r"closed|shutdown"):
        future.result(timeout=30)
    assert started == [0, PAGE, 2 * PAGE, 3 * PAGE]
    reader.close()


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


def test_a_closed_reader_says_so(file: Path) -> None:
    reader = Reader()
    reader.close()
    with pytest.raises((RuntimeError, ValueError, DiskReadError), match=r"closed|shutdown"):
        reader.read(file, 0, buffer_of(PAGE))
    assert open_descriptors_of(file) == 0
