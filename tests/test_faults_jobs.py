"""Batch jobs beside each other, over files that change, and on a disk that is full: whole rows, the right ones, and
nobody else's file touched."""

import errno
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from commands import Process, start
from faults_support import Fault, Holdings
from jobs_support import letters_model, prompt_rows, read_rows, write_rows
from reader_support import age

from zinfer.errors import JobError
from zinfer.jobs import run_job

NUM_ROWS = 96
BATCH_SIZE = 8
STREAMED = '{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "swap"}}}'


@dataclass(frozen=True)
class Workplace:
    """A folder with a model, an input, a configuration and a folder for `nvme_path`, where commands run."""

    folder: Path

    @classmethod
    def furnished(cls, folder: Path) -> "Workplace":
        place = cls(folder)
        letters_model(place.model, num_layers=4)
        for shard in place.shards():
            age(shard)
        (folder / "swap").mkdir()
        write_rows(folder / "in.jsonl", prompt_rows(NUM_ROWS))
        (folder / "ds.json").write_text(STREAMED)
        return place

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def shards(self) -> list[Path]:
        return sorted(self.model.glob("*.safetensors"))

    def start(self, output: str) -> Process:
        options = ["--input", "in.jsonl", "--output", output, "--config", "ds.json", "--batch-size", str(BATCH_SIZE)]
        return start(["run", "--model", "model", *options, "--device", "cpu"], self.folder, warm=True)

    def files(self) -> set[str]:
        return {str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return Workplace.furnished(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def whole(original: Workplace) -> bytes:
    """The output of a job that ran alone."""
    process = original.start("alone.jsonl")
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    rows = read_rows(original.folder / "alone.jsonl")
    assert len(rows) == NUM_ROWS
    assert len({tuple(row["token_ids"]) for row in rows}) > NUM_ROWS // 2, "rows that are alike would prove nothing"
    return (original.folder / "alone.jsonl").read_bytes()


@pytest.fixture
def own(original: Workplace, whole: bytes, tmp_path: Path) -> Workplace:
    """A copy of the model to be damaged; the copies' dates are the originals', old ones."""
    return Workplace(Path(shutil.copytree(original.folder, tmp_path / "own")))


@pytest.mark.slow
def test_two_jobs_side_by_side_keep_out_of_each_others_files(original: Workplace, whole: bytes) -> None:
    """One checkpoint, one `nvme_path`, outputs in one folder, and files there that neither has made."""
    folder = original.folder
    foreign = {
        folder / name: f"foreign {name}".encode()
        for name in (
            "swap/zero_stage_3",
            "swap/rank0_param_0.tensor.swp",
            "swap/one.jsonl",
            "model/model.safetensors.tmp",
            "one.jsonl.tmp",
            ".one.jsonl.tmp",
            "one.jsonl.manifest.json.bak",
            "two.jsonl.bak",
            "notes.jsonl",
        )
    }
    for path, content in foreign.items():
        path.write_bytes(content)
    before = original.files()
    jobs = [original.start(name) for name in ("one.jsonl", "two.jsonl")]
    for job in jobs:
        out, said = job.communicate(timeout=180)
        assert job.returncode == 0, said
        assert f"{NUM_ROWS} done, 0 failed" in out
    assert (folder / "one.jsonl").read_bytes() == (folder / "two.jsonl").read_bytes() == whole
    for path, content in foreign.items():
        assert path.read_bytes() == content
    made = {name + suffix for name in ("one.jsonl", "two.jsonl") for suffix in ("", ".manifest.json")}
    assert original.files() - before == made
    assert before - original.files() == set()


def test_a_foreign_file_with_the_name_of_a_temporary_one_survives(original: Workplace, tmp_path: Path) -> None:
    foreign = tmp_path / "out.jsonl.manifest.json.tmp"
    foreign.write_text("somebody else's")
    prompts = write_rows(tmp_path / "in.jsonl", prompt_rows(2))
    run_job(original.model, prompts, tmp_path / "out.jsonl", device="cpu", max_new_tokens=2)
    assert foreign.exists()
    assert foreign.read_text() == "somebody else's"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("change", ["other bytes", "the same bytes"])
def test_a_shard_that_is_rewritten_under_a_running_job(own: Workplace, whole: bytes, change: str) -> None:
    output = own.folder / "out.jsonl"
    process = own.start("out.jsonl")
    while not output.exists() or output.stat().st_size < len(whole) // 10:
        assert process.poll() is None, process.communicate()
        time.sleep(0.001)
    shard = own.shards()[0]
    content = shard.read_bytes()
    with shard.open("r+b") as file:  # in place: the descriptor that the job holds stays good
        middle = len(content) // 2
        file.seek(middle)
        file.write(content[middle:] if change == "the same bytes" else bytes(len(content) - middle))
    _, said = process.communicate(timeout=120)
    assert process.returncode == 1, said
    assert shard.name in said
    assert "the file has changed since it was opened" in said
    assert "Traceback" not in said
    kept = output.read_bytes()
    assert whole.startswith(kept)
    assert kept.endswith(b"\n")
    assert len(whole) // 10 <= len(kept) < len(whole), "some rows were written before, and not all of them"


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("write", errno.ENOSPC),
        ("fsync", errno.EIO),
        pytest.param("write", errno.EIO, marks=pytest.mark.slow),
        pytest.param("fsync", errno.ENOSPC, marks=pytest.mark.slow),
    ],
)
def test_a_full_disk_stops_a_streamed_job_and_a_second_run_completes_it(
    original: Workplace, whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    output, fault, before = tmp_path / "out.jsonl", Fault(armed=False), Holdings.now()
    real = getattr(os, call)

    def fail(descriptor: int, *args: object) -> object:
        is_output = output.exists() and os.path.samestat(os.fstat(descriptor), output.stat())
        if is_output and output.stat().st_size > len(whole) // 8:
            fault.armed = True
            if fault.strikes():
                raise OSError(code, os.strerror(code))
        return real(descriptor, *args)

    def job() -> None:
        prompts, config = original.folder / "in.jsonl", original.folder / "ds.json"
        run_job(original.model, prompts, output, config=config, device="cpu", batch_size=BATCH_SIZE)

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        with pytest.raises(JobError, match=rf"output .*out\.jsonl cannot be written: .*\(errno {code}\)"):
            job()
    assert fault.struck_at_s is not None
    seconds = time.perf_counter() - fault.struck_at_s
    print(f"{call}, errno {code}: the failure reached the caller after {seconds * 1e3:.1f} ms")
    assert seconds < 5
    kept = output.read_bytes()
    assert whole.startswith(kept)
    assert kept.endswith(b"\n")
    assert 0 < len(kept) < len(whole)
    job()
    assert output.read_bytes() == whole
    assert Holdings.now() <= before
