"""The counters: whole, monotonic, the caller's own, and to be asked for at any time."""

import dataclasses
import itertools
import threading
import time
from pathlib import Path

import pytest
import torch
from checkpoints import tiny_checkpoint
from engine_support import (
    Raised,
    Tensors,
    batch,
    eager,
    engine,
    folder,
    greedy,
    logits_of,
    settled,
)
from engines import HOMES, blocks_of, check_shares, engine_for
from transformers import PreTrainedModel

import zinfer
from zinfer.offload.block import Tier
from zinfer.offload.stats import RunStats
from zinfer.offload.stream import HostEvent
from zinfer.probe.rates import Rates

__all__ = ["batch", "eager", "engine", "folder"]  # fixtures


def test_the_counters(folder: Path, batch: Tensors) -> None:
    for homes in HOMES:
        with engine_for(folder, homes) as engine:
            history = [engine.stats()]
            assert history[0].passes == 0
            assert history[0].wall_s == 0
            for _ in range(3):
                start_s = time.perf_counter()
                engine.generate(**batch, max_new_tokens=3, do_sample=False)
                elapsed_s = time.perf_counter() - start_s
                history.append(engine.stats())
                assert 0 < history[-1].wall_s - history[-2].wall_s <= elapsed_s
            for earlier, later in itertools.pairwise(history):
                check_types(later)
                assert later.passes == earlier.passes + 3
                assert later.bytes_read_disk >= earlier.bytes_read_disk
                assert later.bytes_to_device >= earlier.bytes_to_device
                assert all(later.stall_s[cause] >= earlier.stall_s[cause] >= 0 for cause in earlier.stall_s)
                assert later.streamed_bytes_per_pass == earlier.streamed_bytes_per_pass == engine.plan.streamed_bytes
                assert sum(later.stall_s.values()) <= later.wall_s
                assert later.span_s > earlier.span_s


def test_time_between_calls_is_none_of_the_engines_waiting(folder: Path) -> None:
    """Slots are full while the caller does something else: the copies wait for nothing that a call does."""
    for homes in ("host", "disk"):
        with engine_for(folder, homes) as engine:
            for _ in range(3):
                greedy(engine, max_new_tokens=1)
                time.sleep(0.2)
            stats = engine.stats()
            assert sum(stats.stall_s.values()) <= stats.wall_s


@pytest.mark.parametrize("homes", ["host", "disk", "mixed"])
def test_what_is_moved_ahead_counts_once_it_is_used(folder: Path, homes: str) -> None:
    with engine_for(folder, homes) as engine:
        loading = engine.stats()
        for calls in range(1, 4):
            greedy(engine, max_new_tokens=2)
            stats = settled(engine)
            moved = stats.bytes_to_device - loading.bytes_to_device
            assert moved == 2 * calls * stats.streamed_bytes_per_pass
            read = stats.bytes_read_disk - loading.bytes_read_disk
            assert 2 * calls * stats.disk_bytes_per_pass <= read
            assert (read == 0) == (homes == "host")


def test_shares_are_of_the_seconds_until_the_device_was_done(folder: Path) -> None:
    """A CUDA device may compute long after the call has returned, and copy for it."""
    rates = Rates(1e12, 1e12, 1e12, 1e12, 1e12, "made up")
    with engine_for(folder, "disk") as engine:
        logits_of(engine)
        engine.estimator.__dict__["rates"] = rates
        first = engine.stats()
        engine._ended = LateEvent(time.perf_counter() + 5)
        late = engine.stats()
        check_shares(late)
        assert late.wall_s == first.wall_s
        assert late.span_s >= 5
        crossing_s = first.streamed_bytes_per_pass / rates.link_bytes_per_s
        assert late.link_share == pytest.approx(crossing_s / late.span_s)


class LateEvent(HostEvent):
    """Of a device that is done later than the call returns."""

    def __init__(self, at_s: float) -> None:
        self._at_s = at_s


def check_types(stats: RunStats) -> None:
    check_shares(stats)
    assert dataclasses.is_dataclass(stats)
    for name in ("bytes_read_disk", "bytes_to_device", "pinned_bytes", "device_bytes", "host_bytes", "passes"):
        assert type(getattr(stats, name)) is int
        assert getattr(stats, name) >= 0
    assert type(stats.wall_s) is float
    assert set(stats.blocks_by_home) == {"DEVICE", "HOST", "DISK"}
    assert {"disk", "link"} <= set(stats.stall_s)
    assert all(type(seconds) is float for seconds in stats.stall_s.values())


def test_stats_are_the_callers_own(engine: zinfer.InferenceEngine) -> None:
    stats = engine.stats()
    stats.blocks_by_home["DISK"] = 99
    stats.stall_s["disk"] = -1.0
    assert engine.stats().blocks_by_home["DISK"] != 99
    assert engine.stats().stall_s["disk"] >= 0


def test_stats_may_be_asked_for_while_it_generates(folder: Path) -> None:
    """A heartbeat beside a call that takes hours must not wait for its end."""
    with engine_for(folder, "disk") as engine:
        inside, go_on = threading.Event(), threading.Event()

        def pause(*args: object) -> None:
            inside.set()
            go_on.wait(20)

        engine.module.model.layers[2].mlp.register_forward_pre_hook(pause)
        worker = threading.Thread(target=lambda: greedy(engine, max_new_tokens=2))
        caller = threading.Thread(target=lambda: engine.stats())
        worker.start()
        assert inside.wait(20)
        caller.start()
        caller.join(2)
        answered = not caller.is_alive()
        go_on.set()
        worker.join(20)
        caller.join(20)
        assert answered


def test_a_failed_call_counts_its_time_and_no_whole_pass_too_many(folder: Path) -> None:
    with engine_for(folder, "disk") as engine:
        greedy(engine, max_new_tokens=2)
        before = engine.stats()

        def fail(*args: object) -> None:
            raise Raised

        hook = engine.module.model.layers[3].register_forward_pre_hook(fail)
        with pytest.raises(Raised):
            greedy(engine)
        hook.remove()
        after = engine.stats()
        assert after.wall_s > before.wall_s
        assert after.passes - before.passes in (0, 1)


def test_the_synchronous_twin_moves_nothing_ahead(folder: Path, eager: PreTrainedModel) -> None:
    with engine_for(folder, "disk", synchronous=True) as engine:
        before = settled(engine)
        assert torch.equal(logits_of(engine), logits_of(eager))
        after = settled(engine)
        assert after.bytes_to_device - before.bytes_to_device == after.streamed_bytes_per_pass
        assert after.stall_s["disk"] > before.stall_s["disk"]


@pytest.mark.parametrize("homes", ["host", "disk"])
def test_a_streamed_tied_embedding_counts_twice(tmp_path: Path, homes: str) -> None:
    """It is one block with two uses a pass, as the embedding and as the head, and crosses the link for each."""
    folder = tiny_checkpoint("llama", tmp_path / "tied", num_layers=3, tie=True)
    [embedding] = [block for block in blocks_of(folder) if block.name == "model.embed_tokens"]
    with engine_for(folder, homes, synchronous=True) as engine:
        assert engine.plan.num_blocks(Tier.DEVICE) == 0
        for _ in range(3):
            before = engine.stats()
            logits_of(engine)
            after = engine.stats()
            assert after.bytes_to_device - before.bytes_to_device == after.streamed_bytes_per_pass
        assert after.streamed_bytes_per_pass == engine.plan.streamed_bytes + embedding.nbytes
        assert after.disk_bytes_per_pass == (after.streamed_bytes_per_pass if homes == "disk" else 0)
