"""A job of several ranks writes the rows of one rank, whoever computes them and however they end."""

import json
import os
import random
import re
import shutil
import signal
import socket
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import typer
from commands import start
from family_models import family_model
from jobs_support import letters_model, letters_tokenizer, prompt_rows, read_rows, write_rows
from ranks_job_support import CONFIG, Job, ended, ranks_of, run_in_ranks
from ranks_support import free_port

from zinfer.cli import ending as ending_module
from zinfer.cli.rank_endings import LAUNCHER, Ending, first_cause, read_endings
from zinfer.jobs.manifest import read_manifest
from zinfer.weights import Checkpoint

NUM_ROWS = 48
BAD_ROWS = [{"id": "misspelt", "prompt": "abc", "temperatur": 1}, {"id": "long", "prompt": "a" * 500}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    letters_model(folder / "model", num_layers=4)
    write_rows(folder / "in.jsonl", [*prompt_rows(NUM_ROWS), *BAD_ROWS])
    (folder / "ds.json").write_text(CONFIG)
    return folder


@pytest.fixture(scope="module")
def whole(folder: Path) -> tuple[list[bytes], str]:
    """The rows of an undisturbed run of one rank, and its summary."""
    job = Job(folder, "whole.jsonl", "--batch-size", "4")
    said = job.run(1, exit_code=3)
    assert len({row["id"] for row in read_rows(job.output)}) == NUM_ROWS + len(BAD_ROWS)
    return job.rows(), said


def read_bytes(said: str, what: str) -> list[float]:
    """The bytes read from disk of a summary, in MB, those of all ranks first."""
    line = re.search(rf"{what} +│ (.*)", said)
    assert line, said
    return [float(number) * (0.001 if unit == "kB" else 1) for number, unit in re.findall(r"([\d.]+) (kB|MB)", line[1])]


def test_two_ranks_write_the_rows_of_one_and_read_half_each(folder: Path, whole: tuple[list[bytes], str]) -> None:
    job = Job(folder, "two.jsonl", "--batch-size", "4")
    processes = ended(job.start(2))
    assert [code for code, _, _ in processes] == [3, 3], processes
    said, said_before = processes[0][1:]
    rows, alone = whole
    assert job.rows() == rows
    assert f"{NUM_ROWS} done, 2 failed: 1 x malformed, 1 x too long" in said
    assert "if stopped, at most 8 rows under way are computed again" in said_before
    [read] = read_bytes(alone, "moved")
    together, first, second = read_bytes(said, "of all ranks")[:3]
    assert first == pytest.approx(read / 2, rel=0.15)
    assert second == pytest.approx(read / 2, rel=0.15)
    assert together == pytest.approx(first + second, abs=0.02)
    passes = re.search(r"ranks +│ 2: (\d+), (\d+) passes", said)
    assert passes, said
    assert min(map(int, passes.groups())) > 0, "both ranks compute"


@pytest.mark.slow
def test_the_job_chooses_a_batch_for_each_rank_and_keeps_it_on_another_number(folder: Path) -> None:
    write_rows(folder / "few.jsonl", prompt_rows(9))
    job = Job(folder, "chosen.jsonl", rows="few.jsonl")
    job.run(2)
    manifest = read_manifest(job.output.with_name(job.output.name + ".manifest.json"))
    assert manifest is not None
    assert manifest.settings["batch_size"] == 5
    rows = job.rows()
    alone = Job(folder, "stated.jsonl", "--batch-size", "5", rows="few.jsonl")
    alone.run(1)
    assert alone.rows() == rows
    kept = job.output.read_bytes().splitlines(keepends=True)[2:]
    job.output.write_bytes(b"".join(kept))
    assert "7 rows before this run" in job.run(1)
    assert job.rows() == rows


@pytest.mark.slow
def test_stages_of_unequal_numbers_of_layers_resume_with_as_many_pages(tmp_path: Path) -> None:
    """Each stage's pages take other bytes, and the job keeps those of the first."""
    letters_model(tmp_path / "model", num_layers=3)
    write_rows(tmp_path / "in.jsonl", prompt_rows(9))
    (tmp_path / "ds.json").write_text("{}")
    alone = Job(tmp_path, "alone.jsonl", "--batch-size", "4")
    alone.run(1)
    (tmp_path / "ds.json").write_text(json.dumps({"zinfer": {"parallel": {"pipeline": 2}}}))
    job = Job(tmp_path, "staged.jsonl", "--batch-size", "4")
    job.run(2)
    assert job.rows() == alone.rows()
    job.output.write_bytes(b"".join(job.output.read_bytes().splitlines(keepends=True)[3:]))
    assert "6 rows before this run" in job.run(2)
    assert job.rows() == alone.rows()


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [0, 1])
def test_ranks_without_rows_end_with_the_others(folder: Path, num_rows: int) -> None:
    write_rows(folder / f"{num_rows}.jsonl", prompt_rows(num_rows))
    job = Job(folder, f"rows-{num_rows}.jsonl", rows=f"{num_rows}.jsonl")
    assert f"{num_rows} done, 0 failed" in job.run(2)
    assert len(job.rows()) == num_rows
    assert f"{num_rows} rows before this run" in job.run(2) or not num_rows


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(5,), pytest.param((1, 115, 2, 90, 1), marks=pytest.mark.slow)])
def test_four_ranks_end_with_few_rows_and_one_layer(tmp_path: Path, lengths: tuple[int, ...]) -> None:
    """Of one row three ranks have none. Of five, of very different lengths, a rank takes the next once it is free."""
    letters_model(tmp_path / "model", num_layers=1)
    rows = [{"id": str(number), "prompt": "a" * each, "max_new_tokens": 12} for number, each in enumerate(lengths)]
    write_rows(tmp_path / "in.jsonl", rows)
    (tmp_path / "ds.json").write_text(CONFIG)
    alone, several = (Job(tmp_path, name, "--batch-size", "1") for name in ("alone.jsonl", "several.jsonl"))
    alone.run(1)
    said = several.run(4)
    assert several.rows() == alone.rows()
    assert f"{len(lengths)} done, 0 failed" in said
    passes = re.search(r"ranks +│ 4: (\d+), (\d+), (\d+), (\d+) passes", said)
    assert passes, said
    assert 1 <= sum(int(each) > 0 for each in passes.groups()) <= len(lengths), "ranks without rows compute nothing"


