"""The running machinery of one model: its blocks in their homes, the streamer between them, hooks on the modules."""

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import nn

from zinfer.config import Aio
from zinfer.cut import ModelBlock
from zinfer.hooks import StreamingHooks
from zinfer.nvme.reader import DEFAULT_BLOCK_BYTES, DEFAULT_NUM_THREADS, Reader
from zinfer.offload.block import Block, Tier
from zinfer.offload.homes import Homes
from zinfer.offload.host_memory import HostBuffer
from zinfer.offload.slots import DeviceSlots, StagingRing
from zinfer.offload.stats import RunStats
from zinfer.offload.stream import CopyStream
from zinfer.offload.streamer import Streamer
from zinfer.planner import Plan

_MOST_NUM_THREADS: Final = 64


def open_reader(aio: Aio) -> Reader:
    """A reader with the configuration's block size and a thread for each request that it wants under way."""
    num_threads = min((aio.queue_depth or 1) * (aio.intra_op_parallelism or 1), _MOST_NUM_THREADS)
    stated = aio.queue_depth is not None or aio.intra_op_parallelism is not None
    return Reader(
        num_threads=num_threads if stated else DEFAULT_NUM_THREADS,
        block_bytes=aio.block_size or DEFAULT_BLOCK_BYTES,
    )


class Runtime:
    """Owns every buffer, thread and file of a model; ready to run when the constructor returns.

    Args:
        model: the module tree; its parameters are taken over.
        blocks: all its blocks.
        plan: their homes, and the buffers.
        stream: copies to the device.
        reader: reads the checkpoint; closed with the runtime.
        synchronous: move nothing ahead of its use.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[ModelBlock],
        plan: Plan,
        stream: CopyStream,
        reader: Reader,
        *,
        synchronous: bool,
    ) -> None:
        self._plan = plan
        self._reader = reader
        by_index = {block.block.index: block for block in blocks}

        def take(block: Block) -> Mapping[str, torch.Tensor]:
            return _take_tensors(by_index[block.index])

        self._homes = Homes([block.block for block in blocks], plan.homes, reader, stream, take)
        self._staging = StagingRing(
            [HostBuffer(plan.staging_bytes, pin=stream.needs_pinned) for _ in range(plan.num_staging)]
        )
        streamed = [block.block for block in blocks if block.block.index in self._homes.sources]
        self._disk_bytes_per_pass = sum(
            source.wire_bytes for source in self._homes.sources.values() if source.tier is Tier.DISK
        )
        self._wire_bytes_per_pass = sum(source.wire_bytes for source in self._homes.sources.values())
        self._slot_bytes = plan.num_slots * plan.slot_bytes
        self._streamer = self._open_streamer(streamed, stream, synchronous) if streamed else None
        self._hooks = StreamingHooks(model, blocks, self._homes.resident, self._streamer)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(stream.device)

    def _open_streamer(self, streamed: list[Block], stream: CopyStream, synchronous: bool) -> Streamer:
        buffers = [
            torch.empty(self._plan.slot_bytes, dtype=torch.uint8, device=stream.device)
            for _ in range(self._plan.num_slots)
        ]
        return Streamer(
            streamed, self._homes.sources, stream, DeviceSlots(buffers), self._staging, synchronous=synchronous
        )

    def stats(self, wall_s: float) -> RunStats:
        """The counters so far, ``wall_s`` being the seconds spent in calls."""
        streamer = self._streamer
        staging = [slot.memory for slot in self._staging.slots]
        return RunStats(
            bytes_read_disk=self._reader.bytes_read,
            bytes_to_device=self._homes.bytes_to_device + (streamer.bytes_moved if streamer else 0),
            streamed_bytes_per_pass=self._wire_bytes_per_pass,
            disk_bytes_per_pass=self._disk_bytes_per_pass,
            pinned_bytes=self._homes.pinned_bytes + sum(memory.nbytes for memory in staging if memory.pinned),
            host_bytes=self._homes.host_bytes + sum(memory.nbytes for memory in staging),
            device_bytes=self._homes.device_bytes + self._slot_bytes,
            blocks_by_home={tier.name: self._plan.num_blocks(tier) for tier in Tier},
            stall_s=streamer.stall_s() if streamer else {"disk": 0.0, "host": 0.0, "link": 0.0},
            passes=self._hooks.passes,
            wall_s=wall_s,
        )

    def close(self) -> None:
        """Stop the threads, close the files, give the memory back. The model is left without weights."""
        self._hooks.remove()
        if self._streamer is not None:
            self._streamer.close()
        self._reader.close()
        self._staging.close()
        self._homes.close()


def _take_tensors(block: ModelBlock) -> dict[str, torch.Tensor]:
    """The block's tensors out of its modules, which keep meta tensors, so that each is freed once it is copied."""
    taken: dict[str, torch.Tensor] = {}
    for binding in block.bindings:
        parameter = binding.module._parameters[binding.leaf]
        assert parameter is not None
        if not parameter.is_meta:
            taken.setdefault(binding.tensor, parameter.detach())
        binding.module._parameters[binding.leaf] = nn.Parameter(parameter.to("meta"), requires_grad=False)
    return taken
