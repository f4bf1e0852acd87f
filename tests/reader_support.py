"""Shared by the reader's tests: a file in which every page differs, buffers, and an open reader."""

import errno
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from zinfer.nvme.reader import Reader

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


def age(path: Path) -> None:
    """Date the file back, so that a write shows in its time however soon it comes: the clock of files ticks slowly."""
    an_hour_ago_ns = time.time_ns() - 3600 * 10**9
    os.utime(path, ns=(an_hour_ago_ns, an_hour_ago_ns))


def open_descriptors_of(path: Path) -> int:
    """Descriptors of this process that are open on ``path``."""
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            count += os.readlink(link) == str(path)
        except FileNotFoundError:
            continue
    return count


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files cannot be opened with O_DIRECT, as on some file systems."""
    real = os.open

    def open_buffered_only(path: object, flags: int, *args: object, **kwargs: object) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_buffered_only)
