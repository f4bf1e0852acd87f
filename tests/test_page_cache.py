"""Bytes that the system holds in memory are copied from there; the others are read from the disk, and only once."""

import errno
import fcntl
import itertools
import os
import threading
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from reader_support import PAGE, buffer_of

from zinfer.nvme.page_cache import CachedPages, end_reading_ahead, read_ahead
from zinfer.nvme.reader import DiskReadError, Reader

NUM_PAGES = 64


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file on a disk, of which nothing is in memory."""
    path = tmp_path / "data.bin"
    path.write_bytes(os.urandom(NUM_PAGES * PAGE - 100))
    forget(path)
    return path


def forget(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        pages = CachedPages(file.fileno())
    if any(pages.hold(number * PAGE, PAGE) for number in range(NUM_PAGES)):
        pytest.skip("a file system in memory")


def remember(path: Path, offset: int, num_bytes: int) -> None:
    """Bring these pages into memory, and none ahead of them."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(file.fileno(), num_bytes, offset)


def test_what_is_held_is_told_page_by_page(file: Path) -> None:
    remember(file, 8 * PAGE, 8 * PAGE)
    with file.open("rb") as opened:
        pages = CachedPages(opened.fileno())
    assert pages.hold(8 * PAGE, 8 * PAGE)
    assert pages.hold(9 * PAGE + 5, 7)
    assert not pages.hold(7 * PAGE, 2 * PAGE)
    assert not pages.hold(15 * PAGE, 2 * PAGE)
    remember(file, 60 * PAGE, 4 * PAGE)
    assert pages.hold(60 * PAGE, 4 * PAGE), "the last page is there as far as the file has it"
    assert not pages.hold(NUM_PAGES * PAGE, PAGE), "nothing is behind the end"
    pages.close()
    assert not pages.hold(8 * PAGE, PAGE)


def test_cached_bytes_are_copied_and_the_others_read_directly(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember(file, 16 * PAGE, 8 * PAGE)
    real, found = os.preadv, Counter[bool]()

    def preadv(fd: int, buffers: list[memoryview], offset: int, *flags: int) -> int:
        count = real(fd, buffers, offset, *flags)
        found[bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)] += -(-count // PAGE)
        return count

    monkeypatch.setattr(os, "preadv", preadv)
    reader, buffer = Reader(num_threads=4, block_bytes=4 * PAGE), buffer_of(NUM_PAGES * PAGE)
    num_bytes = file.stat().st_size
    reader.read(file, 0, buffer, required=num_bytes)
    assert found == {True: NUM_PAGES - 8, False: 8}
    with file.open("rb") as opened:
        pages = CachedPages(opened.fileno())
    assert sum(pages.hold(number * PAGE, PAGE) for number in range(NUM_PAGES)) == 8, "a direct read caches nothing"
    assert buffer[:num_bytes] == file.read_bytes()
    assert reader.bytes_read == num_bytes
    reader.close()


def test_a_failed_copy_from_memory_is_a_failed_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the file was cut short, or lies on a lost network share; the others are read, and it may be again."""
    remember(file, 16 * PAGE, 8 * PAGE)
    real = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int, *flags: int) -> int:
        if not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset, *flags)

    reader, buffer = Reader(num_threads=4, block_bytes=4 * PAGE), buffer_of(NUM_PAGES * PAGE)
    num_bytes = file.stat().st_size
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", preadv)
        with pytest.raises(DiskReadError, match=f"{file}: reading at byte") as caught:
            reader.read(file, 0, buffer, required=num_bytes)
    assert 16 * PAGE <= caught.value.offset < 24 * PAGE
    assert caught.value.errno == errno.EIO
    reader.read(file, 0, buffer, required=num_bytes)
    assert buffer[:num_bytes] == file.read_bytes()
    reader.close()


def test_whoever_measures_the_disk_reads_all_of_it_from_there(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember(file, 0, NUM_PAGES * PAGE)
    monkeypatch.setattr(CachedPages, "__init__", None)
    reader, buffer = Reader(num_threads=2, uses_cache=False), buffer_of(NUM_PAGES * PAGE)
    reader.read(file, 0, buffer, required=file.stat().st_size)
    assert buffer[: file.stat().st_size] == file.read_bytes()
    reader.close()


def test_nothing_counts_as_cached_for_whom_the_system_does_not_tell(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To a user who may only read a file, mincore says that all of it is in memory."""
    remember(file, 0, NUM_PAGES * PAGE)
    monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with file.open("rb") as opened:
        assert not CachedPages(opened.fileno()).hold(0, PAGE)


def test_an_empty_file_holds_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with (tmp_path / "empty").open("rb") as opened:
        assert not CachedPages(opened.fileno()).hold(0, PAGE)


def held(*files: Path) -> list[bool]:
    found = []
    for file in files:
        with file.open("rb") as opened:
            pages = CachedPages(opened.fileno())
        found.append(pages.hold(0, file.stat().st_size))
        pages.close()
    return found


def wait_for_readers() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("zinfer-ahead"):
            thread.join()


def test_files_are_read_ahead_in_order_and_no_more_than_allowed(file: Path, tmp_path: Path) -> None:
    others = [tmp_path / name for name in ("second.bin", "third.bin")]
    for other in others:
        other.write_bytes(file.read_bytes())
    for each in (file, *others):
        forget(each)
    read_ahead([file, *others], max_bytes=file.stat().st_size + 1)
    wait_for_readers()
    assert held(file) == [True]
    assert held(others[1]) == [False]
    read_ahead([*others, tmp_path / "missing.bin"], max_bytes=1 << 30)
    wait_for_readers()
    assert held(file, *others) == [True] * 3
    end_reading_ahead()
    end_reading_ahead()


def test_a_reader_ends_what_is_read_ahead(file: Path) -> None:
    read_ahead(itertools.repeat(file), max_bytes=1 << 60)
    assert any(thread.name.startswith("zinfer-ahead") for thread in threading.enumerate())
    with closing(Reader()):
        assert not any(thread.name.startswith("zinfer-ahead") for thread in threading.enumerate())
