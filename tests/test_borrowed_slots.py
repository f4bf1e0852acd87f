"""Blocks stay in borrowed slots, need not come again, and are gone from them the moment that they are given back."""

from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from streamer_support import HOMES, file, make_blocks, streaming, use
from streams import late_stream

from zinfer.offload.slots import Slot
from zinfer.offload.streamer import Streamer

__all__ = ["file"]  # a fixture

SPOILT = 0x5A


def lent(streamer: Streamer, nbytes: int, count: int) -> torch.Tensor:
    """Memory for so many slots, and a bit; the streamer has borrowed it."""
    stream = streamer._slots.slots[0].buffer.device
    memory = torch.full((count * nbytes + 300,), SPOILT, dtype=torch.uint8, device=stream)
    lane = next(iter(streamer._lanes.values()))
    slots = Slot.within(memory[1:], nbytes, lane.stream)
    assert len(slots) == count
    assert all(slot.buffer.data_ptr() % 256 == 0 and slot.buffer.numel() == nbytes for slot in slots)
    streamer.add_cache_slots(slots[: streamer.num_passing])
    return memory


@given(
    homes=st.lists(st.sampled_from(HOMES), min_size=1, max_size=6),
    num_slots=st.integers(1, 4),
    seed=st.integers(0, 10_000),
    synchronous=st.booleans(),
    loans=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4), st.integers(0, 8)), min_size=1, max_size=5),
    data=st.data(),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_borrowed_and_given_back_a_block_in_use_holds_its_own_bytes(
    file: Path,
    device: str,
    homes: list[str],
    num_slots: int,
    seed: int,
    synchronous: bool,
    loans: list[tuple[int, int, int]],
    data: st.DataObject,
) -> None:
    blocks, contents = make_blocks(file, len(homes)), file.read_bytes()
    with streaming(blocks, homes, num_slots, partial(late_stream, device, seed), synchronous=synchronous) as streamer:
        memories: list[torch.Tensor] = []
        for num_loans, count, num_uses in loans:
            memories = [lent(streamer, blocks[0].nbytes, count) for _ in range(num_loans)]
            order = data.draw(st.lists(st.sampled_from(blocks), min_size=num_uses, max_size=num_uses)) + blocks
            for block in order:
                use(streamer, block, contents, compute_s=0)
            assert streamer.num_passing == max(len(blocks) - num_loans * count, 0)
            streamer.remove_cache_slots()
            for memory in memories:
                memory.fill_(SPOILT)
        for block in blocks:
            use(streamer, block, contents, compute_s=0)
        # What was on its way when the memory was given back writes to it no more.
        assert all(bool((memory == SPOILT).all()) for memory in memories)


@pytest.mark.parametrize("num_borrowed", [0, 1, 3, 5, 9])
@pytest.mark.parametrize("kind", HOMES)
def test_blocks_that_stay_are_moved_once(file: Path, device: str, num_borrowed: int, kind: str) -> None:
    blocks, contents = make_blocks(file, 5), file.read_bytes()
    with streaming(blocks, [kind] * 5, 2, partial(late_stream, device, seed=1)) as streamer:
        lent(streamer, blocks[0].nbytes, num_borrowed)
        assert streamer.num_passing == max(5 - num_borrowed, 0)
        for _ in range(4):
            for block in blocks:
                use(streamer, block, contents, compute_s=0)
        for ahead in list(streamer._moving.values()):
            ahead.transfer.wait()
        num_passing = max(5 - num_borrowed, 0)
        num_moves = 5 - num_passing + 4 * num_passing
        assert streamer.bytes_arrived()[0] == num_moves * streamer._sources[0].wire_bytes


def test_blocks_from_disk_stay_before_those_from_host_memory(file: Path, device: str) -> None:
    blocks, contents = make_blocks(file, 6), file.read_bytes()
    homes = ["pinned", "disk", "pinned", "pinned", "disk", "disk"]
    with streaming(blocks, homes, 3, partial(late_stream, device, seed=3)) as streamer:
        lent(streamer, blocks[0].nbytes, 4)
        for _ in range(2):
            for block in blocks:
                use(streamer, block, contents, compute_s=0)
        cached = sorted(streamer._cached)
        assert {1, 4, 5} < set(cached)
        assert len(cached) == 4


def test_a_pass_that_is_cut_short_leaves_blocks_where_they_stay(file: Path, device: str) -> None:
    blocks, contents = make_blocks(file, 4), file.read_bytes()
    with streaming(blocks, ["pinned"] * 4, 2, partial(late_stream, device, seed=2)) as streamer:
        lent(streamer, blocks[0].nbytes, 2)
        for block in blocks:
            use(streamer, block, contents, compute_s=0)
        cached = set(streamer._cached)
        for block in blocks[:2]:
            streamer.wait(block)
        streamer.release_all()
        assert not streamer.held()
        assert set(streamer._cached) == cached
        for block in blocks:
            use(streamer, block, contents, compute_s=0)
