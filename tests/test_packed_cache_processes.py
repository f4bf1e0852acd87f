"""Jobs that write a store under `nvme_path`, killed, side by side, interrupted: written once, in the same bytes."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands import Process, start
from jobs_support import letters_model, prompt_rows, write_rows
from store_support import blocks_of, contents, document, make_store

from zinfer.store.caches import ENGINE
from zinfer.store.files import locked

NUM_LAYERS = 8
NUM_BLOCKS = NUM_LAYERS + 3
SECTION: dict[str, object] = {"bits": 4, "group_size": 32, "search": "clip"}
KEPT = 4


def stop_when_writing(name: str, place: int) -> None:
    """Let this process send itself a signal when it is about to write the store's file of this number; where the signal
    ends the process, half the file is there."""
    from zinfer.store import writing

    number, places, place_file = signal.Signals[name], [], writing.place_file

    def place_or_stop(path: Path, pieces: Any) -> Any:
        places.append(path)
        if len(places) == place:
            if number == signal.SIGKILL:
                path.with_name(f".zinfer_store.{path.name}.tmp").write_bytes(b"half a file")
            os.kill(os.getpid(), number)
        return place_file(path, pieces)

    writing.place_file = place_or_stop


class Workplace:
    """A folder where jobs of one model run; their stores go to `nvme` in it."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.model = model
        self.processes: list[Process] = []
        write_rows(folder / "in.jsonl", prompt_rows(6))

    def start(self, output: str, *, home: str = "nvme", stop: tuple[str, int] | None = None) -> Process:
        """`zinfer run`, which is stopped by a signal of this name at the file of this number."""
        offload = {"device": home} | ({"nvme_path": "nvme"} if home == "nvme" else {})
        config = {"zero_optimization": {"offload_param": offload}, "zinfer": {"quantization": SECTION}}
        (self.folder / "ds.json").write_text(json.dumps(config))
        options = ["--input", "in.jsonl", "--output", output, "--config", "ds.json", "--device", "cpu"]
        prepare = None if stop is None else (stop_when_writing, stop)
        process = start(["run", "--model", self.model, *options], self.folder, warm=True, prepare=prepare)
        self.processes.append(process)
        return process

    def finish(self, process: Process) -> str:
        """What it says until its good end."""
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said
        return said

    def rows(self, output: str) -> bytes:
        return (self.folder / output).read_bytes()

    @property
    def store(self) -> Path:
        """The only one there."""
        (store,) = (self.folder / "nvme").iterdir()
        return store


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return letters_model(tmp_path_factory.mktemp("model"), num_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The rows of a job whose weights are quantized into host memory."""
    place = Workplace(tmp_path_factory.mktemp("host"), model)
    place.finish(place.start("out.jsonl", home="cpu"))
    return place.rows("out.jsonl")


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The store of an undisturbed writing."""
    output = tmp_path_factory.mktemp("whole")
    assert make_store(model, output, **SECTION).num_blocks == NUM_BLOCKS
    return contents(output)


@pytest.fixture
def place(model: Path, tmp_path: Path) -> Iterator[Workplace]:
    place = Workplace(tmp_path, model)
    yield place
    for process in place.processes:
        process.kill()
        process.wait()


def test_a_job_that_is_killed_while_it_writes_goes_on_where_it_stopped(
    place: Workplace, expected: bytes, whole: dict[str, bytes]
) -> None:
    process = place.start("out.jsonl", stop=("SIGKILL", KEPT + 1))
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    store = place.store
    assert not document(store)["finished"]
    files = [block["file"] for block in blocks_of(store)]
    assert len(files) == KEPT
    kept = {name: (store / name).stat().st_mtime_ns for name in files}
    said = place.finish(place.start("out.jsonl"))
    assert f"in {NUM_BLOCKS} blocks, {KEPT} of which were there already" in said
    assert {name: (store / name).stat().st_mtime_ns for name in files} == kept
    assert contents(store) == whole
    assert place.rows("out.jsonl") == expected


def test_a_second_job_waits_for_the_first_and_may_be_interrupted(
    place: Workplace, expected: bytes, whole: dict[str, bytes]
) -> None:
    first = place.start("first.jsonl", stop=("SIGSTOP", KEPT + 1))
    while psutil.Process(first.pid).status() != psutil.STATUS_STOPPED:
        assert first.poll() is None, first.communicate()
        time.sleep(0.001)
    second, third = place.start("second.jsonl"), place.start("third.jsonl")
    waiting = f"nvme_path: {place.store} is being written by another process; waiting for it"
    until_waiting = {process: said_until(process, waiting) for process in (second, third)}
    third.send_signal(signal.SIGINT)
    _, said = third.communicate(timeout=60)
    assert third.returncode == 130, said
    assert "SIGINT: stopped. No row was written; run the same command again" in said
    assert second.poll() is None
    first.send_signal(signal.SIGCONT)
    said = until_waiting[second] + place.finish(second)
    assert said.count("waiting for it") == 1
    assert f"{NUM_BLOCKS} of which were there already" in said
    assert "0 of which were there already" in place.finish(first)
    for name in ("first.jsonl", "second.jsonl"):
        assert place.rows(name) == expected
    assert contents(place.store) == whole
    assert not list(place.store.glob(".zinfer_store*"))


def said_until(process: Process, words: str) -> str:
    """What a process writes on stderr up to the line with these words."""
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if words in line:
            return said
    raise AssertionError(said)


def test_those_who_wait_enter_one_by_one(tmp_path: Path) -> None:
    folder, inside, entered, failures = tmp_path / "nvme" / "store", [0], [0], []

    def enter(number: int) -> None:
        try:
            for turn in range(40):
                with locked(folder, ENGINE):
                    inside[0] += 1
                    assert inside[0] == 1, "two at once"
                    assert folder.is_dir()
                    entered[0] += 1
                    time.sleep(0.0002 * ((number + turn) % 3))
                    inside[0] -= 1
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=enter, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert entered == [160]