@pytest.mark.slow
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_killed_rank_ends_the_other_and_the_job_resumes(
    folder: Path, whole: tuple[list[bytes], str], rank: int
) -> None:
    rows, _ = whole
    job = Job(folder, f"killed-{rank}.jsonl", "--batch-size", "4")
    place = random.Random(rank).randrange(sum(map(len, rows)) // 2)
    processes = job.start(2)
    job.wait_for_rows(processes, place)
    processes[rank].kill()
    said = ended(processes)
    assert said[rank][0] == -signal.SIGKILL
    other_code, _, other_said = said[1 - rank]
    assert other_code == 1, said
    if rank == 1:
        host = socket.gethostname()
        assert f"error: rank 1 on {host} ended without a word: it was killed, or has lost its connection" in other_said
        assert "The rows in killed-1.jsonl are kept; run the same command again to go on" in other_said
        assert other_said.count("error:") == 1
    kept = job.output.read_bytes().splitlines()
    assert place < sum(len(line) + 1 for line in kept)
    assert set(kept) < set(rows)
    unwrapped = re.sub(r"[\s│]+", " ", job.run(2, exit_code=3))
    assert f"; {len(kept)} rows before this run" in unwrapped
    assert job.rows() == rows


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_fifty_killed_ranks_lose_and_double_no_row(folder: Path, whole: tuple[list[bytes], str]) -> None:
    rows, _ = whole
    chance = random.Random(50)
    job = Job(folder, "fifty.jsonl", "--batch-size", "4")
    for _ in range(50):
        if job.output.exists() and job.rows() == rows:
            job.output.unlink()
            job.output.with_name(job.output.name + ".manifest.json").unlink()
        processes = job.start(4)
        time.sleep(chance.uniform(0, 5))
        processes[chance.randrange(4)].kill()
        codes = [code for code, _, _ in ended(processes)]
        assert set(codes) <= {1, 3, -signal.SIGKILL}, codes
        kept = job.rows() if job.output.exists() else []
        assert len(set(kept)) == len(kept)
        assert set(kept) <= set(rows)
    job.run(4, exit_code=3)
    assert job.rows() == rows


ENDS_LATE = """
import os, time
if os.environ["RANK"] == "0":
    from zinfer.cli import ending
    note = ending.note_ending
    ending.note_ending = lambda *given: (time.sleep(2), note(*given))
"""


def test_signals_and_full_disks_end_all_ranks(folder: Path, whole: tuple[list[bytes], str], tmp_path: Path) -> None:
    rows, _ = whole
    job = Job(folder, "ended.jsonl", "--batch-size", "4")
    processes = job.start(2)
    job.wait_for_rows(processes, 0)
    for process in processes:
        process.send_signal(signal.SIGINT)
    said = ended(processes)
    assert said[0][0] == 130, said
    assert said[0][2].endswith(
        "zinfer: SIGINT: stopped. The rows in ended.jsonl are kept; run the same command again to go on.\n"
    )
    assert not said[1][2]
    limit_bytes = sum(map(len, rows)) // 2
    variables = run_in_ranks(tmp_path, ENDS_LATE)  # the launcher asks the rank to end before it says why
    words = [*job.words, "--ranks", "2"]
    [(code, _, told)] = ended([start(words, folder, warm=True, limit_bytes=limit_bytes, variables=variables)])
    assert code == 1, told
    assert "zinfer: error: output ended.jsonl cannot be written: File too large" in told
    assert told.count("error:") == 1
    job.run(2, exit_code=3)
    assert job.rows() == rows


def damaged(rank: str, what: str) -> None:
    """Make the model of one rank fail in a pass, or its loading; runs in the process of the command."""
    from zinfer.jobs.completer import RaggedCompleter

    def fail(*_: Any) -> Any:
        raise RuntimeError("boom")

    if os.environ["RANK"] == rank:
        setattr(RaggedCompleter, what, fail)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("what", ["__init__", "complete"])
def test_an_error_of_another_rank_is_told_once_by_rank_0(folder: Path, what: str) -> None:
    job = Job(folder, f"raised-{what}.jsonl", "--batch-size", "4")
    port = free_port()
    processes = []
    for rank in range(2):
        variables = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        variables["TORCH_CPP_LOG_LEVEL"] = "ERROR"
        prepare = (damaged, ("1", what))
        processes.append(start(job.words, folder, warm=True, prepare=prepare, variables=variables))
    said = ended(processes)
    assert [code for code, _, _ in said] == [1, 1], said
    assert f"error: rank 1 on {socket.gethostname()}: RuntimeError: boom. " in said[0][2]
    assert "run the same command again to go on" in said[0][2]
    assert "Traceback" not in said[0][2]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("model_type", "class_name", "options"),
    [("bert", "BertModel", ["--task", "embed"]), ("t5", "T5ForConditionalGeneration", [])],
)
def test_encoders_and_padded_batches_share_their_rows(
    tmp_path: Path, model_type: str, class_name: str, options: list[str]
) -> None:
    family_model(model_type, class_name).save_pretrained(tmp_path / "model")
    letters_tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"id": f"row-{number}", "prompt": "abcdefgh"[: 1 + number % 8]} for number in range(12)]
    write_rows(tmp_path / "in.jsonl", rows if options else [{**row, "max_new_tokens": 4} for row in rows])
    (tmp_path / "ds.json").write_text(CONFIG)
    jobs = [Job(tmp_path, f"{num_ranks}.jsonl", "--batch-size", "3", *options) for num_ranks in (1, 2)]
    for num_ranks, job in enumerate(jobs, start=1):
        job.run(num_ranks)
    assert jobs[0].rows() == jobs[1].rows()
    assert len(jobs[0].rows()) == 12


