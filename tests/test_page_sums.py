"""Checksums of pages: the same however a file is read, and kept with its state only once all pages were compared."""

import os
import random
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from reader_support import buffer_of
from safetensors.torch import save_file

from zinfer.nvme.aligned import ALIGNMENT_BYTES
from zinfer.nvme.reader import Reader
from zinfer.weights import Checkpoint
from zinfer.weights.page_sums import FileSums, OtherBytes, PageSums, page_sums

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


def read(checkpoint: Checkpoint, sums: PageSums, first: int = 0, count: int | None = None, block: int = 1) -> None:
    [file] = checkpoint.files
    count = num_pages(checkpoint) - first if count is None else count
    with closing(Reader(block_bytes=block * PAGE, observer=sums.watch(checkpoint))) as reader:
        reader.read(file, first * PAGE, buffer_of(count * PAGE), 0)


def recorded(checkpoint: Checkpoint) -> dict[str, FileSums]:
    sums = PageSums({}, "")
    read(checkpoint, sums)
    return sums.recorded()


def test_any_change_changes_a_page() -> None:
    """Single bits, pairs of equal bits far apart, exchanged words: what sums of products modulo 2^64 may miss."""
    chosen = random.Random(0)
    page = np.frombuffer(chosen.randbytes(PAGE), np.uint64).copy()
    [then] = page_sums(page[None])
    for _ in range(2000):
        other = page.copy()
        match chosen.randrange(3):
            case 0:
                other[chosen.randrange(512)] ^= np.uint64(1 << chosen.randrange(64))
            case 1:
                bit = np.uint64(1 << chosen.randrange(64))
                for place in chosen.sample(range(512), 2):
                    other[place] ^= bit
            case _:
                here, there = chosen.sample(range(512), 2)
                other[[here, there]] = other[[there, here]]
        assert page_sums(other[None])[0] != then
    assert page_sums(np.zeros((1, 512), np.uint64))[0] != 0


def test_pages_are_the_same_however_they_are_read(checkpoint: Checkpoint) -> None:
    whole, chosen = recorded(checkpoint), random.Random(1)
    assert 0 not in np.frombuffer(whole["model.safetensors"].sums, "<u4")
    for _ in range(5):
        sums, others, count = PageSums({}, ""), PageSums({}, ""), num_pages(checkpoint)
        for first in chosen.sample(range(count), count):
            several = min(chosen.randint(1, 9), count - first)
            read(checkpoint, chosen.choice((sums, others)), first, several, chosen.randint(1, 4))
        assert sums.merge(others.take_new()) is None
        assert others.take_new() == []
        assert sums.recorded() == whole


@pytest.mark.parametrize(("tensor", "place"), [("first", 9001), ("small", 83), ("third", 69_999)])
def test_a_page_that_differs_fails_its_read(checkpoint: Checkpoint, tensor: str, place: int) -> None:
    former = recorded(checkpoint)
    change(checkpoint, tensor, place)
    now = reopened(checkpoint)
    with pytest.raises(OtherBytes, match=rf"holds other weights .*bytes \d+ to \d+, in .*{tensor}.*; the remedy"):
        read(now, PageSums(former, "the remedy"))


def test_files_with_their_state_are_not_compared(checkpoint: Checkpoint) -> None:
    [(name, then)] = recorded(checkpoint).items()
    wrong = {name: FileSums(then.state, b"\1" * len(then.sums))}
    sums = PageSums(wrong, "")
    read(checkpoint, sums)
    assert not sums.is_changed
    touch(checkpoint)
    with pytest.raises(OtherBytes):
        read(reopened(checkpoint), PageSums(wrong, ""))


def test_a_copys_state_is_kept_once_all_pages_were_compared(checkpoint: Checkpoint) -> None:
    """Until then a change in the others is found by a later process, whichever read what."""
    former = recorded(checkpoint)
    touch(checkpoint)
    now, half = reopened(checkpoint), num_pages(checkpoint) // 2
    sums, others = PageSums(former, ""), PageSums(former, "")
    read(now, sums, 0, half)
    assert sums.recorded() == former
    read(now, others, half)
    assert sums.merge(others.take_new()) is None
    [entry] = sums.recorded().values()
    assert entry.state[1] == 0
    assert entry.sums == former["model.safetensors"].sums


def test_processes_with_different_copies_are_told_apart(checkpoint: Checkpoint) -> None:
    sums, others = PageSums({}, ""), PageSums({}, "")
    read(checkpoint, sums)
    change(checkpoint, "third")
    read(reopened(checkpoint), others)
    offset = checkpoint.tensors["third"].offset
    assert sums.merge(others.take_new()) == ("model.safetensors", offset - offset % PAGE)
