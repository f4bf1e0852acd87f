"""Runs the code of the guide's pages, and compares the output with the one on the page.

Python: all blocks of a page share a namespace. `# -> text` beside or below a statement is its expected output; a block
without one and without an assertion is refused, since it could hardly fail. Console: lines that begin with `$ ` are
run, `zinfer` in this process, and the lines below are the expected output; an exit code other than 0 must be shown by
`$ echo $?`. In expected output `...` matches anything, and runs of spaces match any number of spaces.

Comments before a block: `file: NAME` writes it to a file for later blocks; `deepspeed` compiles Python without running
it, and so do `ray` and `served` (`tests/test_ray.py` and `tests/test_serve.py` run them); `slow` only checks a
console's options, unless GUIDE_SLOW=1 is in the environment.
"""

import ast
import contextlib
import doctest
import io
import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from guide_blocks import ROOT, Block
from typer.testing import CliRunner

from zinfer.cli import app
from zinfer.config import resolve_settings

SAID = re.compile(r"(?m)# -> ?(.*)$")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class PageRunner:
    """Runs the blocks of one page in the current folder."""

    def __init__(self) -> None:
        self._namespace: dict[str, Any] = {"__name__": "guide"}

    def run(self, block: Block) -> None:
        if block.file is not None:
            Path(block.file).parent.mkdir(parents=True, exist_ok=True)
            Path(block.file).write_text(block.text, encoding="utf-8")
        getattr(self, f"_{block.language or 'plain'}")(block)

    def _hidden(self, block: Block) -> None:
        exec(compile("\n" * (block.line - 1) + block.text, str(block.page), "exec"), self._namespace)

    def _python(self, block: Block) -> None:
        tree = ast.parse("\n" * (block.line - 1) + block.text, str(block.page))
        if block.comment in ("deepspeed", "ray", "served"):
            compile(tree, str(block.page), "exec")
            return
        checks = SAID.search(block.text) or any(isinstance(node, ast.Assert) for node in ast.walk(tree))
        assert checks or block.file, f"{block.place}: nothing in this block is checked"
        lines = block.text.splitlines()
        ends = [node.lineno - block.line for node in tree.body[1:]] + [len(lines)]
        for node, end in zip(tree.body, ends, strict=True):
            said = [found[1] for line in lines[node.lineno - block.line : end] if (found := SAID.search(line))]
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(ast.Module([node], []), str(block.page), "exec"), self._namespace)
            compare(f"{block.page.name}, line {node.lineno}", "\n".join(said), printed.getvalue())

    def _console(self, block: Block) -> None:
        commands = list(console_commands(block.text))
        if block.comment == "slow" and os.environ.get("GUIDE_SLOW") != "1":
            for command, _ in commands:
                check_command(block.place, command)
            return
        for number, (command, wanted) in enumerate(commands):
            if command == "echo $?":
                continue
            exit_code, output = run_command(command)
            asked = number + 1 < len(commands) and commands[number + 1][0] == "echo $?"
            code = int(commands[number + 1][1]) if asked else 0
            assert exit_code == code, f"{block.place}: {command!r} ended with {exit_code}\n{output}"
            if wanted:
                compare(f"{block.place}: {command!r}", wanted, output)

    def _sh(self, block: Block) -> None:
        """Not run; but options and scripts must be there."""
        for command, _ in console_commands(re.sub(r"(?m)^(?=\S)", "$ ", block.text)):
            check_command(block.place, command)

    def _json(self, block: Block) -> None:
        """A configuration; a model's config.json is none."""
        document = json.loads(block.text)
        if block.file is None or Path(block.file).name != "config.json":
            resolve_settings(document)

    def _jsonl(self, block: Block) -> None:
        for line in block.text.splitlines():
            json.loads(line)

    def _text(self, block: Block) -> None:
        """Words and sketches."""

    _diff = _mermaid = _csv = _text


def compare(place: str, wanted: str, got: str) -> None:
    wanted, got = (f"{text.strip()}\n" if text.strip() else "" for text in (wanted, got))
    assert doctest.OutputChecker().check_output(wanted, got, FLAGS), f"{place} gives\n{got}and not\n{wanted}"


def console_commands(text: str) -> Iterator[tuple[str, str]]:
    """Commands, each with the lines below it."""
    for part in re.split(r"(?m)^\$ ", text.replace("\\\n", " "))[1:]:
        command, _, output = part.partition("\n")
        yield command, output


def run_command(command: str) -> tuple[int, str]:
    if command.startswith("zinfer "):
        words, _, file = command.partition(" > ")
        result = CliRunner().invoke(app, shlex.split(words)[1:])
        if file:
            Path(file).write_text(result.stdout, encoding="utf-8")
        return result.exit_code, result.stderr if file else result.output
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def check_command(place: str, command: str) -> None:
    """Fails for a script, a subcommand or an option that there is not."""
    words = shlex.split(command.partition(">")[0], comments=True)
    if words[0].startswith("./"):
        assert (ROOT / words[0]).is_file(), f"{place}: no {words[0]}"
    elif words[0] == "zinfer":
        result = CliRunner().invoke(app, [*words[1:], "--help"])
        assert result.exit_code == 0, f"{place}: {result.output}"