@pytest.mark.slow
def test_one_bit_of_the_part_that_another_rank_reads_is_refused(folder: Path, tmp_path: Path) -> None:
    """Each rank compares what it reads; whichever it is, the job ends as for other weights of rank 0."""
    shutil.copytree(folder / "model", tmp_path / "model")
    write_rows(tmp_path / "in.jsonl", prompt_rows(NUM_ROWS))
    config = {**json.loads(CONFIG), "zinfer": {"parallel": {"pipeline": 2}}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    job = Job(tmp_path, "out.jsonl", "--batch-size", "4", "--ranks", "2")
    interrupted(job)
    rows = job.output.read_bytes()
    entry = Checkpoint.open(tmp_path / "model").tensors["model.layers.3.mlp.gate_proj.weight"]
    with entry.file.open("r+b") as file:  # of the second stage, between samples
        file.seek(entry.offset + 9000)
        [byte] = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x40]))
    [(code, _, said)] = ended([start(job.words, job.folder, warm=True)])
    assert code == 2, said
    assert "rank 1 on " in said
    assert re.search(r"holds other weights than .*in model\.layers\.3\.mlp\.gate_proj", " ".join(said.split()))
    assert "Traceback" not in said
    assert job.output.read_bytes() == rows


def interrupted(job: Job) -> None:
    """Ctrl-C of a launcher whose ranks are at work."""
    launcher = start(job.words, job.folder, warm=True)
    job.wait_for_rows([launcher], 0)
    ranks = psutil.Process(launcher.pid).children(recursive=True)
    launcher.send_signal(signal.SIGINT)
    [(code, _, said)] = ended([launcher])
    assert code == 130, said
    assert said.count(f"SIGINT: stopped. The rows in {job.output.name} are kept; run the same command again") == 1
    assert "Traceback" not in said
    assert len(ranks) >= 2
    assert not any(rank.is_running() for rank in ranks)


