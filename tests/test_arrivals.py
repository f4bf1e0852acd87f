"""Bytes count once they have crossed to the device, not when their copies are enqueued."""

from contextlib import closing
from pathlib import Path

from streamer_support import make_blocks

from zinfer.offload.host_memory import HostBuffer
from zinfer.offload.source import HostSource
from zinfer.offload.stats import Arrivals
from zinfer.offload.stream import HostEvent


class Late(HostEvent):
    """Of a device that is behind."""

    is_now = False

    def is_reached(self) -> bool:
        return self.is_now


def test_copies_that_are_only_enqueued_are_not_counted(tmp_path: Path) -> None:
    [block] = make_blocks(tmp_path / "weights", 1)
    with closing(HostBuffer(block.nbytes)) as slab:
        arrivals, source, late = Arrivals(), HostSource(block, slab, None), Late()
        for event in (HostEvent(), late, HostEvent()):
            arrivals.note(event, source)
        assert arrivals.sums() == (block.nbytes, 0)
        late.is_now = True
        assert arrivals.sums() == (3 * block.nbytes, 0)
