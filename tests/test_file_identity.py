"""A file that changes or vanishes under a reader is noticed with the next read, and said in words."""

import errno
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reader_support import FILE_BYTES, PAGE, age, buffer_of, contents, file, open_descriptors_of, reader

from zinfer.nvme.file_identity import FileIdentity
from zinfer.nvme.reader import DiskReadError, Reader

__all__ = ["contents", "file", "reader"]  # fixtures


def write_in_place(path: Path) -> None:
    with path.open("r+b") as opened:
        opened.write(b"other")


def truncate(path: Path) -> None:
    os.truncate(path, FILE_BYTES - 10)


def append(path: Path) -> None:
    with path.open("ab") as opened:
        opened.write(b"more")


def replace_by_rename(path: Path) -> None:
    """The new file has the old one's size and times."""
    other = path.with_suffix(".new")
    shutil.copy2(path, other)
    os.replace(other, path)


CHANGES = {
    write_in_place: "last written at 20.* then, at 20.* now",
    truncate: f"{FILE_BYTES} bytes then, {FILE_BYTES - 10} now",
    append: f"{FILE_BYTES} bytes then, {FILE_BYTES + 4} now",
    replace_by_rename: "another file is in its place",
}

every_change = pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)


@every_change
def test_a_change_while_open_is_seen_by_the_next_read(
    file: Path, reader: Reader, change: Callable[[Path], None]
) -> None:
    age(file)
    buffer = buffer_of(2 * PAGE)
    reader.read(file, 0, buffer)
    change(file)
    for _ in range(2):
        with pytest.raises(
            DiskReadError, match=rf"data\.bin: reading at byte {4 * PAGE}: the file has changed"
        ) as caught:
            reader.read(file, 4 * PAGE, buffer)
        assert (caught.value.errno, caught.value.filename, caught.value.offset) == (errno.ESTALE, str(file), 4 * PAGE)
        assert re.search(
            rf"since it was opened \({CHANGES[change]}\); start again with the new file", str(caught.value)
        )


@every_change
def test_a_change_since_the_headers_were_parsed_is_seen_at_open(file: Path, change: Callable[[Path], None]) -> None:
    age(file)
    expected = {file: FileIdentity.of(file)}
    for changed in (False, True):
        if changed:
            change(file)
        reader = Reader(expected=expected)
        try:
            future = reader.read_async(file, 0, buffer_of(PAGE))
            if changed:
                with pytest.raises(DiskReadError, match=CHANGES[change]) as caught:
                    future.result(timeout=30)
                assert caught.value.errno == errno.ESTALE
                assert (reader.bytes_read, open_descriptors_of(file)) == (0, 0), "nothing of the new file is read"
            else:
                future.result(timeout=30)
        finally:
            reader.close()


def test_a_change_while_a_read_is_under_way_is_seen_by_that_read(
    file: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    age(file)
    real = os.preadv

    def preadv(fd: int, buffers: object, offset: int, *flags: int) -> int:
        if offset == 2 * PAGE:
            write_in_place(file)
        return real(fd, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(DiskReadError, match="the file has changed since it was opened"):
        reader.read(file, 0, buffer_of(4 * PAGE))


def test_a_file_replaced_between_the_look_and_the_open_is_seen(
    file: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    age(file)
    real = os.open

    def opening(path: object, *args: object, **kwargs: object) -> int:
        if path == file:
            replace_by_rename(file)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", opening)
    with pytest.raises(DiskReadError, match="another file is in its place"):
        reader.read(file, 0, buffer_of(PAGE))


def test_a_vanished_file(file: Path, contents: bytes, reader: Reader) -> None:
    buffer = buffer_of(PAGE)
    reader.read(file, 0, buffer)
    away = file.rename(file.with_suffix(".away"))
    with pytest.raises(DiskReadError, match=r"data\.bin: reading at byte 4096: the file has vanished since") as caught:
        reader.read(file, PAGE, buffer)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, str(file))
    away.rename(file)
    reader.read(file, 2 * PAGE, buffer)
    assert buffer == contents[2 * PAGE : 3 * PAGE]


def test_the_change_outranks_the_short_read_that_it_caused(file: Path, reader: Reader) -> None:
    """With blocks of a page many fail, all before the last one that looks at the file."""
    reader.read(file, 0, buffer_of(PAGE))
    os.truncate(file, 5)
    with pytest.raises(DiskReadError, match=f"the file has changed .*{FILE_BYTES} bytes then, 5 now") as caught:
        reader.read(file, 0, buffer_of(20 * PAGE))
    assert caught.value.errno == errno.ESTALE


def test_what_a_request_costs_is_one_look(file: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    reader.read(file, 0, buffer_of(PAGE))
    real, looks = FileIdentity.of, []

    def look(path: Path) -> FileIdentity:
        looks.append(path)
        return real(path)

    monkeypatch.setattr(FileIdentity, "of", look)
    for _ in range(3):
        reader.read(file, 0, buffer_of(12 * PAGE))
    assert looks == 3 * [file], "36 blocks were read"


def test_reading_is_no_change(file: Path, reader: Reader) -> None:
    for _ in range(3):
        reader.read(file, 0, buffer_of(PAGE))
        file.read_bytes()
        file.chmod(0o600)
        os.link(file, file.with_suffix(f".{len(list(file.parent.iterdir()))}"))


def test_a_link_stands_for_its_target(file: Path, contents: bytes, reader: Reader) -> None:
    age(file)
    link = file.with_name("link.bin")
    link.symlink_to(file)
    buffer = buffer_of(PAGE)
    reader.read(link, 0, buffer)
    assert buffer == contents[:PAGE]
    other = file.with_name("other.bin")
    other.write_bytes(contents)
    write_in_place(file)
    with pytest.raises(DiskReadError, match=r"link\.bin: .*last written at"):
        reader.read(link, 0, buffer)
    link.unlink()
    link.symlink_to(other)
    with pytest.raises(DiskReadError, match=r"link\.bin: .*the file has changed since it was opened"):
        reader.read(link, 0, buffer)


def test_an_identity_that_cannot_be_looked_up(file: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    reader.read(file, 0, buffer_of(PAGE))

    def refuse(path: Path) -> FileIdentity:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(FileIdentity, "of", refuse)
    with pytest.raises(DiskReadError, match=r"data\.bin: reading at byte 0: Input/output error"):
        reader.read_async(file, 0, buffer_of(PAGE)).result(timeout=30)


IDENTITIES = st.builds(
    FileIdentity,
    device=st.integers(0, 2),
    inode=st.integers(0, 2),
    num_bytes=st.integers(0, 2),
    mtime_ns=st.integers(0, 2).map(lambda number: number * 10**9),
)


@given(then=IDENTITIES, now=IDENTITIES)
def test_a_difference_says_what_differs(then: FileIdentity, now: FileIdentity) -> None:
    words = then.difference(now)
    if then.num_bytes != now.num_bytes:
        assert words == f"{then.num_bytes} bytes then, {now.num_bytes} now"
    elif (then.device, then.inode) != (now.device, now.inode):
        assert words == "another file is in its place"
    elif then != now:
        before, after = re.findall(r"1970-01-01T00:00:0(\d)", words)
        assert (int(before), int(after)) == (then.mtime_ns // 10**9, now.mtime_ns // 10**9)
