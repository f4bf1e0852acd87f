"""The output file and its manifest: whole rows only, whatever breaks, and never another's file."""

import errno
import json
import multiprocessing
import os
import re
import resource
import signal
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from jobs_run_support import job, model, prompts, whole
from jobs_support import ResidentEngine, read_rows, write_rows

from zinfer.errors import JobError
from zinfer.jobs.index import RowIndex, scan_input
from zinfer.jobs.manifest import Manifest, read_manifest, write_manifest
from zinfer.jobs.output import OutputFile
from zinfer.jobs.records import encode_row
from zinfer.jobs.request import UnusableInput, manifest_path
from zinfer.jobs.rows import RowState

__all__ = ["model", "prompts", "whole"]  # fixtures

FORK = multiprocessing.get_context("fork")  # what is imported need not be imported again

MANIFEST = Manifest(
    model={"fingerprint": "f"},
    input={"sha256": "s", "size_bytes": 9},
    settings={"batch_size": 4},
    versions={"torch": "2"},
    began=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
)
ROWS: list[dict[str, Any]] = [
    {"id": "a", "token_ids": [1]},
    {"id": 2, "error": "line 2: bad"},
    {"id": "c", "token_ids": []},
]


@pytest.fixture
def index(tmp_path: Path) -> RowIndex:
    rows: list[dict[str, Any]] = [
        {"id": "a", "prompt": "p"},
        {"id": 2, "prompt": "p"},
        {"id": "c", "prompt": "p"},
        {"id": "d", "prompt": "p"},
    ]
    return scan_input(write_rows(tmp_path / "in.jsonl", rows))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def written(path: Path) -> Path:
    with closing(OutputFile(path)) as out:
        out.begin(MANIFEST)
        out.append(ROWS)
    return path


def states(path: Path, index: RowIndex) -> list[int]:
    with closing(OutputFile(path)) as out:
        out.check_same_job(MANIFEST)
        return list(out.resume(index)[0])


def test_rows_come_back(path: Path, index: RowIndex) -> None:
    assert states(written(path), index) == [RowState.DONE, RowState.FAILED, RowState.DONE, RowState.MISSING]
    assert read_rows(path) == ROWS


def test_lines_are_compact_utf8_that_any_reader_takes() -> None:
    assert encode_row({"id": "ü", "error": "\ud800 \n"}) == '{"id":"ü","error":"\\ud800 \\n"}\n'.encode()


@pytest.mark.parametrize("tail", [b'{"id":"d","tok', b"\0\0\0\0", b'{"id":"d","token_ids":[1]}'])
def test_a_torn_last_line_is_dropped(path: Path, index: RowIndex, tail: bytes) -> None:
    whole = written(path).read_bytes()
    path.write_bytes(whole + tail)
    with closing(OutputFile(path)) as out:
        assert out.resume(index)[1] == len(tail)
        out.append([{"id": "d", "token_ids": [5]}])
    assert path.read_bytes() == whole + b'{"id":"d","token_ids":[5]}\n'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"\n", "line 4 holds invalid JSON"),
        (b"[1]\n", "line 4 holds no row with an id"),
        (b"[" * 100_000 + b"\n", "line 4 holds invalid JSON (maximum recursion depth exceeded"),
        (b'{"id":"d"}\n', "line 4 holds neither a completion nor an error"),
        (b'{"id":"e","error":""}\n', "line 4 holds the id 'e', which the input does not have"),
        (b'{"id":"a","error":""}\n', "line 4 holds an id that an earlier line already has"),
    ],
)
def test_a_line_that_the_job_cannot_have_written_is_refused(
    path: Path, index: RowIndex, line: bytes, message: str
) -> None:
    changed = written(path).read_bytes() + line
    path.write_bytes(changed)
    with pytest.raises(UnusableInput, match=re.escape(message)), closing(OutputFile(path)) as out:
        out.resume(index)
    assert path.read_bytes() == changed


def test_another_job_is_refused_and_the_differences_are_listed(path: Path) -> None:
    written(path)
    now = replace(MANIFEST, model={"fingerprint": "g"}, settings={"batch_size": 8, "dtype": "float32"})
    with pytest.raises(UnusableInput) as caught, closing(OutputFile(path)) as out:
        out.check_same_job(now)
    assert "\n  model.fingerprint: f in the manifest, g now" in str(caught.value)
    assert "\n  settings.batch_size: 4 in the manifest, 8 now" in str(caught.value)
    assert "\n  settings.dtype: absent in the manifest, float32 now" in str(caught.value)
    assert "--restart" in str(caught.value)
    assert read_rows(path) == ROWS


def test_other_versions_of_the_software_are_no_other_job(path: Path) -> None:
    assert MANIFEST.differences(replace(MANIFEST, versions={"torch": "3"})) == []


def test_a_strangers_file_is_never_touched(path: Path) -> None:
    path.write_text("precious\n")
    with closing(OutputFile(path)) as out:
        with pytest.raises(UnusableInput, match="exists and has no manifest"):
            out.check_same_job(MANIFEST)
        with pytest.raises(UnusableInput, match=r"left as it is \(with --restart too\)"):
            out.begin(MANIFEST)
    assert path.read_text() == "precious\n"
    assert not manifest_path(path).exists()


