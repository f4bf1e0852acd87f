"""The sweeps read and write real files, keep to their bounds and leave nothing; their best is what runs get."""

import errno
import itertools
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from probe_support import TINY
from reader_support import PAGE, open_descriptors_of
from threads import open_descriptors

from zinfer.config import resolve_settings
from zinfer.engine.runtime import open_reader
from zinfer.errors import ConfigError
from zinfer.nvme.reader import DiskReadError
from zinfer.probe import disk
from zinfer.probe.disk import DiskFindings, DiskRate, aio_section, measure_disk, sweep_reads, sweep_writes
from zinfer.probe.sizes import FULL_CPU, Sizes

BLOCKS = (PAGE, 4 * PAGE)
DEPTHS = (1, 3)
NUM_BYTES = 50 * PAGE + 100
POINTS = list(itertools.product(BLOCKS, DEPTHS))


def sizes(seconds: float, **changed: tuple[int, ...]) -> Sizes:
    few = replace(TINY, block_sizes=BLOCKS, read_depths=DEPTHS, write_depths=DEPTHS, seconds_per_point=seconds)
    return replace(few, **changed)  # type: ignore[arg-type]


@pytest.fixture
def large(tmp_path: Path) -> Path:
    path = tmp_path / "large.bin"
    path.write_bytes(os.urandom(NUM_BYTES))
    return path


