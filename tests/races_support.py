"""Shared by tests of races: delayed copies and reads, and a bitwise comparison of a streamed model with the resident
one."""

import os
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from checkpoints import MAX_POSITIONS, left_padded, random_prompts
from engines import blocks_of, config_for
from streams import LateCudaStream, LateHostStream

import zinfer
from zinfer.config import resolve_settings
from zinfer.offload.block import Block, Tier
from zinfer.offload.stream import CopyStream, Event, HostEvent, HostStream

PAGE_BYTES = 4096
ITEM_BYTES = 4  # the tiny checkpoints are float32
SPIN_CYCLES = 20_000_000  # some 10 ms: far longer than a tiny layer computes, or a block takes to be copied


class _Point:
    """A point in a `QueuedHostStream`'s work."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._at_s = 0.0

    def reach(self) -> None:
        self._at_s = time.perf_counter()
        self._reached.set()

    def synchronize(self) -> None:
        assert self._reached.wait(60), "the stream never came so far"

    def is_reached(self) -> bool:
        return self._reached.is_set()

    def time_s(self) -> float:
        return self._at_s


class QueuedHostStream(HostStream):
    """Copies behind the caller's back, in order, as a CUDA stream does: a copy that nobody waits for lands too late.

    ``delay_s`` gives the seconds that each copy idles before it begins.
    """

    def __init__(self, delay_s: Callable[[], float]) -> None:
        super().__init__()
        self.delay_s = delay_s
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._num_begun = self._num_over = 0
        self._thread = threading.Thread(target=self._run, name="queued-stream", daemon=True)
        self._thread.start()

    def after(self, event: Event) -> None:
        self._work.put(event.synchronize)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._num_begun += 1
        self._work.put(partial(self._copy, target, source))

    def mark(self) -> Event:
        point = _Point()
        self._work.put(point.reach)
        return point

    def join(self, event: Event) -> Event:
        event.synchronize()
        return HostEvent()

    @property
    def num_under_way(self) -> int:
        """Copies that have not landed."""
        return self._num_begun - self._num_over

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        time.sleep(self.delay_s())
        target.copy_(source)
        self._num_over += 1

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


def now_and_then(seed: int, longest_s: float = 0.004) -> Callable[[], float]:
    """Delays of which most are none and every eighth may be long: a long run of it stays quick."""
    chance = random.Random(seed)
    return lambda: chance.uniform(0, longest_s) if chance.random() < 0.125 else 0.0


@contextmanager
def late_streams(
    device: str, seed: int, *, queued: bool = False
) -> Iterator[tuple[Callable[[torch.device], CopyStream], list[QueuedHostStream]]]:
    """A maker of copy streams whose copies start late, and those it made that have a queue; they end with it."""
    opened: list[QueuedHostStream] = []

    def open_one(found: torch.device) -> CopyStream:
        if device == "cuda":
            return LateCudaStream(found, seed, longest_cycles=400_000)
        if not queued:
            return LateHostStream(seed, longest_s=0.0003)
        opened.append(QueuedHostStream(now_and_then(seed + len(opened))))
        return opened[-1]

    try:
        yield open_one, opened
    finally:
        for stream in opened:
            stream.close()


@contextmanager
def late_reads(seed: int) -> Iterator[None]:
    """Reads that begin late and come in pieces of whole pages, as the system may deliver them."""
    real, chance, delay_s = os.preadv, random.Random(seed), now_and_then(seed)

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int, *flags: int) -> int:
        time.sleep(delay_s())
        pages = max(1, buffers[0].nbytes // PAGE_BYTES)
        piece = buffers[0][: chance.randint(1, pages) * PAGE_BYTES] if chance.random() < 0.2 else buffers[0]
        return real(fd, [piece], offset, *flags)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "preadv", preadv)
        yield


@dataclass(frozen=True)
class Case:
    """A way to stream a model of ``num_layers``: where its blocks live, the buffers, and the passes.

    ``streamed`` is "host", "disk" or "both"; with ``resident`` a part of the blocks lives on the device. A round is a
    prefill and ``num_decodes`` steps of one token. ``patient`` computes begin once every move under way has landed.
    """

    num_layers: int
    streamed: str
    resident: bool
    num_slots: int
    chunk_pages: int = 5
    num_staging: int = 3
    num_decodes: int = 2
    num_rounds: int = 2
    block_pages: int = 256
    patient: bool = False
    queued: bool = False
    seed: int = 0

    @property
    def num_passes(self) -> int:
        return self.num_rounds * (1 + self.num_decodes)

    def config(self, folder: Path, device: str) -> dict[str, object]:
        """Budgets and hints that leave hardly another placement."""
        blocks = blocks_of(folder)
        largest = max(block.nbytes for block in blocks)
        outer = sum(block.nbytes for block in blocks if block.nbytes < largest / 2)
        # With as many slots as layers the layers would all be resident instead.
        num_spare = max(0, self.num_layers - self.num_slots - 1)
        offload: dict[str, object] = {
            "device": "none" if self.resident and num_spare else "cpu",
            "buffer_size": self.chunk_pages * PAGE_BYTES // ITEM_BYTES,
            "buffer_count": self.num_staging,
        }
        if self.streamed != "host":
            half = largest // ITEM_BYTES * max(1, self.num_layers - num_spare) // 2
            offload["max_in_cpu"] = half if self.streamed == "both" else 1
        device_bytes = self.num_slots * largest + (outer + num_spare * largest if self.resident else 0)
        return {
            "zero_optimization": {"offload_param": offload},
            "aio": {"block_size": self.block_pages * PAGE_BYTES},
            "zinfer": {"device": device, "num_slots": self.num_slots, "max_weight_memory": device_bytes},
        }


Logits = list[torch.Tensor]


def walk(engine: zinfer.InferenceEngine, num_rounds: int, num_decodes: int) -> Logits:
    """Logits of every pass, [rows, tokens, vocabulary]; the tokens that are fed do not depend on them."""
    found: Logits = []
    for number in range(num_rounds):
        input_ids, mask = left_padded(random_prompts(3, seed=number))
        cache = None
        for step in range(1 + num_decodes):
            output = engine(input_ids=input_ids, attention_mask=mask, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            found.append(output.logits.clone())
            input_ids = (input_ids[:, -1:] * 7 + step) % MAX_POSITIONS
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
    return found


@cache
def resident_logits(folder: Path, device: str, num_rounds: int, num_decodes: int) -> Logits:
    """What the model says when all of it is on the device."""
    engine = zinfer.init_inference(folder, config_for(folder, "resident", 1, device))
    try:
        logits = walk(engine, num_rounds, num_decodes)
        assert engine.stats().streamed_bytes_per_pass == 0
        assert all(len(set(each[:, -1].argmax(-1).tolist())) > 1 for each in logits), "equal rows would say nothing"
        return logits
    finally:
        engine.destroy()


def check_case(folder: Path, case: Case, device: str) -> None:
    """Asserts that the case says to the bit what the resident model says, and that it moved what it should have."""
    expected = resident_logits(folder, device, case.num_rounds, case.num_decodes)
    settings = resolve_settings(case.config(folder, device))
    with late_streams(device, case.seed, queued=case.queued) as (open_stream, opened), late_reads(case.seed):
        engine = zinfer.InferenceEngine(folder, settings, open_stream=open_stream)
        try:
            if case.patient:
                compute_last(engine)
            logits = walk(engine, case.num_rounds, case.num_decodes)
            check_bytes(engine, case, blocks_of(folder))
        finally:
            engine.destroy()
        assert not any(stream.num_under_way for stream in opened), "memory is given back while it is written to"
    for number, (found, want) in enumerate(zip(logits, expected, strict=True)):
        assert torch.equal(found, want), f"pass {number} says something else"


def compute_last(engine: zinfer.InferenceEngine) -> None:
    """Has every layer compute as late as can be: whatever overwrites its weights has done so by then."""

    def wait(*args: object) -> None:
        if engine.device.type == "cuda":
            torch.cuda._sleep(SPIN_CYCLES)  # type: ignore[no-untyped-call]
            return
        assert engine._runtime is not None
        assert engine._runtime._streamer is not None
        for use in list(engine._runtime._streamer._moving.values()):
            if use.transfer.failure() is None:
                use.transfer.sent().synchronize()

    for layer in engine.module.model.layers:
        layer.mlp.register_forward_pre_hook(wait)


def check_bytes(engine: zinfer.InferenceEngine, case: Case, blocks: Sequence[Block]) -> None:
    """Asserts the homes, the staging slots, and the bytes of each tier, from the blocks themselves."""
    if engine.device.type == "cuda":
        torch.cuda.synchronize()  # a block counts once its copy has arrived
    plan, stats = engine.plan, engine.stats()
    tiers = [home.tier for home in plan.homes]
    assert stats.blocks_by_home == {tier.name: tiers.count(tier) for tier in Tier}
    num_streamed = sum(tier is not Tier.DEVICE for tier in tiers)
    wanted = {"host": {Tier.HOST}, "disk": {Tier.DISK}, "both": {Tier.HOST, Tier.DISK}}[case.streamed]
    assert num_streamed > 0
    assert set(tiers) - {Tier.DEVICE} == wanted or (case.streamed == "both" and num_streamed == 1), plan
    assert (Tier.DEVICE in tiers) >= case.resident, plan
    assert (plan.num_staging, plan.staging_bytes) == (case.num_staging, case.chunk_pages * PAGE_BYTES)
    bytes_of = dict.fromkeys(Tier, 0)
    for block, tier in zip(blocks, tiers, strict=True):
        on_disk = sum(extent.nbytes for extent in block.extents)
        bytes_of[tier] += on_disk if tier is Tier.DISK else block.nbytes
    per_pass = bytes_of[Tier.DISK] + bytes_of[Tier.HOST]
    assert stats.passes == case.num_passes
    assert (stats.streamed_bytes_per_pass, stats.disk_bytes_per_pass) == (per_pass, bytes_of[Tier.DISK])
    moved = stats.bytes_to_device - bytes_of[Tier.DEVICE]
    wasted = plan.num_slots * plan.slot_bytes  # guesses that gave way
    assert case.num_passes * per_pass <= moved <= case.num_passes * per_pass + wasted
    read = stats.bytes_read_disk - stats.loaded_bytes
    assert read >= case.num_passes * bytes_of[Tier.DISK]
