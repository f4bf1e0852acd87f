"""Stores in the making: every start ends in the same bytes, whatever stopped it and however late its copies came."""

import errno
import io
import os
import random
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from checkpoints import tiny_checkpoint, tiny_model
from rich.console import Console
from store_support import Stopped, begin_store, blocks_of, contents, document, make_store, settings_of
from streams import LateHostStream, late_stream

import zinfer
import zinfer.store.pipeline
import zinfer.store.writing
from zinfer.display import shown
from zinfer.errors import CheckpointError
from zinfer.nvme.reader import DiskReadError
from zinfer.store.files import place_file
from zinfer.store.pipeline import Meter, StoreSummary
from zinfer.store.writing import write_store
from zinfer.weights.native import Manifest

NUM_BLOCKS = 9
SECTION: dict[str, object] = {"bits": 4, "group_size": 32, "symmetric": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers, embedding, norm and head."""
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("model"), num_layers=6, tie=False)


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The store that nothing disturbed."""
    output = tmp_path_factory.mktemp("whole")
    assert make_store(model, output, **SECTION).num_blocks == NUM_BLOCKS
    return contents(output)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("number", range(1, NUM_BLOCKS + 4))
def test_a_start_ends_in_the_same_bytes_wherever_it_stopped(
    model: Path, whole: dict[str, bytes], tmp_path: Path, number: int
) -> None:
    store = tmp_path / "store"
    begin_store(model, store, number, **SECTION)
    assert not document(store)["finished"]
    num_listed = len(blocks_of(store))
    # The other slab may have been written as well before the failure was seen.
    assert min(number - 1, NUM_BLOCKS) <= num_listed <= min(number + 1, NUM_BLOCKS)
    kept = {name: (store / name).stat().st_mtime_ns for name in contents(store) if name.startswith("block")}
    summary = make_store(model, store, **SECTION)
    assert summary.num_skipped == num_listed
    assert contents(store) == whole
    for name, mtime_ns in kept.items():
        assert (store / name).stat().st_mtime_ns == mtime_ns, "a finished block was written again"


def test_a_start_that_only_lacks_the_last_manifest_is_finished(
    model: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, write = tmp_path / "store", Manifest.write

    def refuse(manifest: Manifest, folder: Path) -> None:
        if manifest.finished:
            raise Stopped
        write(manifest, folder)

    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "write", refuse)
        with pytest.raises(Stopped):
            make_store(model, store, **SECTION)
    with pytest.raises(CheckpointError, match=r"store: a store that is not finished; run the same zinfer quantize"):
        zinfer.init_inference(store)
    assert make_store(model, store, **SECTION).num_skipped == NUM_BLOCKS
    assert contents(store) == whole


def test_lost_and_torn_files_are_made_again(model: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    store = tmp_path / "store"
    begin_store(model, store, 7, **SECTION)
    files = [block["file"] for block in blocks_of(store)]
    (store / files[1]).unlink()
    with (store / files[2]).open("r+b") as file:
        file.truncate(4096)
    summary = make_store(model, store, **SECTION)
    assert summary.num_skipped == len(files) - 2
    assert contents(store) == whole


def test_a_finished_store_is_left_alone(model: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    store = tmp_path / "store"
    make_store(model, store, **SECTION)
    before = {path: path.stat().st_mtime_ns for path in (store, *store.iterdir())}
    console = Console(file=io.StringIO(), width=200)
    summary = write_store(model, store, settings_of(**SECTION), console=console)
    assert summary.num_skipped == summary.num_blocks == NUM_BLOCKS
    assert summary.read_bytes == 0
    assert "is finished already, from this model with these settings; nothing was written" in console.file.getvalue()  # type: ignore[attr-defined]
    assert {path: path.stat().st_mtime_ns for path in (store, *store.iterdir())} == before
    assert contents(store) == whole


def test_a_weight_that_no_scale_covers_is_named(tmp_path: Path) -> None:
    model = tiny_model("llama", num_layers=4)
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[3, 5] = torch.inf
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"model\.layers\.2: mlp\.up_proj\.weight cannot.*row 3, column 5 is inf"):
        make_store(tmp_path / "model", tmp_path / "store")
    summary = make_store(tmp_path / "model", tmp_path / "other", exclude=["layers.2.mlp.up_proj"])
    assert "model.layers.2.mlp.up_proj.weight" not in document(summary.output)["parameters"]


def test_a_source_that_is_cut_short_while_it_is_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "model", num_layers=4, shards=2)
    shard = max(folder.glob("*.safetensors"))
    run = zinfer.store.writing._Writing.run

    def shorten(self: zinfer.store.writing._Writing, summary: StoreSummary) -> object:
        os.truncate(shard, shard.stat().st_size - 4096)
        return run(self, summary)

    monkeypatch.setattr(zinfer.store.writing._Writing, "run", shorten)
    with pytest.raises(DiskReadError, match=rf"{shard.name}: reading at byte \d+: the file has changed"):
        make_store(folder, tmp_path / "store")


def test_a_full_disk_leaves_a_start(
    model: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = [0]
    write = os.write

    def full(descriptor: int, data: memoryview) -> int:
        written[0] += len(data)
        if written[0] > 60_000 and bytes(data[:1]) != b"{":  # the manifest has room
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match=r"No space left on device.*block-0000\d-of-00009\.safetensors"):
            make_store(model, tmp_path / "store", **SECTION)
    assert not list((tmp_path / "store").glob("*.tmp"))
    assert not list((tmp_path / "store").glob(".zinfer_store.b*"))
    make_store(model, tmp_path / "store", **SECTION)
    assert contents(tmp_path / "store") == whole


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", range(5))
def test_late_copies_and_slow_writes_change_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, seed: int
) -> None:
    make_store(model, tmp_path / "prompt", device, **SECTION)
    numbers = random.Random(seed)

    def slow(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
        time.sleep(numbers.uniform(0, 0.01))
        place_file(path, (bytes(piece) for piece in pieces if time.sleep(numbers.uniform(0, 0.001)) is None))

    monkeypatch.setattr(zinfer.store.writing, "place_file", slow)
    monkeypatch.setattr(zinfer.store.pipeline, "open_stream", lambda _: late_stream(device, seed))
    monkeypatch.setattr(zinfer.store.pipeline, "HostStream", lambda: LateHostStream(seed))
    monkeypatch.setattr(zinfer.store.pipeline, "_STAGING_BYTES", 16 << 10)
    monkeypatch.setattr(zinfer.store.pipeline, "_NUM_STAGING", 2)
    make_store(model, tmp_path / "late", device, **SECTION)
    assert contents(tmp_path / "late") == contents(tmp_path / "prompt")


def test_no_thread_is_left(model: Path, tmp_path: Path) -> None:
    before = threading.active_count()
    make_store(model, tmp_path / "store")
    assert threading.active_count() == before
    begin_store(model, tmp_path / "other", 3)
    assert threading.active_count() == before


def test_progress_is_said_while_it_goes_on(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
        time.sleep(0.05)
        place_file(path, pieces)

    monkeypatch.setattr(zinfer.store.writing, "place_file", slow)
    monkeypatch.setattr(zinfer.store.writing, "shown", lambda meter: shown(meter, interval_s=0.02))
    console = Console(file=io.StringIO(), width=200)
    write_store(model, tmp_path / "store", settings_of(**SECTION), console=console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "zinfer: checking, 0:00:00 elapsed" in said
    assert "blocks, " in said
    assert " read, " in said
    assert "ETA 0:00:0" in said


def test_a_terminal_gets_a_bar() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=140)
    with shown(Meter(console)) as meter:
        meter.num_blocks, meter.num_written = 49, 12
        meter.start(lambda: 3_000_000, 12_000_000)
        meter.started_s -= 10
        time.sleep(0.6)
        meter.note("something to say")
    said = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("12/49 blocks, 3.00 MB of 12.00 MB read", "ETA 0:00:3", "━", "something to say"):
        assert part in said
