"""Whatever the homes, slots, chunks, passes and delays: a streamed model says to the bit what the resident one says."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import tiny_checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from races_support import Case, check_case

from zinfer.offload.block import Block
from zinfer.offload.staging import StagingRing
from zinfer.offload.streamer import Streamer

MOST_LAYERS = 7
STREAMED = ("host", "disk", "both")
Folders = Callable[[int], Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The checkpoint with so many layers."""
    return cache(lambda num: tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"), num_layers=num, tie=False))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("streamed", STREAMED)
@pytest.mark.parametrize("resident", [False, True], ids=["all streamed", "partly resident"])
@given(
    num_layers=st.integers(1, MOST_LAYERS),
    num_slots=st.integers(1, 4),
    chunk_pages=st.sampled_from([2, 3, 5, 12, 32]),
    num_staging=st.integers(1, 4),
    num_decodes=st.integers(0, 2),
    block_pages=st.sampled_from([1, 3, 256]),
    patient=st.booleans(),
    queued=st.booleans(),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=settings.default.max_examples // 4, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_late_copies_and_reads_change_no_bit(
    folders: Folders, device: str, streamed: str, resident: bool, num_layers: int, **drawn: Any
) -> None:
    case = Case(num_layers, streamed, resident, **drawn)
    check_case(folders(num_layers), case, device)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("num_layers", "num_slots"), [(1, 2), (2, 3), (3, 2), (5, 3), (7, 2), (7, 4)])
@pytest.mark.parametrize("streamed", STREAMED)
def test_numbers_of_blocks_that_the_slots_do_not_divide(
    folders: Folders, device: str, streamed: str, num_layers: int, num_slots: int
) -> None:
    case = Case(num_layers, streamed, resident=True, num_slots=num_slots, chunk_pages=9, patient=True, seed=num_layers)
    check_case(folders(num_layers), case, device)


def wait_and_hand_back(patched: pytest.MonkeyPatch) -> None:
    """The slot of a block is free again before the block has computed."""
    real = Streamer.wait

    def wait(streamer: Streamer, block: Block) -> dict[str, torch.nn.Parameter]:
        views = real(streamer, block)
        streamer._slots.put(streamer._held[block.index].slot)
        streamer._look_ahead()
        return views

    def release(streamer: Streamer, block: Block) -> None:
        del streamer._held[block.index]

    patched.setattr(Streamer, "wait", wait)
    patched.setattr(Streamer, "release", release)


def vacate_too_early(patched: pytest.MonkeyPatch) -> None:
    """A slot may be overwritten where the compute that uses it begins, not where it ends."""

    def release(streamer: Streamer, block: Block) -> None:
        use = streamer._held.pop(block.index)
        assert use.begin is not None
        use.slot.reusable_after = use.begin
        streamer._slots.put(use.slot)
        streamer._look_ahead()

    patched.setattr(Streamer, "release", release)


def reuse_staging_at_once(patched: pytest.MonkeyPatch) -> None:
    """The next chunk is read into a staging slot whose bytes are still to be copied."""
    real = StagingRing.put
    patched.setattr(StagingRing, "put", lambda ring, slot, reusable_after: real(ring, slot, None))


HOST = Case(5, "host", resident=False, num_slots=2, patient=True)
DISK = Case(5, "disk", resident=False, num_slots=3, patient=True)
TIGHT = Case(5, "disk", resident=False, num_slots=2, chunk_pages=2, num_staging=1, queued=True)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("plant", "case", "device"),
    [
        (wait_and_hand_back, HOST, "cpu"),
        (wait_and_hand_back, DISK, "cpu"),
        (wait_and_hand_back, replace(DISK, queued=True), "cpu"),
        (reuse_staging_at_once, TIGHT, "cpu"),
        pytest.param(wait_and_hand_back, HOST, "cuda", marks=pytest.mark.gpu),
        pytest.param(wait_and_hand_back, DISK, "cuda", marks=pytest.mark.gpu),
        pytest.param(vacate_too_early, HOST, "cuda", marks=pytest.mark.gpu),
    ],
)
def test_a_planted_bug_is_caught(
    folders: Folders, plant: Callable[[pytest.MonkeyPatch], None], case: Case, device: str
) -> None:
    """A comparison that could not fail would prove nothing."""
    check_case(folders(case.num_layers), case, device)
    with pytest.MonkeyPatch.context() as patched:
        plant(patched)
        with pytest.raises(AssertionError, match=r"pass \d+ says something else"):
            check_case(folders(case.num_layers), case, device)
