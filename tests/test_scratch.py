"""A file without a name: places keep what was written to them, a full or failing disk is told, nothing stays behind."""

import errno
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from faults_support import own_descriptors

from zinfer.nvme.memory import map_memory
from zinfer.nvme.scratch import ScratchError, ScratchFile
from zinfer.nvme.temporary_folder import is_in_use, temporary_folder

PLACE = 4096


def filled(number: int, count: int) -> memoryview:
    memory = memoryview(map_memory(count * PLACE))
    for place in range(count):
        memory[place * PLACE : (place + 1) * PLACE] = bytes([number + place & 255]) * PLACE
    return memory


def read_back(file: ScratchFile, places: list[int]) -> list[int]:
    memory = memoryview(map_memory(len(places) * PLACE))
    file.read(places, memory)
    found = [memory[begin : begin + PLACE].tobytes() for begin in range(0, memory.nbytes, PLACE)]
    assert all(len(set(each)) == 1 for each in found)
    return [each[0] for each in found]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("direct", [True, False])
def test_places_keep_what_was_written_whatever_comes_and_goes(
    tmp_path: Path, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not direct:  # as on a file system that finds it unusable at the first request
        real = os.pwritev

        def refused(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if file._set_direct(False):
                file._set_direct(True)
                raise OSError(errno.EINVAL, "Invalid argument")
            return real(fd, buffers, offset)

        monkeypatch.setattr(os, "pwritev", refused)
    file, chance = ScratchFile(tmp_path / "made" / "for it", PLACE), random.Random(3)
    kept: list[tuple[list[int], int]] = []
    written = read = 0
    for number in range(200):
        places = file.take(chance.randint(1, 9))
        assert not {place for other, _ in kept for place in other} & set(places)
        file.write(places, filled(number, len(places)))
        written += len(places) * PLACE
        kept.append((places, number))
        while len(kept) > 5:
            places, expected = kept.pop(chance.randrange(len(kept)))
            assert read_back(file, places) == [expected + place & 255 for place in range(len(places))]
            read += len(places) * PLACE
            file.give_back(places)
    assert (file.bytes_written, file.bytes_read) == (written, read)
    assert os.fstat(file._fd).st_size <= 60 * PLACE, "places are used again"
    assert os.listdir(tmp_path / "made" / "for it") == []
    file.close()
    file.close()
    assert not [name for name in own_descriptors() if "/zinfer-" in name]


def test_a_killed_process_leaves_nothing_behind(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; from zinfer.nvme.memory import map_memory\n"
        "from zinfer.nvme.scratch import ScratchFile\n"
        "file = ScratchFile(Path(sys.argv[1]), 4096)\n"
        "file.write(file.take(3), memoryview(map_memory(3 * 4096)))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False).returncode == -9
    assert os.listdir(tmp_path) == []


def test_a_disk_without_room_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = ScratchFile(tmp_path, PLACE)
    kept = file.take(2)
    found = os.statvfs(tmp_path)
    free = [5 * PLACE - 1]

    class Found:
        f_bavail, f_frsize = free[0], 1

    assert found.f_bavail
    monkeypatch.setattr(os, "fstatvfs", lambda _: Found)
    message = rf"growing: 20,480 bytes more are needed in {re.escape(str(tmp_path))}, 20,479 are free there; make room"
    with pytest.raises(ScratchError, match=message) as refused:
        file.take(5)
    assert refused.value.errno == errno.ENOSPC
    assert str(refused.value.filename).startswith(str(tmp_path))
    assert os.fstat(file._fd).st_size == 0
    file.give_back(kept)
    assert file.take(2) == kept, "what was taken before is there as before"


def test_a_disk_that_is_full_sooner_than_it_said(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path, PLACE)
    places = file.take(8)
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * PLACE + 100, former[1]))
    try:
        with pytest.raises(ScratchError, match=r"writing \d+ bytes at byte \d+: File too large; make room") as failed:
            file.write(places, filled(1, 8))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
    assert "zinfer-" in str(failed.value)
    file.write(places, filled(1, 8))
    assert read_back(file, places) == list(range(1, 9))


@pytest.mark.parametrize("name", ["pwritev", "preadv"])
def test_a_failing_disk_is_told(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = ScratchFile(tmp_path, PLACE)
    places = file.take(2)
    file.write(places, filled(1, 2))

    def broken(*args: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, name, broken)
        with pytest.raises(ScratchError, match=r"8192 bytes at byte 0: Input/output error; check the folder") as failed:
            file.write(places, filled(1, 2)) if name == "pwritev" else read_back(file, places)
    assert "zinfer-" in str(failed.value.filename)
    monkeypatch.setattr(os, name, lambda *args: 0)
    with pytest.raises(ScratchError, match="moved nothing"):
        file.write(places, filled(1, 2)) if name == "pwritev" else read_back(file, places)


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ScratchError, match="making it: ") as refused:
        ScratchFile(tmp_path / "file" / "folder", PLACE)
    assert str(tmp_path / "file") in str(refused.value)


@pytest.mark.parametrize("named", [True, False])
def test_the_folder_of_an_owner_that_was_killed_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    """The next may want a folder of another kind; a folder that is not known as one's is left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    parent = tmp_path if named else None
    assert not is_in_use(tmp_path), "no temporary folder"
    begun, go_on = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(go_on[1])  # it ends with its parent
        with temporary_folder("bench", parent) as own:
            (own / "weights").write_bytes(b"0")
            os.write(begun[1], b".")
            os.read(go_on[0], 1)
        os._exit(0)
    os.read(begun[0], 1)
    [held] = tmp_path.iterdir()
    (tmp_path / "zinfer-of-others").mkdir()
    an_hour_ago_s = time.time() - 3600
    os.utime(held, (an_hour_ago_s, an_hour_ago_s))
    with temporary_folder("serve", parent):
        assert is_in_use(held), "its owner lives"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert not is_in_use(held)
    with temporary_folder("serve", parent) as own:
        assert {each.name for each in tmp_path.iterdir()} == {own.name, "zinfer-of-others"}
    assert [each.name for each in tmp_path.iterdir()] == ["zinfer-of-others"]
