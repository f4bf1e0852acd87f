"""`zinfer chat` in a pseudo-terminal, as a person uses it, and with lines of a pipe."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pexpect
import psutil
import pytest
from guide_blocks import ROOT
from jobs_support import CHAT_TEMPLATE, letters_model
from serve_support import KEY, Server, serving

from zinfer import LLM

DEMO = ROOT / "examples" / "demo" / "model"
GREEDY = ("--temperature", "0", "--max-tokens", "9")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return letters_model(tmp_path_factory.mktemp("models") / "letters", chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(model, tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), device="cpu") as llm:
        yield llm


def spawn(*options: str) -> Any:
    variables = {**os.environ, "PROMPT_TOOLKIT_NO_CPR": "1", "TERM": "xterm"}
    arguments = ["-m", "zinfer", "chat", *options]
    child = pexpect.spawn(sys.executable, arguments, encoding="utf-8", timeout=60, dimensions=(40, 200), env=variables)
    child.expect("/help lists the commands")
    return child


def ask(child: Any, line: str) -> str:
    """What is shown as the answer to a line."""
    child.expect_exact("\x1b[?2004h")  # the prompt takes input
    child.send(line + "\r")
    child.expect(r"\x1b\[\?2004l(.*?)\[\d+ tokens in [\d.]+ s, the first after")
    return plain(child.match[1])


def command(child: Any, line: str, words: str) -> None:
    child.expect_exact("\x1b[?2004h")
    child.send(line + "\r")
    child.expect(words)


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n", "", text)


def said(llm: LLM, *messages: tuple[str, str]) -> str:
    """The model's own greedy answer."""
    asked = [{"role": role, "content": text} for role, text in messages]
    return llm.generate(asked, max_new_tokens=9)[0].text


def test_a_talk_has_its_history_until_it_is_reset(server: Server, llm: LLM, tmp_path: Path) -> None:
    child = spawn("--url", server.url, "--api-key", KEY, *GREEDY)
    first = said(llm, ("user", "hello"))
    assert ask(child, "hello") == first
    history = (("user", "hello"), ("assistant", first), ("user", "more"))
    assert ask(child, "more") == said(llm, *history) != said(llm, ("user", "more"))
    command(child, "/reset", "begins anew")
    assert ask(child, "more") == said(llm, ("user", "more"))
    command(child, "/system be kind", "with this system message")
    assert ask(child, "more") == said(llm, ("system", "be kind"), ("user", "more"))
    again = said(llm, ("system", "be kind"), ("user", "more"))
    assert ask(child, "/regenerate") == again
    command(child, f"/save {tmp_path / 'saved.json'}", "The conversation is in")
    command(child, f"/save {tmp_path / 'saved.json'}", "cannot be written: File exists; give another file")
    messages = [("system", "be kind"), ("user", "more"), ("assistant", again)]
    assert json.loads((tmp_path / "saved.json").read_text()) == {
        "messages": [{"role": role, "content": text} for role, text in messages]
    }
    command(child, "/sistem", "There is no command /sistem; /help lists them")
    command(child, "/help", "/system TEXT")
    command(child, "exit", pexpect.EOF)
    child.close()
    assert child.exitstatus == 0


def test_ctrl_c_ends_an_answer_and_not_the_talk(server: Server, llm: LLM) -> None:
    child = spawn("--url", f"{server.url}/v1/", "--api-key", KEY, "--temperature", "0")
    os.kill(server.replica_ids()[0], signal.SIGSTOP)  # no answer comes
    try:
        child.expect_exact("\x1b[?2004h")
        child.send("hello\r")
        child.expect_exact("\x1b[?2004l")
        deadline = time.monotonic() + 30
        while not server.load()["sequences_under_way"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        child.sendintr()
        child.expect("ended by Ctrl-C")
        server.await_idle()  # it has ended on the server too
    finally:
        os.kill(server.replica_ids()[0], signal.SIGCONT)
    command(child, "/reset", "begins anew")
    assert ask(child, "hello").startswith(said(llm, ("user", "hello")))
    child.kill(signal.SIGTERM)
    child.expect("SIGTERM: stopped")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 143


def test_a_refused_question_is_told_and_the_talk_goes_on(server: Server, llm: LLM) -> None:
    child = spawn("--url", server.url, "--api-key", KEY, *GREEDY)
    command(child, "a" * 150, "model's positions[^;]*; shorten it")
    assert ask(child, "hello") == said(llm, ("user", "hello"))
    child.close(force=True)


def test_lines_of_a_pipe_are_questions(server: Server, llm: LLM) -> None:
    words = ["chat", "--url", server.url, "--api-key", KEY, *GREEDY]
    done = subprocess.run(
        [sys.executable, "-m", "zinfer", *words], input="hello\n/reset\nmore\n", capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "".join(f"{said(llm, ('user', each))}\n" for each in ("hello", "more"))


def test_a_line_of_a_pipe_that_is_no_text_is_named(server: Server) -> None:
    words = ["chat", "--url", server.url, "--api-key", KEY, *GREEDY]
    done = subprocess.run([sys.executable, "-m", "zinfer", *words], input=b"hello\nab\xff\n", capture_output=True)
    assert done.returncode == 2
    assert b"line 2, byte 3 of the input is not UTF-8" in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "give --model for a folder or --url for a server"),
        (["--url", "http://127.0.0.1:9"], "error: the server http://127.0.0.1:9 does not answer"),
        (["--url", "SERVER"], "the API key is missing or wrong"),
        (["--url", "SERVER", "--api-key", KEY, "--served-model-name", "gpt"], "has no model 'gpt'; it has letters"),
        (["--url", "nonsense"], "'nonsense' must begin with http:// or https://"),
        (["--url", "SERVER", "--api-key", KEY, "--top-p", "7"], "top_p"),
    ],
)
def test_what_does_not_work_ends_the_command(server: Server, options: list[str], words: str) -> None:
    given = [server.url if each == "SERVER" else each for each in options]
    done = subprocess.run([sys.executable, "-m", "zinfer", "chat", *given], input="a\n", capture_output=True, text=True)
    assert done.returncode in (1, 2)
    assert words in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_folders_model_is_loaded_for_the_talk_and_ends_with_it(tmp_path: Path) -> None:
    child = spawn("--model", str(DEMO), "--device", "cpu", "--temperature", "0")
    started = psutil.Process(child.pid).children(recursive=True)
    assert len(started) >= 2
    assert ask(child, "40+2=") == "42"
    child.kill(signal.SIGKILL)  # even then
    _, alive = psutil.wait_procs(started, timeout=60)
    assert alive == []
    done = subprocess.run(
        [sys.executable, "-m", "zinfer", "chat", "--model", str(tmp_path)], input="a\n", capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "config.json" in done.stderr
