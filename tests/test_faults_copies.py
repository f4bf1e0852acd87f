"""Copies that are still under way when something fails: they land in memory that is somebody else's by then.

The copy streams here queue their work as CUDA streams do, so that the CPU shows what a device would do.
"""

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from checkpoints import tiny_checkpoint
from engines import blocks_of, engine_for
from faults_support import Fault, Preadv, ReadEffect, failing_reads, failure_of, logits_of, read_error
from races_support import Case, QueuedHostStream, compute_last, late_streams

import zinfer
from zinfer.config import resolve_settings
from zinfer.nvme.aligned import align_down
from zinfer.nvme.reader import DiskReadError
from zinfer.offload.block import Block, Tier
from zinfer.offload.stream import CopyStream

NUM_LAYERS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"), num_layers=NUM_LAYERS, tie=False)


def all_but_first_chunk(block: Block) -> ReadEffect:
    """Fails every read but the first one of the block, so that its first copies are under way when it fails."""
    first = align_down(min(extent.offset for extent in block.extents))

    def read(real: Preadv, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return real(fd, buffers, offset) if offset == first else read_error(real, fd, buffers, offset)

    return read


def test_a_failed_load_returns_after_its_copies(folder: Path) -> None:
    """Resident slabs go back to the device with the exception: nothing may be written to them any more."""
    offload = {"buffer_size": 2048, "buffer_count": 64}  # of two pages each: nobody waits for a free one
    config = {"zero_optimization": {"offload_param": offload}, "zinfer": {"device": "cpu"}}
    with late_streams("cpu", 0, queued=True) as (open_stream, opened):

        def slow(device: torch.device) -> QueuedHostStream:
            stream = open_stream(device)
            assert isinstance(stream, QueuedHostStream)
            stream.delay_s = lambda: 0.3
            return stream

        fault = Fault()
        with failing_reads(all_but_first_chunk(blocks_of(folder)[0]), fault):
            settings = resolve_settings(config)
            error = failure_of(lambda: zinfer.InferenceEngine(folder, settings, open_stream=slow), fault)
            assert isinstance(error, DiskReadError)
        assert not any(stream.num_under_way for stream in opened)


def test_copies_of_a_failed_move_land_before_the_slot_is_filled_again(folder: Path) -> None:
    """The next block comes from the other tier, on another stream: it must wait for them too."""
    case = Case(NUM_LAYERS, "both", resident=False, num_slots=1, chunk_pages=2, num_staging=64)
    with engine_for(folder, "resident") as twin:
        expected = logits_of(twin)
    with late_streams("cpu", 0, queued=True) as (open_stream, _):
        engine = zinfer.InferenceEngine(folder, resolve_settings(case.config(folder, "cpu")), open_stream=open_stream)
        assert engine._runtime is not None
        homes, from_disk = engine.plan.homes, engine._runtime._lanes[Tier.DISK].stream
        assert (homes[0].tier, homes[1].tier) == (Tier.HOST, Tier.DISK)
        assert isinstance(from_disk, QueuedHostStream)
        assert torch.equal(logits_of(engine), expected)
        gate, fault = threading.Event(), Fault()
        with failing_reads(all_but_first_chunk(blocks_of(folder)[1]), fault):
            from_disk.delay_s = lambda: float(not gate.wait(30))  # the first chunk's copies are held up
            threading.Timer(2, gate.set).start()  # for whoever waits for them, as it may
            assert isinstance(failure_of(lambda: logits_of(engine), fault), DiskReadError)

        def let_land(*args: object) -> None:
            gate.set()
            from_disk.mark().synchronize()

        engine.module.model.embed_tokens.register_forward_pre_hook(let_land)
        try:
            assert torch.equal(logits_of(engine), expected)
        finally:
            gate.set()
            engine.destroy()


@dataclass
class Storm:
    """Strikes now and then while it blows."""

    chance: random.Random
    blows: bool = False
    num_struck: int = 0

    def strikes(self, share: float) -> bool:
        struck = self.blows and self.chance.random() < share
        self.num_struck += struck
        return struck

    def over(self, stream: CopyStream, share: float) -> CopyStream:
        """The stream, of which that share of the copies fails."""
        real = stream.copy

        def copy(target: torch.Tensor, source: torch.Tensor) -> None:
            if self.strikes(share):
                raise torch.OutOfMemoryError
            real(target, source)

        stream.copy = copy  # type: ignore[method-assign]
        return stream


def answer(engine: zinfer.InferenceEngine) -> torch.Tensor | None:
    """The logits of a pass, or None where a fault struck it."""
    try:
        return logits_of(engine)
    except (DiskReadError, torch.OutOfMemoryError):
        return None


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("streamed", "share"), [("host", 0.2), ("disk", 0.01), ("both", 0.01)])
@pytest.mark.parametrize("seed", range(4))
def test_in_a_storm_of_faults_every_answer_that_comes_is_exact(
    folder: Path, streamed: str, share: float, seed: int
) -> None:
    """Reads and copies fail in any part of any move, guesses included, which are made again when they are needed."""
    storm = Storm(random.Random(seed))
    case = Case(NUM_LAYERS, streamed, resident=False, num_slots=1 + seed, chunk_pages=3, num_staging=2)
    with engine_for(folder, "resident") as twin:
        expected = logits_of(twin)

    def read(real: Preadv, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return read_error(real, fd, buffers, offset) if storm.strikes(2 * share) else real(fd, buffers, offset)

    with late_streams("cpu", seed, queued=True) as (open_stream, _), failing_reads(read, Fault()):
        settings = resolve_settings(case.config(folder, "cpu"))
        engine = zinfer.InferenceEngine(
            folder, settings, open_stream=lambda device: storm.over(open_stream(device), share)
        )
        try:
            compute_last(engine)
            storm.blows = True
            answers = [answer(engine) for _ in range(25)]
            storm.blows = False
            assert torch.equal(logits_of(engine), expected)
        finally:
            storm.blows = False
            engine.destroy()
    came = [logits for logits in answers if logits is not None]
    print(f"{storm.num_struck} faults; {len(came)} of {len(answers)} passes came through")
    assert storm.num_struck > 0
    assert came
    assert all(torch.equal(logits, expected) for logits in came)
