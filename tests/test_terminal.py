"""What a terminal of 80 columns shows: words are whole."""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from zinfer.cli import app
from zinfer.jobs.progress import Meter
from zinfer.jobs.summary import JobSummary, summary_table
from zinfer.offload.stats import RunStats

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = [
    ["--help"],
    *([name, "--help"] for name in ("run", "plan", "probe", "quantize", "families")),
    ["families"],
    ["plan", "--machine", "list"],
    ["plan", "--model", "examples/demo/model", "--machine", "a6000", "--prompt-len", "9", "--new-tokens", "9"],
    [
        "plan",
        "--model",
        "examples/demo/model",
        "--machine",
        "a6000",
        "--prompt-len",
        "9",
        "--new-tokens",
        "9",
        "--rows=9",
    ],
]
MESSAGE = (
    "if this job is killed, at most the batch under way is computed again; rows that are written are kept, in /out"
)


def words(text: str) -> set[str]:
    return set(re.sub("[\u2500-\u257f]", " ", text).split())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_word_is_cut(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    narrow, wide = (CliRunner().invoke(app, command, env={"COLUMNS": columns}) for columns in ("80", "400"))
    assert narrow.exit_code == wide.exit_code == 0
    prose = "examples/demo/model on", "served", "advice", "config"
    assert all(len(line) <= 80 for line in narrow.stdout.splitlines() if not line.startswith(prose))
    assert words(narrow.stdout) == words(wide.stdout)


def test_help_reads_as_paragraphs() -> None:
    said = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "80"}).stdout
    assert re.search(r"2 unusable input, 1 error, *\n *130 Ctrl-C, 143 SIGTERM\. *\n", said)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_message_breaks_between_words(is_terminal: bool) -> None:
    stream = io.StringIO()
    Meter(Console(file=stream, width=80, force_terminal=is_terminal)).note(f"{MESSAGE} :smile: [bold]")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 1 + is_terminal
    assert " ".join(line.strip() for line in lines) == f"{MESSAGE} :smile: [bold]"


def test_the_summary_cuts_no_word() -> None:
    stats = RunStats(3_000_000_000, 2_000, passes=7, link_share=0.995, disk_share=0.02)
    stats.stall_s.update({"disk": 12345.25, "host": 12345.0, "link": 12345.0, "compute": 12345.0})
    failures = {"too long": 1, "no finite logits": 1, "refused by the chat template": 7, "malformed": 1}
    summary = JobSummary(99, 7, 10, 4, 50, 60, 75.0, 30.0, 20.0, 25.0, stats, (), "out.jsonl", failures)
    shown = []
    for columns in (80, 400):
        stream = io.StringIO()
        Console(file=stream, width=columns).print(summary_table(summary))
        shown.append(words(stream.getvalue()))
    assert shown[0] == shown[1]


@pytest.mark.slow
def test_an_error_on_a_terminal_breaks_between_words() -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, "-m", "zinfer", "plan", "--model", str(ROOT), "--machine", "a60000"]
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    done = subprocess.run(command, env=environment | {"TERM": "xterm"}, stderr=theirs, check=False, cwd=ROOT)
    os.close(theirs)
    with os.fdopen(ours, "rb") as terminal:
        said = terminal.read1(65536).decode()
    assert done.returncode == 2
    assert "zinfer: error:" in said
    assert all(len(line) <= 80 for line in said.splitlines())
    piped = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT).stderr
    assert piped.count("\n") == 1 < said.count("\n")
    assert said.split() == piped.split()