def test_beginning_again_discards_the_former_rows(path: Path, index: RowIndex) -> None:
    written(path)
    with closing(OutputFile(path)) as out:
        out.begin(MANIFEST)
    assert states(path, index) == [RowState.MISSING] * 4


def test_a_file_that_was_never_begun_leaves_nothing(path: Path) -> None:
    with closing(OutputFile(path)):
        assert path.exists()
    assert not path.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not a manifest of a zinfer job; move it away"),
        (b"[]", "is not a manifest of a zinfer job; move it away"),
        (b"[" * 100_000, "is not a manifest of a zinfer job; move it away"),
        (b'{"kind": "zinfer batch job", "version": 99}', "has version 99, this zinfer writes 4"),
        (
            b'{"kind": "zinfer batch job", "version": 4, "model": {}}',
            "is damaged: input is missing; give another",
        ),
        (
            b'{"kind": "zinfer batch job", "version": 4, "model": {}, "input": {}, "settings": {}, "versions": {}}',
            "is damaged: began is missing",
        ),
        (
            b'{"kind": "zinfer batch job", "version": 4, "model": {}, "input": {}, "settings": {}, "versions": {},'
            b' "began": "2026-01-02T03:04:05", "sizes": {"kv_page_size": 1.5}}',
            "is damaged: sizes.kv_page_size: must be a positive whole number or a word, not 1.5",
        ),
        (
            b'{"kind": "zinfer batch job", "version": 4, "model": {}, "input": {}, "settings": {}, "versions": {},'
            b' "began": "2026-01-02T03:04:05",'
            b' "weights": {"a": {"size_bytes": 1, "mtime_ns": 1, "sample_sha256": "", "sha1": ""}}}',
            "is damaged: unknown field 'weights.a.sha1'",
        ),
        (b'{"kind": "zinfer batch job", "version": 4, "model": {"a": "\\ud800"}}', "is not a manifest of a zinfer job"),
    ],
)
def test_a_manifest_that_is_none_is_refused_and_kept(path: Path, content: bytes, message: str) -> None:
    manifest_path(path).write_bytes(content)
    with pytest.raises(UnusableInput, match=re.escape(message)):
        OutputFile(path)
    assert manifest_path(path).read_bytes() == content


@pytest.mark.parametrize("manifest", [{"version": 3}, {"version": 99}], ids=str)
def test_a_restart_discards_the_rows_of_a_job_that_nobody_can_resume(path: Path, manifest: dict[str, object]) -> None:
    path.write_text("rows\n")
    manifest_path(path).write_text(json.dumps({"kind": "zinfer batch job", **manifest}))
    with pytest.raises(UnusableInput, match="--restart"):
        OutputFile(path)
    with closing(OutputFile(path, restart=True)) as out:
        out.check_ours()
        out.begin(MANIFEST)
    assert (path.read_bytes(), read_manifest(manifest_path(path))) == (b"", MANIFEST)


def test_a_restart_leaves_what_is_not_a_jobs(path: Path) -> None:
    manifest_path(path).write_text("[]")
    with pytest.raises(UnusableInput, match="is not a manifest of a zinfer job"):
        OutputFile(path, restart=True)


def test_a_manifest_comes_back(path: Path) -> None:
    write_manifest(path, MANIFEST)
    assert read_manifest(path) == MANIFEST
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.mkdir(), "is not a regular file"),
        (lambda path: path.symlink_to("/dev/full"), "is not a regular file"),
        (lambda path: path.symlink_to(path), "cannot be written: Too many levels of symbolic links (errno 40); give"),
        (lambda path: path.symlink_to(path.parent / "no" / "folder"), "No such file or directory (errno 2)"),
    ],
)
def test_an_output_that_cannot_be_a_file_is_refused(path: Path, make: object, message: str) -> None:
    assert callable(make)
    make(path)
    with pytest.raises(UnusableInput, match=re.escape(message)):
        OutputFile(path)


def hold(path: Path, pipe: Connection) -> None:
    """Until it is killed."""
    held = OutputFile(path)
    pipe.send("held")
    pipe.recv()
    held.close()


def test_a_second_writer_is_refused_until_the_first_ends(path: Path) -> None:
    here, there = FORK.Pipe()
    holder = FORK.Process(target=hold, args=(path, there))
    holder.start()
    there.close()
    assert here.recv() == "held"
    with pytest.raises(UnusableInput, match="is being written by another process"):
        OutputFile(path)
    holder.kill()
    holder.join()
    assert holder.exitcode == -signal.SIGKILL
    with closing(OutputFile(path)) as out:
        out.begin(MANIFEST)


