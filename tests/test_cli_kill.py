"""The real command, killed in every way: the rows that it leaves at last are those of an undisturbed run."""

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Process, kill_group, start
from jobs_support import letters_model, prompt_rows, read_rows, write_rows

from zinfer.cli.ending import Interrupted, raise_on_signals
from zinfer.engine.interrupts import deferred

NUM_ROWS = 120
STREAMED = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}
SIZES = {
    "tokens_per_pass": 512,
    "max_sequences": 16,
    "kv_cache_memory": "64MB",
    "admission_order": "arrival",
    "speculate": "ngram",
}
"""Else two runs on a GPU whose free memory changes would plan passes of their own, and round as these do."""


class Command:
    """`zinfer run` on one input and one output, each time in a process of its own."""

    def __init__(self, folder: Path, output: str) -> None:
        self.folder = folder
        self.device = folder.name
        self.output = folder / output

    def start(self, limit_bytes: int | None = None, *more: str, warm: bool = True) -> Process:
        options = ["--input", "in.jsonl", "--output", self.output.name, "--config", "ds.json", "--batch-size", "16"]
        command = ["run", "--model", "model", *options, "--device", self.device, "--ranks", "1", *more]
        return start(command, self.folder, warm=warm, limit_bytes=limit_bytes)

    def size_bytes(self) -> int:
        return self.output.stat().st_size if self.output.exists() else -1

    def end(self, process: Process, number: signal.Signals, when: Callable[[], bool]) -> str:
        """Sends the signal to the process group once `when` holds; returns what stderr said."""
        while not when():
            assert process.poll() is None, process.communicate()
            time.sleep(0.001)
        kill_group(process, number)
        return process.communicate(timeout=60)[1]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A model, an input and a config, in a folder named for the device that the job is to use."""
    folder = tmp_path_factory.mktemp("job") / str(request.param)
    folder.mkdir()
    letters_model(folder / "model", num_layers=4)
    write_rows(folder / "in.jsonl", prompt_rows(NUM_ROWS))
    (folder / "ds.json").write_text(json.dumps(STREAMED | ({"zinfer": SIZES} if folder.name == "cuda" else {})))
    return folder


@pytest.fixture(scope="module")
def whole(folder: Path) -> bytes:
    """The output of an undisturbed run."""
    command = Command(folder, "whole.jsonl")
    process = command.start()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert f"{NUM_ROWS} done, 0 failed" in out
    assert {row["id"] for row in read_rows(command.output)} == {f"row-{number}" for number in range(NUM_ROWS)}
    return command.output.read_bytes()


def test_a_job_that_is_killed_again_and_again_writes_the_same_bytes(folder: Path, whole: bytes) -> None:
    command = Command(folder, "killed.jsonl")
    process = command.start()
    command.end(process, signal.SIGKILL, lambda: command.size_bytes() >= 0)  # mostly before the first row
    assert whole.startswith(command.output.read_bytes())
    places = sorted(random.Random(7).sample(range(len(whole) * 3 // 4), 2))
    for place in places:
        process = command.start()
        command.end(process, signal.SIGKILL, lambda place=place: command.size_bytes() > place)  # type: ignore[misc]
        assert process.returncode == -signal.SIGKILL
        kept = command.output.read_bytes()
        assert whole.startswith(kept)
        assert place < len(kept) < len(whole)
    with command.output.open("ab") as file:
        file.write(whole[len(kept) :][:9])
    process = command.start()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "dropped a torn last line of 9 bytes" in err
    assert f"{NUM_ROWS} done, 0 failed; {kept.count(chr(10).encode())} rows before this run" in out
    assert command.output.read_bytes() == whole


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("num_rows", "num_kills"), [(600, 2), (10_000, 50)])
def test_no_written_row_is_computed_again(folder: Path, num_rows: int, num_kills: int) -> None:
    """Killed in the midst of large batches, again and again: the bytes are those of an undisturbed run."""
    write_rows(folder / f"{num_rows}.jsonl", prompt_rows(num_rows))
    (folder / "few.json").write_text(json.dumps(STREAMED | {"zinfer": {**SIZES, "max_sequences": 64}}))
    options = ["--input", f"{num_rows}.jsonl", "--batch-size", "4096", "--config", "few.json"]
    whole, command = Command(folder, f"whole-{num_rows}.jsonl"), Command(folder, f"killed-{num_rows}.jsonl")
    out, err = whole.start(None, *options).communicate(timeout=600)
    assert f"{num_rows:,} done, 0 failed" in out, err
    wanted, chance = whole.output.read_bytes(), random.Random(num_kills)
    num_followed = 0
    for place in sorted(chance.randrange(len(wanted)) for _ in range(num_kills)):
        process = command.start(None, *options)
        while process.poll() is None and command.size_bytes() <= place:
            time.sleep(0.001)
        process.kill()
        _, err = process.communicate(timeout=60)
        assert process.returncode in (-signal.SIGKILL, 0), err
        assert "recomputing" not in err
        num_followed += "keep their places in the passes" in err
    out, err = command.start(None, *options).communicate(timeout=600)
    assert f"{num_rows:,} done, 0 failed" in out, err
    assert num_followed >= num_kills // 3
    assert command.output.read_bytes() == wanted


def test_signals_full_disks_and_second_writers_keep_the_rows(folder: Path, whole: bytes) -> None:
    command = Command(folder, "ended.jsonl")
    process = command.start()
    said = command.end(process, signal.SIGINT, lambda: command.size_bytes() > 0)
    assert process.returncode == 130, said
    assert "SIGINT: stopped. The rows in ended.jsonl are kept; run the same command again to go on." in said
    limit_bytes = len(whole) // 2
    process = command.start(limit_bytes)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 1, said
    assert "output ended.jsonl cannot be written: File too large" in said
    assert limit_bytes - 1000 < command.size_bytes() <= limit_bytes
    kept_bytes = command.size_bytes()
    process = command.start()
    while command.size_bytes() == kept_bytes:
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGSTOP)
    second = command.start()
    _, refusal = second.communicate(timeout=120)
    assert second.returncode == 2, refusal
    assert "ended.jsonl is being written by another process" in refusal
    os.killpg(process.pid, signal.SIGTERM)
    os.killpg(process.pid, signal.SIGCONT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 143, said
    assert whole.startswith(command.output.read_bytes())
    process = command.start()
    assert process.wait(timeout=120) == 0
    assert command.output.read_bytes() == whole


def test_ctrl_c_is_answered_at_once_where_the_engine_holds_it_back(capfd: pytest.CaptureFixture[str]) -> None:
    """As in calls of `generate` and of encoders, which the main thread makes."""
    said: list[str] = []

    def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        said.append(capfd.readouterr().err)

    with pytest.raises(Interrupted), raise_on_signals(makes_passes=True):
        deferred(work)
    assert said == ["zinfer: stopping after this pass; press Ctrl-C again to stop now\n"]
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_a_job_of_several_ranks_answers_ctrl_c_once(folder: Path) -> None:
    if folder.name != "cpu":
        pytest.skip("ranks of their own GPUs are another test's")
    command = Command(folder, "ranks.jsonl")
    write_rows(folder / "many.jsonl", prompt_rows(4000))
    process = command.start(None, "--ranks", "2", "--input", "many.jsonl", warm=False)
    said = command.end(process, signal.SIGINT, lambda: command.size_bytes() > 0)
    assert process.returncode == 130, said
    assert said.count("zinfer: stopping after this pass") == said.count("zinfer: SIGINT: stopped. ") == 1
    assert said.index("stopping after this pass") < said.index("SIGINT: stopped")


def handles_signals(process: Process) -> bool:
    """Whether the command has taken the handling of signals over: the system's list says so of SIGTERM."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    handled = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(handled.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_strikes", [3, 200])
def test_ctrl_c_at_random_moments_loses_and_doubles_no_row(folder: Path, whole: bytes, num_strikes: int) -> None:
    """It ends the command in time, and what is written is the beginning of an undisturbed run's rows."""
    if folder.name == "cuda" and num_strikes > 3:
        pytest.skip("beside a GPU every process starts cold; many strikes are for the CPU")
    command, chance = Command(folder, f"struck-{num_strikes}.jsonl"), random.Random(num_strikes)
    begin_s = time.monotonic()
    assert command.start().wait(timeout=120) == 0
    whole_s = time.monotonic() - begin_s
    for _ in range(num_strikes):
        if command.output.exists() and command.output.read_bytes() == whole:
            for file in folder.glob(f"{command.output.name}*"):
                file.unlink()
        process = command.start()
        while process.poll() is None and not handles_signals(process):
            time.sleep(0.001)
        time.sleep(chance.uniform(0, whole_s))
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert process.returncode in (0, 130) or f"{NUM_ROWS} done" in out, err
        assert whole.startswith(command.output.read_bytes() if command.output.exists() else b"")
    process = command.start()
    assert process.wait(timeout=120) == 0
    assert command.output.read_bytes() == whole
