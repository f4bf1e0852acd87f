"""Checksums of what is read: a change is found whatever is read later, and a state kept only once all is compared."""

import os
import random
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reader_support import buffer_of
from safetensors.torch import save_file

from zinfer.nvme.aligned import ALIGNMENT_BYTES
from zinfer.nvme.reader import Reader
from zinfer.weights import Checkpoint
from zinfer.weights.range_sums import FileSums, OtherBytes, RangeSums

PAGE = ALIGNMENT_BYTES


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    tensors = {name: torch.randn(size, 7) for name, size in (("first", 999), ("small", 3), ("third", 2500))}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    return Checkpoint.open(tmp_path)


def reopened(checkpoint: Checkpoint) -> Checkpoint:
    return Checkpoint.open(checkpoint.folder)


def change(checkpoint: Checkpoint, tensor: str, place: int = 0) -> None:
    """Change one bit, and the time."""
    entry = checkpoint.tensors[tensor]
    data = bytearray(entry.file.read_bytes())
    data[entry.offset + place] ^= 0x80
    entry.file.write_bytes(data)


def touch(checkpoint: Checkpoint) -> None:
    [file] = checkpoint.files
    os.utime(file, ns=(0, 0))


def num_pages(checkpoint: Checkpoint) -> int:
    [identity] = checkpoint.files.values()
    return -(-identity.num_bytes // PAGE)


def read(checkpoint: Checkpoint, sums: RangeSums, first: int = 0, count: int | None = None, block: int = 1) -> None:
    """Read pages of the file in blocks of ``block`` pages."""
    [file] = checkpoint.files
    count = num_pages(checkpoint) - first if count is None else count
    with closing(Reader(block_bytes=block * PAGE, observer=sums.watch(checkpoint))) as reader:
        reader.read(file, first * PAGE, buffer_of(count * PAGE), 0)


def recorded(checkpoint: Checkpoint, block: int = 1) -> dict[str, FileSums]:
    sums = RangeSums({}, "")
    read(checkpoint, sums, block=block)
    return sums.recorded()


def ranges(sums: dict[str, FileSums]) -> set[tuple[int, int]]:
    [entry] = sums.values()
    return {(int(offset), int(size)) for offset, size, _ in np.frombuffer(entry.records, "<u8").reshape(-1, 3)}


def test_what_is_recorded_covers_what_was_read_by_any_process(checkpoint: Checkpoint) -> None:
    chosen, count = random.Random(1), num_pages(checkpoint)
    [identity] = checkpoint.files.values()
    for _ in range(5):
        sums, others = RangeSums({}, ""), RangeSums({}, "")
        for first in chosen.sample(range(count), count):
            several = min(chosen.randint(1, 9), count - first)
            read(checkpoint, chosen.choice((sums, others)), first, several, chosen.randint(1, 4))
        assert sums.merge(others.take_new()) is None
        assert others.take_new() == []
        found = ranges(sums.recorded())
        assert {byte for begin, size in found for byte in range(begin, begin + size)} == set(range(identity.num_bytes))
        again = RangeSums(sums.recorded(), "")
        read(checkpoint, again, block=chosen.randint(1, 9))
        assert ranges(again.recorded()) >= found


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(blocks=st.tuples(st.integers(1, 7), st.integers(1, 7)), place=st.integers(0, 10**9), bit=st.integers(0, 7))
def test_a_change_fails_the_reads_of_it_whatever_is_read(
    checkpoint: Checkpoint, blocks: tuple[int, int], place: int, bit: int
) -> None:
    """Ranges were recorded in blocks of one size and are read again in those of another."""
    [file] = checkpoint.files
    whole = file.read_bytes()
    former, place = recorded(checkpoint, blocks[0]), place % len(whole)
    begin = checkpoint.tensors["first"].offset
    place = max(place, begin)  # a changed header is another checkpoint
    try:
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
        now, page = reopened(checkpoint), place // PAGE
        with pytest.raises(OtherBytes, match=r"holds other weights .*bytes \d+ to \d+, in .*; the remedy"):
            read(now, RangeSums(former, "the remedy"), page, 1, blocks[1])
    finally:
        file.write_bytes(whole)


@pytest.mark.parametrize(("tensor", "place"), [("first", 9001), ("small", 83), ("third", 69_999)])
def test_a_range_that_differs_names_its_tensors(checkpoint: Checkpoint, tensor: str, place: int) -> None:
    former = recorded(checkpoint)
    change(checkpoint, tensor, place)
    now = reopened(checkpoint)
    with pytest.raises(OtherBytes, match=rf"holds other weights .*bytes \d+ to \d+, in .*{tensor}.*; the remedy"):
        read(now, RangeSums(former, "the remedy"))


def test_a_range_of_many_tensors_names_two_of_them(tmp_path: Path) -> None:
    save_file({name: torch.randn(50) for name in "abcdef"}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    former = recorded(Checkpoint.open(tmp_path))
    change(Checkpoint.open(tmp_path), "c")
    with pytest.raises(OtherBytes, match=r"in a or b or 4 more, have another checksum"):
        read(Checkpoint.open(tmp_path), RangeSums(former, ""))


def wrong(then: FileSums) -> FileSums:
    """The same ranges with other checksums."""
    records = np.frombuffer(then.records, "<u8").reshape(-1, 3).copy()
    records[:, 2] ^= 1
    return FileSums(then.state, records.tobytes())


def test_files_with_their_state_are_not_compared(checkpoint: Checkpoint) -> None:
    [(name, then)] = recorded(checkpoint).items()
    sums = RangeSums({name: wrong(then)}, "")
    read(checkpoint, sums)
    assert not sums.is_changed
    touch(checkpoint)
    with pytest.raises(OtherBytes):
        read(reopened(checkpoint), RangeSums({name: wrong(then)}, ""))


def test_a_copys_state_is_kept_once_all_ranges_were_compared(checkpoint: Checkpoint) -> None:
    """Until then a change in the others is found by a later process, whichever read what."""
    former = recorded(checkpoint)
    touch(checkpoint)
    now, half = reopened(checkpoint), num_pages(checkpoint) // 2
    sums, others = RangeSums(former, ""), RangeSums(former, "")
    read(now, sums, 0, half)
    assert sums.recorded() == former
    read(now, others, half)
    assert sums.merge(others.take_new()) is None
    [entry] = sums.recorded().values()
    assert entry.state[1] == 0
    assert entry.records == former["model.safetensors"].records


def test_processes_with_different_copies_are_told_apart(checkpoint: Checkpoint) -> None:
    sums, others = RangeSums({}, ""), RangeSums({}, "")
    read(checkpoint, sums)
    change(checkpoint, "third")
    read(reopened(checkpoint), others)
    offset = checkpoint.tensors["third"].offset
    assert sums.merge(others.take_new()) == ("model.safetensors", offset - offset % PAGE)