def fill(folder: Path, limits: tuple[int, ...], pipe: Connection) -> None:
    """Sends the error of each file."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    row = {"id": "a", "token_ids": list(range(20))}
    for limit in limits:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        with closing(OutputFile(folder / f"{limit}.jsonl")) as out:
            out.begin(Manifest(model={}, input={}, settings={}, versions={}, began=datetime.now()))
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            try:
                for _ in range(1000):
                    out.append([row, row])
            except JobError as error:
                pipe.send(str(error))


def test_a_file_that_can_grow_no_more_keeps_whole_rows(tmp_path: Path) -> None:
    limits = (1000, 1074, 1200)
    here, there = FORK.Pipe()
    filler = FORK.Process(target=fill, args=(tmp_path, limits, there))
    filler.start()
    there.close()
    filler.join()
    assert filler.exitcode == 0
    row_bytes = len(encode_row({"id": "a", "token_ids": list(range(20))}))
    said = [here.recv() for _ in limits]
    with pytest.raises(EOFError):
        here.recv()
    for limit_bytes, line in zip(limits, said, strict=True):
        path = tmp_path / f"{limit_bytes}.jsonl"
        assert f"output {path} cannot be written: File too large (errno {errno.EFBIG})" in line
        assert "make room and run the same command again to go on" in line
        num_bytes = path.stat().st_size
        assert limit_bytes - row_bytes < num_bytes <= limit_bytes
        assert len(read_rows(path)) == num_bytes // row_bytes


def test_a_full_disk_is_said(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(OutputFile(path)) as out:
        out.begin(MANIFEST)
        full = os.open("/dev/full", os.O_WRONLY)
        write = os.write
        monkeypatch.setattr(os, "write", lambda descriptor, data: write(full, data))
        with pytest.raises(JobError, match=re.escape(f"No space left on device (errno {errno.ENOSPC})")):
            out.append(ROWS)
        os.close(full)
    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (lambda path: path.unlink(), "was removed or replaced while the job ran"),
        (lambda path: path.rename(path.with_name("moved")), "was removed or replaced while the job ran"),
        (
            lambda path: (
                path.write_bytes(b""),
                path.with_name("new").write_bytes(b"x"),
                path.with_name("new").rename(path),
            ),
            "was removed or replaced while the job ran",
        ),
        (lambda path: os.truncate(path, 9), "was changed to 9 bytes from 84 while the job ran"),
        (
            lambda path: os.truncate(path, 99),
            "was changed to 99 bytes from 84 while the job ran",
        ),
    ],
)
def test_an_output_that_is_altered_under_way_is_noticed(path: Path, alter: Callable[[Path], Any], message: str) -> None:
    with closing(OutputFile(path)) as out:
        out.begin(MANIFEST)
        out.append(ROWS)
        out.check_unaltered()
        alter(path)
        for check in (out.check_unaltered, lambda: out.append(ROWS)):
            with pytest.raises(JobError, match=re.escape(f"output {path} {message}")) as caught:
                check()
            assert "run the same command again: whole rows are kept and the others computed" in str(caught.value)


def test_a_job_whose_output_is_removed_is_not_done(model: Path, prompts: Path, path: Path, whole: bytes) -> None:
    """In the first batch, and while the last rows are on their way."""
    for call in (0, 5):

        class Removing(ResidentEngine):
            def generate(self, call: int = call, **kwargs: Any) -> Any:
                if self.calls == call:
                    path.unlink()
                return super().generate(**kwargs)

        with pytest.raises(JobError, match="was removed or replaced while the job ran"):
            job(model, prompts, path, engine_factory=Removing)
        assert not path.exists()
        assert job(model, prompts, path).num_skipped == 0
        assert path.read_bytes() == whole
        path.unlink()
        manifest_path(path).unlink()


def test_a_manifest_that_does_not_fit_leaves_the_former_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_manifest(path, MANIFEST)
    former = path.read_bytes()
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
    with pytest.raises(JobError, match="cannot be written: No space left"):
        write_manifest(path, replace(MANIFEST, model={"fingerprint": "g"}))
    assert path.read_bytes() == former
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize(
    ("altered", "told"),
    [(b"", "it has no end"), (b"x" * 19 + b"\n", "Expecting value"), (b"\n" * 99, "Expecting value")],
)
def test_rows_that_are_changed_before_they_are_followed_end_the_job(
    path: Path, index: RowIndex, altered: bytes, told: str
) -> None:
    path.write_bytes(b"".join(encode_row({**row, "num_output_tokens": 1}) for row in ROWS[:1]))
    write_manifest(manifest_path(path), MANIFEST)
    with closing(OutputFile(path)) as out:
        out.resume(index)
        assert out.token_ids_of(0) == ((1,),)
        path.write_bytes(altered)
        with pytest.raises(JobError, match=rf"was changed while the job ran: at byte 0 no row begins \({told}"):
            out.token_ids_of(0)


def test_a_manifest_that_was_removed_is_noticed_and_written_again(
    model: Path, prompts: Path, tmp_path: Path, whole: bytes
) -> None:
    output = tmp_path / "out.jsonl"

    class Removing(ResidentEngine):
        def generate(self, **kwargs: Any) -> Any:
            if self.calls == 2:
                manifest_path(output).unlink()
            return super().generate(**kwargs)

    with pytest.raises(JobError, match="was removed while the job ran, and has been written again"):
        job(model, prompts, output, engine_factory=Removing)
    assert job(model, prompts, output).num_skipped > 0
    assert output.read_bytes() == whole