@pytest.mark.slow
@pytest.mark.parametrize("begins_anew", [pytest.param(True, marks=pytest.mark.slow), False])
def test_the_launcher_starts_ranks_and_speaks_for_them(
    folder: Path, whole: tuple[list[bytes], str], begins_anew: bool
) -> None:
    rows, _ = whole
    job = Job(folder, f"launched-{begins_anew}.jsonl", "--batch-size", "4", "--ranks", "2")
    if not begins_anew:
        interrupted(job)
    launcher = start(job.words, folder, warm=True)
    [(code, out, said)] = ended([launcher])
    assert code == 3, said
    assert f"{NUM_ROWS} done, 2 failed" in out
    assert out.count("zinfer run") == 1
    assert "[W" not in said
    assert job.rows() == rows


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_the_launcher_names_a_killed_rank(folder: Path, rank: int) -> None:
    job = Job(folder, f"launched-{rank}.jsonl", "--batch-size", "4", "--ranks", "2")
    launcher = start(job.words, folder, warm=True)
    job.wait_for_rows([launcher], 0)
    ranks = ranks_of(launcher.pid)
    ranks[rank].kill()
    [(code, _, said)] = ended([launcher])
    assert code == 1, said
    assert f"error: rank {rank} on {socket.gethostname()} was killed by SIGKILL. The rows in" in said
    assert said.count("zinfer: ") == 1
    assert not any(each.is_running() for each in ranks.values())


PREPARES = """
import time
from pathlib import Path
from zinfer.jobs import job_run, peer_worker

scan, find = job_run.scan_input, peer_worker.find_tokenizer

def scan_once_prepared(*given, **named):
    deadline = time.monotonic() + 60
    while not Path("prepared").exists():
        assert time.monotonic() < deadline, "rank 1 waits for rank 0"
        time.sleep(0.01)
    return scan(*given, **named)

def find_and_note(folder):
    Path("prepared").touch()
    return find(folder)

job_run.scan_input, peer_worker.find_tokenizer = scan_once_prepared, find_and_note
"""


def test_ranks_build_the_model_and_its_tokenizer_while_rank_0_plans(folder: Path) -> None:
    job = Job(folder, "prepared.jsonl", "--batch-size", "4", "--ranks", "2")
    [(code, _, said)] = ended([start(job.words, folder, warm=True, variables=run_in_ranks(folder, PREPARES))])
    (folder / "sitecustomize.py").unlink()
    assert code == 3, said


def test_a_wrong_number_of_ranks_is_refused(folder: Path) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    words = Job(folder, "wrong.jsonl", "--ranks", "3").words
    [(code, _, said)] = ended([start(words, folder, warm=True, variables=variables)])
    assert code == 2
    assert said == "zinfer: error: --ranks is 3, but 2 processes were started; leave --ranks out\n"


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from zinfer.cli.launch import choose_num_ranks
    from zinfer.errors import ConfigError

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ConfigError, match="--ranks 4 needs 4 GPUs, and torch sees 2; give fewer, or --device cpu"):
        choose_num_ranks(4, "auto")
    assert [choose_num_ranks(stated, "auto") for stated in (None, 1, 2)] == [1, 1, 2]
    assert [choose_num_ranks(stated, "cpu") for stated in (None, 4)] == [1, 4]
    with pytest.raises(ConfigError, match="--ranks 10000000000 is more than 256 processes on one host"):
        choose_num_ranks(10**10, "cpu")


def test_gpus_that_cannot_be_counted_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from zinfer.cli.launch import choose_num_ranks
    from zinfer.errors import RankError

    def fail() -> int:
        raise RuntimeError("no driver")

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for count, why in (
        (fail, "RuntimeError: no driver"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "exit code -9"),
    ):
        monkeypatch.setattr("torch.cuda.device_count", count)
        with pytest.raises(RankError, match=rf"torch could not count the GPUs \({why}\); try `nvidia-smi`"):
            choose_num_ranks(2, "auto")
    assert choose_num_ranks(2, "cpu") == 2


