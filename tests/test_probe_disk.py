"""From a path to a sweep: real files, real folders, and nothing left in them."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from probe_support import KIB, MIB, TINY

from zinfer.errors import ConfigError
from zinfer.nvme.reader import DiskReadError
from zinfer.probe import disk
from zinfer.probe.disk import DiskRate, checked_file, disk_number, measure_disk, quick_read, sweep_reads
from zinfer.probe.sizes import Sizes


def random_file(path: Path, num_bytes: int) -> Path:
    path.write_bytes(os.urandom(num_bytes))
    return path


@pytest.fixture
def swept(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files whose reads are swept, by their real paths."""
    paths: list[Path] = []

    def note(path: Path, sizes: Sizes) -> list[DiskRate]:
        paths.append(path.resolve())
        return sweep_reads(path, sizes)

    monkeypatch.setattr(disk, "sweep_reads", note)
    return paths


def test_a_file_is_read(tmp_path: Path, swept: list[Path]) -> None:
    file = random_file(tmp_path / "weights", 2 * MIB)
    found = measure_disk(file, TINY)
    assert swept == [file]
    assert (found.path, found.number) == (str(file), tmp_path.stat().st_dev)
    assert [(rate.block_bytes, rate.num_threads) for rate in found.rates] == [
        (block_bytes, depth) for block_bytes in TINY.block_sizes for depth in TINY.read_depths
    ]
    assert all(rate.operation == "read" and rate.bytes_per_s > 0 for rate in found.rates)
    assert found.best("read") == max(found.rates, key=lambda rate: rate.bytes_per_s)
    assert found.best("write") is None


def test_a_checkpoints_largest_file_is_read_and_nothing_written(tmp_path: Path, swept: list[Path]) -> None:
    random_file(tmp_path / "model-00001-of-00002.safetensors", MIB)
    largest = random_file(tmp_path / "model-00002-of-00002.safetensors", 2 * MIB)
    random_file(tmp_path / "tokenizer.bin", 3 * MIB)
    before = {path: path.stat().st_mtime_ns for path in [tmp_path, *tmp_path.iterdir()]}
    found = measure_disk(tmp_path, TINY)
    assert swept == [largest]
    assert {rate.operation for rate in found.rates} == {"read"}
    assert {path: path.stat().st_mtime_ns for path in [tmp_path, *tmp_path.iterdir()]} == before


def test_another_folder_is_written_to_and_left_empty(tmp_path: Path, swept: list[Path]) -> None:
    found = measure_disk(tmp_path, TINY)
    assert {rate.operation for rate in found.rates} == {"read", "write"}
    assert found.path == str(tmp_path)
    assert swept[0].parent == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_tiny_weights_is_written_to(tmp_path: Path, swept: list[Path]) -> None:
    tiny = random_file(tmp_path / "model.safetensors", 10)
    assert {rate.operation for rate in measure_disk(tmp_path, TINY).rates} == {"read", "write"}
    assert swept != [tiny]
    assert list(tmp_path.iterdir()) == [tiny]


def test_the_temporary_file_holds_what_was_asked_and_goes_with_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, _: Sizes) -> None:
        assert path.stat().st_size == TINY.file_bytes
        assert len(set(path.read_bytes()[: 64 * KIB])) > 200, "random bytes, or a disk that compresses would flatter"
        raise DiskReadError(5, "Input/output error", path, 0)

    monkeypatch.setattr(disk, "sweep_reads", fail)
    with pytest.raises(OSError, match="Input/output error"):
        measure_disk(tmp_path, TINY)
    assert list(tmp_path.iterdir()) == []


def test_blocks_that_a_file_does_not_hold_are_left_out(tmp_path: Path) -> None:
    file = random_file(tmp_path / "weights", 4 * 64 * KIB)
    assert {rate.block_bytes for rate in measure_disk(file, TINY).rates} == {64 * KIB}
    with pytest.raises(ConfigError, match="weights: 100000 bytes say nothing of a disk; give a file of 262144 or more"):
        measure_disk(random_file(file, 100_000), TINY)


def test_a_wrong_path_is_named_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere: No such file or directory; give a file or folder"):
        measure_disk(tmp_path / "nowhere", TINY)
    with pytest.raises(ConfigError, match="nowhere"):
        disk_number(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="empty: an empty file; give one"):
        measure_disk(random_file(tmp_path / "empty", 0), TINY)
    with pytest.raises(ConfigError, match="Is a directory; give a readable file"):
        checked_file(tmp_path)


def test_a_folder_that_cannot_be_written_to_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zinfer.probe.disk.shutil.disk_usage", lambda _: SimpleNamespace(free=4 * TINY.file_bytes))
    with pytest.raises(ConfigError, match=r"/proc: .*; give a writable folder"):
        measure_disk(Path("/proc"), TINY)


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zinfer.probe.disk.shutil.disk_usage", lambda _: SimpleNamespace(free=TINY.file_bytes))
    with pytest.raises(ConfigError, match=f"{tmp_path}: 2097152 bytes are free, too little .* 8388608 bytes, or give"):
        measure_disk(tmp_path, TINY)
    assert list(tmp_path.iterdir()) == []


def test_a_quick_read_gives_a_rate_for_files_of_any_size(tmp_path: Path) -> None:
    for num_bytes in (1, 4096, 100_001, 3 * MIB + 5):
        file = random_file(tmp_path / str(num_bytes), num_bytes)
        assert quick_read([file], 0.05) > 0


def test_a_quick_read_reads_the_largest_file_as_runs_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [random_file(tmp_path / str(num_bytes), num_bytes) for num_bytes in (3 * MIB, 5 * MIB + 100)]
    read: list[tuple[Path, int, int]] = []
    real = disk.Reader.read_async

    def read_async(self: Any, file: Path, offset: int, target: memoryview, required: int) -> Any:
        read.append((file, offset, required))
        return real(self, file, offset, target, required)

    monkeypatch.setattr(disk.Reader, "read_async", read_async)
    quick_read(files, 0.05)
    assert {file for file, _, _ in read} == {files[1]}
    assert {(offset, required) for _, offset, required in read} == {(index * MIB, MIB) for index in range(5)}


def test_a_quick_read_of_a_file_that_is_gone_says_which(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="gone"):
        quick_read([tmp_path / "gone"], 1.0)
