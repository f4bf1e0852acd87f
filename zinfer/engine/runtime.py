"""The runtime of one model: blocks in their homes, the streamer, and the hooks on modules."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path
from typing import Final

import torch
from torch import nn

from zinfer.config import Aio, Settings
from zinfer.engine.agreement import check_agreement
from zinfer.engine.hooks import Forward, StreamingHooks, make_placeholders
from zinfer.engine.rank_service import RankService
from zinfer.errors import ConfigError
from zinfer.graphs.splits import GraphSplits
from zinfer.model.partition import ModelBlock
from zinfer.nvme.file_identity import FileIdentity
from zinfer.nvme.gds import choose_backend
from zinfer.nvme.reader import DEFAULT_BLOCK_BYTES, DEFAULT_NUM_THREADS, Reader, ReadObserver
from zinfer.nvme.scratch import ScratchFile
from zinfer.offload.block import Block, Tier
from zinfer.offload.homes import Homes
from zinfer.offload.host_memory import HostBuffer
from zinfer.offload.ranks import GatherLane
from zinfer.offload.slots import DeviceSlots, Slot
from zinfer.offload.source import PeerSource
from zinfer.offload.staging import DeviceBuffer, StagingRing
from zinfer.offload.stats import RunStats
from zinfer.offload.stream import CopyStream, Event
from zinfer.offload.streamer import Streamer
from zinfer.offload.trace import Trace, of_rank
from zinfer.offload.transfer_lane import TransferLane
from zinfer.planning.placement import Plan
from zinfer.probe.rates import Rates
from zinfer.ranks.model_ranks import ModelRanks

_MOST_NUM_THREADS: Final = 64


def check_trace(path: Path | None) -> None:
    """Raise ConfigError if the trace cannot be written, before a run of hours."""
    if path is not None and not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise ConfigError(f"zinfer.trace is {path}, but {path.parent} is not a writable folder; make it first")


def open_reader(
    aio: Aio, files: Mapping[Path, FileIdentity], *, on_cuda: bool, observer: ReadObserver | None = None
) -> Reader:
    """Open a reader with the configuration's block size and one thread per concurrent request.

    Args:
        files: identities of the checkpoint's files when their headers were read.
        on_cuda: whether there is a device to read into, if the configuration asks for that.
        observer: looks at what is read.
    """
    num_threads = min((aio.queue_depth or 1) * (aio.intra_op_parallelism or 1), _MOST_NUM_THREADS)
    stated = aio.queue_depth is not None or aio.intra_op_parallelism is not None
    backend = choose_backend(aio.use_gds and on_cuda, num_threads=num_threads if stated else DEFAULT_NUM_THREADS)
    return Reader(block_bytes=aio.block_size or DEFAULT_BLOCK_BYTES, backend=backend, expected=files, observer=observer)


class Runtime:
    """Owns every buffer, thread and file of a model; ready to run when the constructor returns.

    Args:
        model: the module tree; the runtime replaces its parameters.
        blocks: all its blocks.
        plan: their homes, and the sizes of buffers.
        open_stream: makes copy streams to the device.
        settings: how to read the disk, whether to prefetch, and where `close` writes the trace.
        files: the checkpoint's, empty for weights in memory.
        scratch: a temporary file among them, closed at the end.
        trace: records reads, copies and compute.
        wrap: wraps the model's own forward, inside the pass counter.
        cuts: splits graphs at streamed blocks.
        lock: held while the model runs.
        ranks: the other ranks of the job; those among them that share the weights are its `members`.
        observer: looks at what is read from the files.

    Attributes:
        is_copied: whether the other ranks copy blocks from this one's device as they like.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[ModelBlock],
        plan: Plan,
        open_stream: Callable[[], CopyStream],
        settings: Settings,
        files: Mapping[Path, FileIdentity],
        *,
        scratch: ScratchFile | None = None,
        trace: Trace | None = None,
        wrap: Callable[[Forward], Forward] | None = None,
        cuts: GraphSplits | None = None,
        lock: AbstractContextManager[bool] | None = None,
        ranks: ModelRanks | None = None,
        observer: ReadObserver | None = None,
    ) -> None:
        self._plan = plan
        self._ranks = ranks
        self._sharing = ranks if ranks is not None and ranks.partition.size > 1 else None
        self.is_copied = self._sharing is not None and self._can_pull(self._sharing)
        self._gathers: GatherLane | None = None
        self._service: RankService | None = None
        self._trace = trace
        self._streamer: Streamer | None = None
        streams = {tier: open_stream() for tier in (Tier.DISK, Tier.HOST)}
        with ExitStack() as owned:  # a failure frees what was made before it
            if scratch is not None:
                owned.enter_context(closing(scratch))
            if trace is not None and settings.trace is not None:
                owned.callback(trace.write, of_rank(settings.trace, 0 if ranks is None else ranks.group.rank))
            on_cuda = streams[Tier.DISK].needs_pinned
            reader = open_reader(settings.aio, files, on_cuda=on_cuda, observer=observer)
            self._reader = owned.enter_context(closing(reader))
            rings = self._open_rings(streams[Tier.DISK], owned)
            self._lanes = {
                tier: owned.enter_context(closing(TransferLane(tier.value, stream, rings[tier], trace)))
                for tier, stream in streams.items()
            }
            self._homes = owned.enter_context(closing(self._fill_homes(blocks)))
            staged = [rings[source.tier] for source in self._homes.sources.values() if source.staged]
            if self._staging not in staged:  # it only filled the homes
                self._staging.close()
            streamed = [block.block for block in blocks if block.block.index in self._homes.sources]
            if self.is_copied and self._sharing is not None:
                self._sharing.exchange(None, self._sharing.members)  # the others' ranges are full, too
            if streamed:
                if self._sharing is not None and not self.is_copied:
                    self._gathers = GatherLane(self._sharing, open_stream(), trace)
                self._streamer = owned.enter_context(closing(self._open_streamer(streamed, settings.synchronous)))
            check, note_step = (None, None) if ranks is None else (ranks.check, ranks.progress.note_step)
            resident, agree = self._homes.resident, self._agree_to_read(ranks, model)
            self._hooks = StreamingHooks(
                model, blocks, resident, self._streamer, wrap, cuts, lock, check, note_step, agree
            )
            owned.callback(self._hooks.remove)
            self._serve_others(lock, owned)
            self._owned = owned.pop_all()
        self._bytes_read_loading = self._reader.bytes_read
        sources = self._homes.sources
        uses = [(sources[block.block.index], len(block.sites)) for block in blocks if block.block.index in sources]
        self._wire_bytes = sum(source.wire_bytes * num_uses for source, num_uses in uses)
        self._disk_bytes = sum(source.wire_bytes * num_uses for source, num_uses in uses if source.tier is Tier.DISK)

    def _serve_others(self, lock: AbstractContextManager[bool] | None, owned: ExitStack) -> None:
        """Let the ranks that share the weights go on until none needs them, also if the engine is not destroyed."""
        if self.is_copied:
            owned.callback(self.serve_to_the_end)
        elif self._sharing is not None and self._streamer is not None:
            assert lock is not None, "the model's lock keeps its calls and the other ranks' uses apart"
            device = self._lanes[Tier.HOST].stream.device
            self._service = RankService(self._sharing, self._streamer, lock, device)
            owned.callback(self._service.close)

    def _open_rings(self, stream: CopyStream, owned: ExitStack) -> dict[Tier, StagingRing]:
        """Return the staging slots of each lane: the same in host memory, or others where reads go to the device."""
        plan = self._plan
        self._staging = owned.enter_context(closing(StagingRing()))
        for _ in range(plan.num_staging):
            self._staging.add(HostBuffer(plan.staging_bytes, pin=stream.needs_pinned))
        rings = {Tier.HOST: self._staging, Tier.DISK: self._staging}
        if self._reader.backend.reads_device_memory:
            rings[Tier.DISK] = StagingRing()
            for _ in range(plan.num_staging):
                rings[Tier.DISK].add(DeviceBuffer(plan.staging_bytes, stream.device))
        return rings

    def _agree_to_read(self, ranks: ModelRanks | None, model: nn.Module) -> Callable[[str], None] | None:
        """Return what compares the blocks that ranks read which both divide and share layers; None for others."""
        if ranks is None or self._gathers is None or ranks.mesh.num_dividing == 1:
            return None
        device = self._lanes[Tier.HOST].stream.device
        return lambda name: check_agreement(ranks, f"state_dict of {name}", (), {}, model, device)

    def _fill_homes(self, blocks: Sequence[ModelBlock]) -> Homes:
        by_index = {block.block.index: block for block in blocks}

        def take(block: Block) -> Mapping[str, torch.Tensor]:
            return _take_tensors(by_index[block.index])

        homes = self._plan.homes
        several = [block.block for block in blocks]
        return Homes(several, homes, self._reader, self._lanes, take, self._sharing, pulls=self.is_copied)

    def _can_pull(self, ranks: ModelRanks) -> bool:
        """Whether all that is divided lies on devices that can map each other's memory; the ranks agree on it."""
        is_divided = any(home.shared for home in self._plan.homes)
        can = ranks.can_share and is_divided and self._plan.is_on_devices
        return all(ranks.exchange(can, ranks.members))

    def _open_streamer(self, streamed: list[Block], synchronous: bool) -> Streamer:
        plan, stream = self._plan, self._lanes[Tier.HOST].stream
        if self._sharing is None or self.is_copied:
            slots = DeviceSlots(Slot.allocate(plan.slot_bytes, stream) for _ in range(plan.num_slots))
        else:
            buffers = (self._sharing.allocate(plan.slot_bytes) for _ in range(plan.num_slots))
            slots = DeviceSlots(Slot.over(buffer, stream) for buffer in buffers)
        sources = self._homes.sources
        lanes = {**self._lanes, Tier.DEVICE: self._lanes[Tier.HOST]}  # ranges on the device are copied within it
        return Streamer(
            streamed, sources, lanes, slots, synchronous=synchronous, trace=self._trace, gathers=self._gathers
        )

    @property
    def num_gathering(self) -> int:
        """The number of ranks that make each pass together, since none has a slab without the others; else 1."""
        return 1 if self._sharing is None or self.is_copied else self._sharing.partition.size

    def serve_to_the_end(self) -> None:
        """Serve the other ranks until none asks for another block; called without the model's lock."""
        if self._service is not None:
            self._service.close()
        elif self._ranks is not None and self._ranks.failure is None:
            self._ranks.turns.say_done()
        if self._ranks is not None:
            self._ranks.wait_for_others(all_wait=self.is_copied)  # who copy from this one

    @property
    def serve_next(self) -> Callable[[], bool] | None:
        """As `RankService.serve_next`; None if slabs are not shared."""
        return None if self._service is None else self._service.serve_next

    def settle(self) -> None:
        """Release the blocks that a failed call still holds."""
        self._hooks.settle()

    def keeping(self, module: nn.Module) -> AbstractContextManager[None]:
        """As `StreamingHooks.keeping`."""
        return self._hooks.keeping(module)

    def resume(self) -> None:
        """Note that a call begins."""
        if self._ranks is not None:
            self._ranks.progress.begin_pass()
        if self._streamer is not None:
            self._streamer.resume()

    def pause(self) -> Event:
        """Note that a call is over; returns the event at which the device is done with it."""
        if self._streamer is not None:
            self._streamer.pause()
        end = self._lanes[Tier.HOST].stream.mark_compute()
        if self._ranks is not None:
            self._ranks.progress.end_pass()
        if self._service is not None:
            self._service.note_call(end)
        return end

    def can_borrow(self, memory: Sequence[torch.Tensor]) -> bool:
        """Whether a block that streams in every pass would fit in this device memory and stay there."""
        if self._gathers is not None:  # what one rank caches, it would not gather for the others
            return False
        return self._streamer is not None and self._streamer.num_passing > 0 and bool(self._slots_in(memory))

    def add_cache_slots(self, memory: Sequence[torch.Tensor]) -> None:
        """Cache streamed blocks in borrowed device memory (uint8); called between passes."""
        if self._streamer is not None:
            self._streamer.add_cache_slots(self._slots_in(memory)[: self._streamer.num_passing])

    def remove_cache_slots(self) -> None:
        """Stop using borrowed memory, so that later compute may write to it; called between passes."""
        if self._streamer is not None:
            self._streamer.remove_cache_slots()

    def _slots_in(self, memory: Sequence[torch.Tensor]) -> list[Slot]:
        stream = self._lanes[Tier.HOST].stream
        return [slot for part in memory for slot in Slot.within(part, self._plan.slot_bytes, stream)]

    def stats(self, wall_s: float, span_s: float, rates: Rates | None, other_bytes: int = 0) -> RunStats:
        """Return the counters so far; may be called while the model runs.

        Args:
            wall_s: seconds spent in calls.
            span_s: seconds from the first call's beginning to the last one's end.
            rates: the measured rates that link and disk shares refer to, if known.
            other_bytes: that crossed the link beside streamed blocks.
        """
        plan, homes, streamer = self._plan, self._homes, self._streamer
        wall_s, span_s = wall_s + self._hooks.copying_s, span_s + self._hooks.copying_s
        moved_bytes, read_bytes = streamer.bytes_arrived() if streamer else (0, 0)
        staging = [slot.memory for slot in self._staging.slots]
        return RunStats(
            bytes_read_disk=self._bytes_read_loading + read_bytes,
            bytes_to_device=homes.bytes_to_device + moved_bytes,
            streamed_bytes_per_pass=self._wire_bytes,
            disk_bytes_per_pass=self._disk_bytes,
            gathered_bytes=self._gathered_bytes(),
            pinned_bytes=homes.pinned_bytes + sum(memory.nbytes for memory in staging if memory.pinned),
            host_bytes=homes.host_bytes + sum(memory.nbytes for memory in staging),
            device_bytes=homes.device_bytes + plan.num_slots * plan.slot_bytes,
            blocks_by_home={tier.name: plan.num_blocks(tier) for tier in Tier},
            stall_s=streamer.stall_s() if streamer else dict.fromkeys(("disk", "host", "link", "compute"), 0.0),
            loaded_bytes=homes.loaded_bytes,
            load_s=homes.load_s,
            link_share=(moved_bytes + other_bytes) / span_s / rates.link_bytes_per_s if rates and span_s else None,
            disk_share=read_bytes / span_s / rates.disk_bytes_per_s if rates and span_s else None,
            passes=self._hooks.passes,
            wall_s=wall_s,
            span_s=span_s,
        )

    def _gathered_bytes(self) -> int:
        if self._gathers is not None:
            return self._gathers.gathered_bytes
        return sum(each.pulled_bytes for each in self._homes.sources.values() if isinstance(each, PeerSource))

    def close(self) -> None:
        """Remove the hooks, stop the threads, close the files and free the memory; only placeholders remain."""
        self._owned.close()


def _take_tensors(block: ModelBlock) -> dict[str, torch.Tensor]:
    """Move the block's tensors out of its modules, which keep placeholders, so that each is freed once copied."""
    placeholders = make_placeholders(block)
    taken: dict[str, torch.Tensor] = {}
    for binding in block.bindings:
        parameter = binding.module._parameters[binding.leaf]
        assert parameter is not None
        taken.setdefault(binding.tensor, parameter.detach())
        binding.module._parameters[binding.leaf] = placeholders[binding.tensor]
    return taken