def test_a_read_sweep_measures_every_point_within_the_file(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked, lock = os.preadv, [], threading.Lock()

    def preadv(fd: int, buffers: list[memoryview], offset: int, *flags: int) -> int:
        with lock:
            asked.append((offset, buffers[0].nbytes))
        return real(fd, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", preadv)
    descriptors, threads = open_descriptors(), threading.active_count()
    rates = sweep_reads(large, sizes(0.05))
    assert [(rate.operation, rate.block_bytes, rate.num_threads) for rate in rates] == [("read", *p) for p in POINTS]
    assert all(rate.bytes_per_s > 0 for rate in rates)
    assert {nbytes for _, nbytes in asked} == set(BLOCKS)
    assert all(offset + nbytes <= NUM_BYTES and offset % PAGE == 0 for offset, nbytes in asked)
    assert (open_descriptors(), threading.active_count()) == (descriptors, threads)


@given(
    blocks=st.lists(st.integers(1, 8).map(lambda pages: pages * PAGE), min_size=1, max_size=60),
    slack=st.integers(0, 5 * PAGE),
)
def test_no_bytes_are_taken_twice_in_a_row(blocks: list[int], slack: int) -> None:
    walk = disk._Walk(3 * max(blocks) + slack)
    taken = [(walk.take(block), block) for block in blocks]
    for (before, before_bytes), (after, after_bytes) in itertools.pairwise(taken):
        assert after >= before + before_bytes or after + after_bytes <= before
    assert all(offset >= 0 and offset + block <= walk.num_bytes for offset, block in taken)


def test_a_walk_comes_to_every_part() -> None:
    walk = disk._Walk(10 * PAGE + 5)
    assert [walk.take(2 * PAGE) // PAGE for _ in range(7)] == [0, 2, 4, 6, 8, 0, 2]


def test_a_point_begins_nothing_after_its_time(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no time at all a point is what fits into its threads, and never nothing."""
    begun = []
    monkeypatch.setattr(
        os, "preadv", lambda fd, buffers, offset, real=os.preadv: begun.append(1) or real(fd, buffers, offset)
    )
    for depth in (1, 8):
        begun.clear()
        [rate] = sweep_reads(large, sizes(0, block_sizes=(PAGE,), read_depths=(depth,)))
        assert 1 <= len(begun) <= depth + 4
        assert rate.bytes_per_s > 0


def test_refused_direct_io_shows_in_the_rates(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def opening(path: object, flags: int, *args: object, **kwargs: object) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
        return real(path, flags, *args, **kwargs)

    direct = sweep_reads(large, sizes(0))
    monkeypatch.setattr(os, "open", opening)
    refused = sweep_reads(large, sizes(0))
    assert [rate.direct for rate in refused] == 4 * [False]
    assert len({rate.direct for rate in direct}) == 1


def test_a_file_too_small_to_say_anything(large: Path) -> None:
    with pytest.raises(ConfigError, match=rf"large\.bin: {NUM_BYTES} bytes say nothing.*file of {52 * PAGE} or more"):
        sweep_reads(large, sizes(0, block_sizes=(13 * PAGE,)))
    assert {rate.block_bytes for rate in sweep_reads(large, sizes(0, block_sizes=(PAGE, 13 * PAGE)))} == {PAGE}
    with pytest.raises(FileNotFoundError, match=r"gone\.bin"):
        sweep_reads(large.with_name("gone.bin"), sizes(0))


def test_a_disk_that_fails_ends_the_sweep(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    threads = threading.active_count()
    with pytest.raises(DiskReadError, match=r"large\.bin: reading at byte \d+: Input/output error"):
        sweep_reads(large, sizes(0.05))
    assert threading.active_count() == threads
    assert open_descriptors_of(large) == 0


def test_a_write_sweep_writes_real_bytes_within_the_file(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = os.pwrite, []

    def pwrite(fd: int, part: memoryview, offset: int) -> int:
        count = real(fd, part, offset)
        asked.append((offset, count, len(set(bytes(part[:PAGE])))))
        return count

    monkeypatch.setattr(os, "pwrite", pwrite)
    descriptors, threads = open_descriptors(), threading.active_count()
    rates = sweep_writes(large, sizes(0.05))
    assert [(rate.operation, rate.block_bytes, rate.num_threads) for rate in rates] == [("write", *p) for p in POINTS]
    assert all(rate.bytes_per_s > 0 for rate in rates)
    assert large.stat().st_size == NUM_BYTES
    assert all(distinct > 200 for _, _, distinct in asked), "bytes that a disk could compress away"
    assert all(offset + count <= NUM_BYTES and offset % PAGE == 0 for offset, count, _ in asked)
    assert (open_descriptors(), threading.active_count()) == (descriptors, threads)


def test_a_write_that_fails_leaves_nothing_and_names_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwrite", fail)
    descriptors, threads = open_descriptors(), threading.active_count()
    with pytest.raises(OSError, match=rf"Input/output error: 'a temporary file in {tmp_path}'") as caught:
        measure_disk(tmp_path, TINY)
    assert caught.value.errno == errno.EIO
    assert list(tmp_path.iterdir()) == []
    assert (open_descriptors(), threading.active_count()) == (descriptors, threads)


def test_writes_through_the_page_cache_show_in_the_rates(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def opening(path: object, flags: int, *args: object, **kwargs: object) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", opening)
    assert [rate.direct for rate in sweep_writes(large, sizes(0, write_depths=(2,)))] == [False, False]


RATES = st.lists(
    st.builds(
        DiskRate,
        operation=st.sampled_from(["read", "write"]),
        block_bytes=st.sampled_from(BLOCKS),
        num_threads=st.sampled_from(DEPTHS),
        bytes_per_s=st.sampled_from([1.0, 2.0]),
        direct=st.booleans(),
    )
)


@given(rates=RATES)
def test_the_best_is_the_fastest_with_the_least_under_way(rates: list[DiskRate]) -> None:
    reads = [rate for rate in rates if rate.operation == "read"]
    found = DiskFindings("/", 1, tuple(rates)).best("read")
    if found is None:
        assert not reads
        return
    assert found in reads
    for rate in reads:
        assert rate.bytes_per_s <= found.bytes_per_s
        if rate.bytes_per_s == found.bytes_per_s:
            assert rate.block_bytes * rate.num_threads >= found.block_bytes * found.num_threads


@pytest.mark.parametrize(
    ("block_bytes", "num_threads"), list(itertools.product(FULL_CPU.block_sizes, FULL_CPU.read_depths))
)
def test_the_printed_section_leads_back_to_the_setting(block_bytes: int, num_threads: int) -> None:
    section = aio_section(DiskRate("read", block_bytes, num_threads, 1e9, True))
    reader = open_reader(resolve_settings(section).aio, {}, on_cuda=False)
    assert (reader.block_bytes, reader.backend._pool.num_threads) == (block_bytes, num_threads)  # type: ignore[attr-defined]
    reader.close()