@pytest.mark.parametrize(
    ("parallel", "device", "most", "wanted"),
    [
        ({}, "auto", None, 8),
        ({}, "cpu", None, 1),
        ({}, "auto", 5, 5),
        ({"tensor": 2}, "cuda", None, 8),
        ({"tensor": 2}, "cuda", 5, 4),
        ({"pipeline": 3}, "auto", None, 6),
        ({"replicas": 2, "zero": 2}, "auto", None, 4),
        ({"replicas": 4, "tensor": 4}, "auto", None, 1),
        ({"tensor": 16}, "auto", None, 1),
    ],
)
def test_commands_use_all_gpus(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    parallel: dict[str, int],
    device: str,
    most: int | None,
    wanted: int,
) -> None:
    from zinfer.cli.launch import choose_num_ranks
    from zinfer.config.parallel import Parallel

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert choose_num_ranks(None, device, Parallel(**parallel), most) == wanted
    said = capsys.readouterr().err
    assert said == (f"zinfer: {wanted} ranks, one for each GPU (--ranks 1: one process)\n" if wanted > 1 else "")
    assert choose_num_ranks(1, device, Parallel(**parallel)) == 1


def test_a_rank_starts_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from zinfer.cli.launch import choose_num_ranks
    from zinfer.config.parallel import Parallel

    for name, value in (("WORLD_SIZE", "4"), ("RANK", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert choose_num_ranks(None, "auto", Parallel()) == 1


def test_the_commands_ask_for_all_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`run` and `bench` start a rank on each; not beside rivals, and no more than there are rows."""
    from typer.testing import CliRunner

    from zinfer.cli import app

    started: list[int] = []

    def launch(num_ranks: int, kept: object) -> None:
        started.append(num_ranks)
        raise SystemExit(0)

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("zinfer.cli.launch.launch", launch)
    model = ["--model", str(folder / "model")]
    job = [*model, "--input", str(folder / "in.jsonl"), "--output", str(folder / "all.jsonl")]
    for words in (["run", *job], ["bench", *model, "--rows", "64"], ["bench", *model, "--rows", "3"]):
        CliRunner().invoke(app, words)
    assert started == [4, 4, 3]


def ending(rank: int, text: str, exit_code: int, *, is_own: bool) -> Ending:
    return Ending(rank, "host", text, exit_code, is_own)


@pytest.mark.parametrize(
    ("endings", "told"),
    [
        (
            [ending(1, "error: boom", 1, is_own=True), ending(0, "error: rank 1: boom", 1, is_own=False)],
            "error: rank 1: boom",
        ),
        (
            [ending(1, "error: boom", 1, is_own=True), ending(0, "SIGTERM", 143, is_own=False)],
            "rank 1 on host: error: boom",
        ),
        ([ending(1, "error: gone", 1, is_own=False), ending(0, "SIGTERM", 143, is_own=False)], "SIGTERM"),
        (
            [
                ending(0, "error: rank 2 is gone", 1, is_own=False),
                Ending(1, "host", "error: rank 2 on host has not answered", 1, True, 2),
            ],
            "error: rank 2 on host has not answered",
        ),
        ([], None),
    ],
)
def test_the_first_cause_is_told(endings: list[Ending], told: str | None) -> None:
    found = first_cause(endings)
    assert (found and found.told) == told


@pytest.mark.parametrize("is_asked_to_end", [False, True])
def test_who_is_asked_to_end_waits_for_no_other_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_asked_to_end: bool
) -> None:
    """The launcher asks once a rank has ended, which tells no more; a killed one has told nothing."""
    (tmp_path / "endings").touch()
    monkeypatch.setenv(LAUNCHER, str(tmp_path / "endings"))
    monkeypatch.setattr(ending_module, "_received", [signal.SIGTERM] if is_asked_to_end else [])
    waits: list[bool] = []
    monkeypatch.setattr(ending_module, "wait_for_cause", lambda: waits.append(True))
    with pytest.raises(typer.Exit):
        ending_module.conclude("error: rank 1 is gone", ending_module.EXIT_STOPPED, is_own=False)
    assert waits == ([] if is_asked_to_end else [True])
    (noted,) = read_endings(tmp_path / "endings")
    assert noted.text == "error: rank 1 is gone"
