"""What is shown never decides what is written: stdout and stderr that are closed, full, or have lost their reader."""

import io
import os
import pty
import signal
import subprocess
import sys
import time
import tty
from pathlib import Path
from typing import Any

import pytest
from commands import start
from jobs_run_support import job, model, output, prompts, whole
from jobs_support import read_rows
from rich.console import Console

from zinfer.display import LastingStream

__all__ = ["model", "output", "prompts", "whole"]  # fixtures


def lose(way: str, numbers: tuple[int, ...]) -> None:
    """Run before the command in its process: its stdout and stderr become what no one can write to."""
    if way == "a terminal that is gone":
        keyboard, screen = pty.openpty()
        tty.setraw(screen)
        os.close(keyboard)
    for number in numbers:
        if way == "closed":
            os.close(number)
            setattr(sys, "stdout" if number == 1 else "stderr", None)
        elif way == "full":
            os.dup2(os.open("/dev/full", os.O_WRONLY), number)
        elif way == "without a reader":
            reader, writer = os.pipe()
            os.close(reader)
            os.dup2(writer, number)
        else:
            os.dup2(screen, number)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("numbers", [(1,), (2,), (1, 2)], ids=["stdout", "stderr", "both"])
@pytest.mark.parametrize("way", ["closed", "full", "without a reader", "a terminal that is gone"])
def test_a_job_ends_as_if_it_were_seen(
    model: Path, prompts: Path, output: Path, way: str, numbers: tuple[int, ...]
) -> None:
    paths = ["--model", model, "--input", prompts, "--output", output]
    process = start(["run", *paths, "--device", "cpu"], output.parent, warm=True, prepare=(lose, (way, numbers)))
    out, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert "Traceback" not in said
    assert len(read_rows(output)) == 22
    if 1 not in numbers:
        assert "22 done, 0 failed" in out


def test_a_closed_terminal_ends_a_job_as_sigterm_does(model: Path, prompts: Path, output: Path) -> None:
    paths = ["--model", model, "--input", prompts, "--output", output]
    process = start(["run", *paths, "--device", "cpu", "--batch-size", "1"], output.parent, warm=True)
    while not output.exists() or not output.stat().st_size:
        assert process.poll() is None, process.communicate()
        time.sleep(0.001)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGHUP)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 129, said
    assert f"SIGHUP: stopped. The rows in {output} are kept; run the same command again to go on." in said
    assert 0 < len(read_rows(output)) < 22


@pytest.mark.sampled(6)
@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(28, "No space left"), ValueError("closed")])
def test_a_console_that_fails_ends_no_job_of_a_caller(
    model: Path, prompts: Path, output: Path, whole: bytes, error: Exception, is_terminal: bool
) -> None:
    class Failing(io.StringIO):
        def write(self, text: str) -> int:
            raise error

    stream = Failing()
    console = Console(file=stream, force_terminal=is_terminal)
    assert job(model, prompts, output, console=console).num_done == 22
    assert output.read_bytes() == whole
    assert console.file is stream


def test_letters_that_a_stream_does_not_have_are_spelled() -> None:
    below = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    stream = LastingStream(below)
    stream.write("ü 字")
    stream.write(".")
    stream.flush()
    assert below.buffer.getvalue() == rb"\xfc \u5b57."  # type: ignore[attr-defined]
    assert stream.failure is None


def test_a_stream_that_is_busy_shows_what_comes_later() -> None:
    class Busy(io.StringIO):
        is_busy = True

        def write(self, text: str) -> int:
            if self.is_busy:
                raise BlockingIOError
            return super().write(text)

    below = Busy()
    stream = LastingStream(below)
    assert stream.write("lost") == 4
    below.is_busy = False
    stream.write("seen")
    assert below.getvalue() == "seen"
    with pytest.raises(TypeError):
        stream.write(b"bytes")  # type: ignore[arg-type]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("shell", "code", "said"),
    [
        ("{zinfer} --help >&-", 0, ""),
        ("{zinfer} --help >/dev/full", 0, ""),
        ("{zinfer} --help | head -c 5; exit ${{PIPESTATUS[0]}}", 0, ""),
        ("{zinfer} run >&- 2>&-", 2, ""),
    ],
)
def test_what_nobody_reads_is_no_error_and_takes_no_exit_code_over(shell: str, code: int, said: str) -> None:
    command = shell.format(zinfer=f"{sys.executable} -m zinfer")
    child: Any = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (child.returncode, child.stderr) == (code, said)


def test_an_answer_that_stdout_could_not_take_is_an_error(tmp_path: Path) -> None:
    process = start(["families"], tmp_path, warm=True, prepare=(lose, ("full", (1,))))
    assert process.communicate(timeout=60) == ("", "zinfer: error: [Errno 28] No space left on device: 'stdout'\n")
    assert process.returncode == 1
