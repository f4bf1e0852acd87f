"""A trace opens as Chrome trace events, and what it shows is what ran: every block of every pass, once."""

import errno
import itertools
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from checkpoints import tiny_checkpoint
from engine_support import greedy, logits_of
from engines import blocks_of, config_for
from ranks_support import run_ranks

import zinfer
from zinfer.config import resolve_settings
from zinfer.offload.block import Tier
from zinfer.offload.trace import LANES, Slice, Trace

NUM_LAYERS = 5
NUM_TOKENS = 6
CLOCK_S = 1e-4  # two clocks of one run, a device's and the host's, agree so far


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"), num_layers=NUM_LAYERS, tie=False)


def traced(folder: Path, homes: str, device: str, num_slots: int = 3) -> tuple[Trace, list[str], int, float]:
    """A trace of loading and a text, the streamed blocks, the passes, and the seconds that all of it took."""
    trace, begin_s = Trace(), time.perf_counter()
    settings = resolve_settings(config_for(folder, homes, num_slots, device))
    engine = zinfer.InferenceEngine(folder, settings, trace=trace)
    try:
        greedy(engine, max_new_tokens=NUM_TOKENS)
        streamed = [home.tier is not Tier.DEVICE for home in engine.plan.homes]
        names = [block.name for block in itertools.compress(blocks_of(folder), streamed)]
        passes = engine.stats().passes
    finally:
        engine.destroy()
    return trace, names, passes, time.perf_counter() - begin_s


def by_lane(trace: Trace) -> dict[str, list[Slice]]:
    found: dict[str, list[Slice]] = {lane: [] for lane in LANES}
    for each in trace.slices():
        found[each.lane].append(each)
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("homes", ["resident", "host", "disk", "mixed"])
def test_the_lanes_show_what_ran(folder: Path, homes: str, device: str) -> None:
    trace, names, passes, wall_s = traced(folder, homes, device)
    lanes = by_lane(trace)
    assert passes == NUM_TOKENS
    assert Counter(each.name for each in lanes["compute"]) == Counter(names * passes), "one slice a block and pass"
    assert bool(names) == (homes != "resident")
    moves = Counter(each.name for each in lanes["host to device"])
    assert all(moves[name] >= passes for name in names)
    assert bool(lanes["disk"]) == (homes != "host"), "what goes to the host by way of the host lane is no disk slice"
    assert lanes["device to host"] == []
    assert all(each.begin_s <= each.end_s for each in trace.slices())
    for lane in ("disk", "compute"):
        for earlier, later in itertools.pairwise(lanes[lane]):
            assert later.begin_s >= earlier.end_s - CLOCK_S, f"{earlier} and {later} overlap"
        assert 0 <= sum(each.end_s - each.begin_s for each in lanes[lane]) <= wall_s
    assert max(each.end_s for each in trace.slices()) - min(each.begin_s for each in trace.slices()) <= wall_s + CLOCK_S


@pytest.mark.parametrize("homes", ["resident", "mixed"])
def test_the_file_holds_the_slices_in_lanes_with_names(folder: Path, tmp_path: Path, homes: str, device: str) -> None:
    trace, _, _, _ = traced(folder, homes, device)
    path = tmp_path / "trace.json"
    path.write_text("an earlier one")
    trace.write(path)
    assert [found.name for found in tmp_path.iterdir()] == [path.name], "nothing else is left"
    document = json.loads(path.read_text())
    events: list[dict[str, Any]] = document["traceEvents"]
    named = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert set(named.values()) == {each.lane for each in trace.slices()}
    complete = [event for event in events if event["ph"] == "X"]
    assert len(named) + len(complete) == len(events)
    assert document["otherData"]["dropped"] == trace.num_dropped == 0
    slices = trace.slices()
    origin_s = slices[0].begin_s
    for event, each in zip(sorted(complete, key=lambda event: event["ts"]), slices, strict=True):
        assert {type(event[key]) for key in ("ts", "dur")} <= {int, float}
        assert event["dur"] >= 0
        assert event["ts"] == pytest.approx((each.begin_s - origin_s) * 1e6, abs=0.01)
        assert event["pid"] == complete[0]["pid"]
    shown = Counter((named[event["tid"]], event["name"]) for event in complete)
    assert shown == Counter((each.lane, each.name) for each in slices)


def traced_rank(rank: int, folder: Path, path: Path) -> None:
    homes = {"zero_optimization": {"offload_param": {"device": "cpu"}}}
    engine = zinfer.init_inference(folder, {**homes, "zinfer": {"device": "cpu", "trace": str(path)}})
    logits_of(engine)
    engine.destroy()


def test_each_rank_writes_its_own_trace_and_its_gathers(folder: Path, tmp_path: Path) -> None:
    run_ranks(2, traced_rank, folder, tmp_path / "t.json")
    shown = []
    for path in (tmp_path / "t.json", tmp_path / "t.1.json"):
        events = json.loads(path.read_text())["traceEvents"]
        named = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
        shown.append(Counter((named[event["tid"]], event["name"]) for event in events if event["ph"] == "X"))
    used = Counter({name: count for (lane, name), count in shown[0].items() if lane == "compute"})
    for each in shown:
        gathered = Counter({name: count for (lane, name), count in each.items() if lane == "gather"})
        assert used
        assert used <= gathered, "each use of a block, and what was prefetched behind them"


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(OSError, match="missing") as caught:
        Trace().write(missing / "trace.json")
    assert str(missing) in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_place_of_the_file_stays(tmp_path: Path) -> None:
    (tmp_path / "trace.json").mkdir()
    with pytest.raises(OSError, match=r"trace\.json"):
        Trace().write(tmp_path / "trace.json")
    assert [found.name for found in tmp_path.iterdir()] == ["trace.json"]


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space left") as caught:
        Trace().write(tmp_path / "trace.json")
    assert list(tmp_path.iterdir()) == []
    assert "trace.json" in str(caught.value)


def test_an_empty_trace_is_a_trace(tmp_path: Path) -> None:
    Trace().write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert events == []


def test_a_trace_changes_no_answer(folder: Path) -> None:
    settings = resolve_settings(config_for(folder, "mixed", 3, "cpu"))
    plain, noted = (zinfer.InferenceEngine(folder, settings, trace=trace) for trace in (None, Trace()))
    try:
        assert (logits_of(plain) == logits_of(noted)).all()
    finally:
        plain.destroy()
        noted.destroy()
