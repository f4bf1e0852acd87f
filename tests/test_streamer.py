"""Whatever the order of use, the number of slots, the homes and the delays: between `wait` and `release` a block's
tensors hold its own bytes."""

import os
import threading
import time
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
from faults_support import Fault, Preadv, failing_reads, read_error
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from streamer_support import HOMES, file, make_blocks, streaming, use
from streams import late_stream
from threads import within

from zinfer.nvme.reader import DiskReadError
from zinfer.offload.access_predictor import AccessPredictor
from zinfer.offload.block import Tier
from zinfer.offload.host_memory import HostBuffer
from zinfer.offload.stream import HostStream
from zinfer.offload.transfer import Transfer
from zinfer.offload.transfer_lane import LaneClosed, TransferLane

__all__ = ["file"]  # a fixture


class PinnedOnlyStream(HostStream):
    """Asks for pinned memory as a CUDA device does."""

    needs_pinned = True


@given(
    homes=st.lists(st.sampled_from(HOMES), min_size=1, max_size=7),
    num_slots=st.integers(1, 4),
    seed=st.integers(0, 10_000),
    synchronous=st.booleans(),
    chunk_bytes=st.sampled_from([8192, 12288, 65536]),
    num_staging=st.integers(1, 4),
    data=st.data(),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_block_in_use_holds_its_own_bytes(
    file: Path,
    device: str,
    homes: list[str],
    num_slots: int,
    seed: int,
    synchronous: bool,
    chunk_bytes: int,
    num_staging: int,
    data: st.DataObject,
) -> None:
    blocks = make_blocks(file, len(homes))
    uses = data.draw(st.lists(st.sampled_from(range(len(homes))), max_size=12)) + 2 * list(range(len(homes)))
    contents = file.read_bytes()
    options = {"synchronous": synchronous, "chunk_bytes": chunk_bytes, "num_staging": num_staging}
    with streaming(blocks, homes, num_slots, partial(late_stream, device, seed), **options) as streamer:
        for index in uses:
            use(streamer, blocks[index], contents, compute_s=0.0005 * (seed % 3))
        assert streamer.bytes_arrived()[0] >= len(uses) * min(
            sum(extent.nbytes for extent in block.extents) for block in blocks
        )


@pytest.mark.sampled(5)
@pytest.mark.parametrize("num_blocks", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("num_slots", [2, 3, 4])
@pytest.mark.parametrize("kind", HOMES)
def test_every_pass_moves_every_block_once(file: Path, device: str, num_blocks: int, num_slots: int, kind: str) -> None:
    blocks = make_blocks(file, num_blocks)
    contents = file.read_bytes()
    num_slots = min(num_slots, num_blocks)
    with streaming(blocks, [kind] * num_blocks, num_slots, partial(late_stream, device, seed=1)) as streamer:
        for _ in range(3):
            for block in blocks:
                use(streamer, block, contents, compute_s=0)
        for ahead in list(streamer._moving.values()):
            ahead.transfer.wait()
            ahead.transfer.sent().synchronize()
        sources = streamer._sources.values()
        wire_bytes, read_bytes = sum(each.wire_bytes for each in sources), sum(each.read_bytes for each in sources)
        # Not what was moved ahead for the next pass.
        assert streamer.bytes_arrived() == (3 * wire_bytes, 3 * read_bytes)
        assert (read_bytes >= wire_bytes) == (kind == "disk")


def test_held_blocks_of_an_aborted_pass_are_let_go(file: Path, device: str) -> None:
    blocks = make_blocks(file, 5)
    contents = file.read_bytes()
    with streaming(
        blocks, ["disk", "host", "disk", "pinned", "disk"], 2, partial(late_stream, device, seed=2)
    ) as streamer:
        streamer.wait(blocks[0])
        streamer.wait(blocks[1])
        with pytest.raises(RuntimeError, match=r"all 2 device slots are in use at once; raise zinfer\.num_slots"):
            streamer.wait(blocks[3])
        streamer.release_all()
        for block in blocks:
            use(streamer, block, contents, compute_s=0)


def test_a_file_that_changes_is_seen_and_the_streamer_goes_on_once_it_is_mended(
    tmp_path: Path, file: Path, device: str
) -> None:
    short = tmp_path / "short.bin"
    short.write_bytes(file.read_bytes())
    blocks = make_blocks(short, 6)
    contents, found = short.read_bytes(), short.stat()
    with streaming(blocks, ["disk"] * 6, 2, partial(late_stream, device, seed=3)) as streamer:
        use(streamer, blocks[0], contents, compute_s=0)
        end = blocks[5].extents[0].offset + 8
        with short.open("r+b") as opened:
            opened.truncate(end)

        def use_the_others() -> None:
            for block in blocks[1:]:
                use(streamer, block, contents, compute_s=0)

        with pytest.raises(DiskReadError, match=r"short\.bin: reading at byte \d+: the file has changed since"):
            use_the_others()
        with short.open("r+b") as opened:
            opened.seek(end)
            opened.write(contents[end:])
        os.utime(short, ns=(found.st_atime_ns, found.st_mtime_ns))
        streamer.release_all()
        for block in blocks:
            use(streamer, block, contents, compute_s=0)


def test_a_guess_that_fails_while_it_is_waited_for_is_made_again(
    file: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was wrong when it was made is over by then; a read that was begun at that time only ends late."""
    blocks = make_blocks(file, 3)
    contents = file.read_bytes()
    begun, awaited, fault = threading.Event(), threading.Event(), Fault(armed=False)
    wait = Transfer.wait

    def fail_late(real: Preadv, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        begun.set()
        assert awaited.wait(20)
        return read_error(real, fd, buffers, offset)

    def let_fail(move: Transfer) -> None:
        if move.name == blocks[1].name:
            assert begun.wait(20)
            fault.armed = False
            awaited.set()
        wait(move)

    with (
        failing_reads(fail_late, fault),
        streaming(blocks, ["host", "disk", "host"], 2, partial(late_stream, device, seed=4)) as streamer,
    ):
        fault.armed = True
        monkeypatch.setattr(Transfer, "wait", let_fail)
        for block in blocks:
            use(streamer, block, contents, compute_s=0)
    assert awaited.is_set()


def test_a_guess_that_a_closed_lane_gave_up_is_not_made_again(file: Path) -> None:
    """Nobody would carry it, and the wait for it never end."""
    blocks, fault, lanes = make_blocks(file, 2), Fault(armed=False), list[TransferLane]()

    def wait_for_the_end(real: Preadv, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        while not lanes[0]._closing:
            time.sleep(0.001)
        return real(fd, buffers, offset)

    def close() -> None:
        for lane in lanes:
            lane.close()

    with failing_reads(wait_for_the_end, fault), streaming(blocks, ["disk", "disk"], 2, HostStream) as streamer:
        fault.armed = True
        lanes += [streamer._lanes[tier] for tier in (Tier.DISK, Tier.HOST)]
        for block in blocks:
            streamer.prefetch(block)

        def fail() -> bool:
            with pytest.raises(LaneClosed, match="block 1 was on its way"):
                streamer.wait(blocks[1])
            return True

        closer = threading.Timer(0.1, close)
        closer.start()
        assert within(20, fail)
        closer.join()


def test_a_refused_pin_streams_as_planned(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan has no staging slot for memory that was to be pinned: whoever asked for one would wait for ever."""
    monkeypatch.setattr(HostBuffer, "_register", lambda buffer, begin, nbytes: False)
    blocks = make_blocks(file, 4)
    contents = file.read_bytes()

    def two_passes() -> bool:
        with streaming(blocks, ["pinned"] * 4, 2, PinnedOnlyStream) as streamer:
            assert all(not source.staged for source in streamer._sources.values())
            for block in 2 * blocks:
                use(streamer, block, contents, compute_s=0)
        return True

    assert within(20, two_passes), "it hangs or fails"


def test_mixed_orders_are_learned() -> None:
    """A block with two uses a pass (tied embedding and head) is foreseen both times."""
    order = AccessPredictor([0, 1, 2])
    for block in [0, 1, 2, 0] * 2:
        order.use(block)
    assert list(islice(order.ahead(), 1)) == [0], (
        "after the head comes the next pass's embedding, which is the same block"
    )
    order.use(0)
    assert list(islice(order.ahead(), 2)) == [1, 2], "after the embedding come the layers"


def test_the_first_order_is_the_models() -> None:
    order = AccessPredictor([0, 1, 2, 3])
    assert list(order.ahead()) == []
    order.use(2)
    assert list(islice(order.ahead(), 3)) == [3, 0, 1]
