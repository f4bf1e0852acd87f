"""A model's files, damaged at random, end a command with one sentence and the right exit code, never a traceback.

A dozen by default; ``ZINFER_CORRUPTIONS=1000`` makes so many. The number of a corruption is its seed, so that
``-k "corruption and [17]"`` repeats one alone.
"""

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import commands
import pytest
from jobs_support import CHAT_TEMPLATE, letters_model, write_rows

NUM_CORRUPTIONS = int(os.environ.get("ZINFER_CORRUPTIONS", "12"))
MOST_S = 20
WILD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 64, 100_000, 10**9, 2**31, 2**63, 2**64, -(2**63), 1e308, 0.5, -0.5),
    *("", "x", "float64", "int8", "org/x", "\ud800", "\0", "a" * 5000, [], [[]], [0], [-1], {}, {"": None}, {"x": {}}),
)
FRAGMENTS = ("{{ 1/0 }}", "{% for", "{{ x.y.z }}", "{% endif %}", "{{", "}}", "{{ messages[99] }}", "\0", "{#")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = letters_model(tmp_path_factory.mktemp("model"), chat_template=CHAT_TEMPLATE)
    assert (folder / "model.safetensors.index.json").is_file()
    assert (folder / "chat_template.jinja").is_file()
    if not (folder / "generation_config.json").is_file():
        (folder / "generation_config.json").write_text('{"eos_token_id": 2, "do_sample": false, "temperature": 1.0}')
    return folder


def damaged_json(data: bytes, draw: random.Random) -> bytes:
    """One to three values somewhere in the document are others, doubled, gone, or swapped."""
    document = json.loads(data)
    for _ in range(draw.randint(1, 3)):
        part, key = document, draw.choice(sorted(document))
        while isinstance(part[key], dict | list) and part[key] and draw.random() < 0.7:
            part = part[key]
            key = draw.choice(sorted(part)) if isinstance(part, dict) else draw.randrange(len(part))
        kind = draw.randrange(4)
        if kind == 0 and part is not document:
            del part[key]
        elif kind == 1 and isinstance(part[key], int | float):
            part[key] = part[key] * draw.choice((-1, 0, 2, 3, 1000, 0.5)) + draw.choice((0, 1, -1))
        else:
            part[key] = draw.choice(WILD)
        if not document:
            break
    return json.dumps(document).encode()


def damaged_bytes(data: bytes, draw: random.Random) -> bytes:
    """Bytes are others, a piece is gone or doubled, or the end is."""
    changed = bytearray(data)
    kind, begin = draw.randrange(4), draw.randrange(len(data) + 1)
    end = min(len(data), begin + draw.randint(1, 64))
    if kind == 0:
        for _ in range(draw.randint(1, 8)):
            changed[draw.randrange(len(data))] = draw.randrange(256)
    elif kind == 1:
        del changed[begin:end]
    elif kind == 2:
        changed[begin:begin] = changed[begin:end]
    else:
        del changed[begin:]
    return bytes(changed)


def damaged_template(data: bytes, draw: random.Random) -> bytes:
    begin = draw.randrange(len(data) + 1)
    return data[:begin] + draw.choice(FRAGMENTS).encode() + data[begin:]


def damaged_header(data: bytes, draw: random.Random) -> bytes:
    """As the others, in the header of a file with weights; its length in front fits, or does not."""
    (length,) = struct.unpack_from("<Q", data)
    header = data[8 : 8 + length]
    if draw.random() < 0.2:
        return struct.pack("<Q", draw.choice((0, 1, length - 1, length + 1, 2**40, 2**63))) + data[8:]
    changed = draw.choice((damaged_json, damaged_bytes))(header, draw)
    return struct.pack("<Q", len(changed)) + changed + data[8 + length :]


DAMAGES: dict[str, tuple[Callable[[bytes, random.Random], bytes], ...]] = {
    "config.json": (damaged_json, damaged_json, damaged_bytes),
    "tokenizer.json": (damaged_json, damaged_bytes),
    "tokenizer_config.json": (damaged_json, damaged_bytes),
    "chat_template.jinja": (damaged_template, damaged_bytes),
    "generation_config.json": (damaged_json, damaged_bytes),
    "model.safetensors.index.json": (damaged_json, damaged_bytes),
    "*.safetensors": (damaged_header,),
}
ROWS: list[dict[str, Any]] = [
    {"id": 0, "prompt": "abc"},
    {"id": 1, "messages": [{"role": "user", "content": "abc"}]},
    {"id": 2, "prompt_token_ids": [3, 4, 5]},
]


def words(command: str, folder: Path) -> list[str]:
    model = ["--model", str(folder / "model")]
    paths = ["--input", str(write_rows(folder / "in.jsonl", ROWS)), "--output", str(folder / "out.jsonl")]
    return {
        "run": ["run", *model, *paths, "--device", "cpu", "--max-new-tokens", "4"],
        "embed": ["run", *model, *paths, "--device", "cpu", "--task", "embed"],
        "plan": ["plan", *model, "--machine", "a6000", "--prompt-len", "8", "--new-tokens", "4"],
        "quantize": ["quantize", *model, "--output", str(folder / "store"), "--device", "cpu"],
    }[command]


@pytest.mark.parametrize("number", range(NUM_CORRUPTIONS), ids=lambda number: f"[{number}]")
def test_corruption(model: Path, tmp_path: Path, number: int) -> None:
    draw = random.Random(number)
    folder = shutil.copytree(model, tmp_path / "model")
    name = list(DAMAGES)[number % len(DAMAGES)]
    file = draw.choice(sorted(folder.glob(name)))
    data = draw.choice(DAMAGES[name])(file.read_bytes(), draw)
    file.write_bytes(data)
    command = draw.choice(("run", "run", "embed", "plan", "quantize"))
    process = commands.start(words(command, tmp_path), tmp_path, warm=True)
    _, said = process.communicate(timeout=MOST_S)
    told = f"zinfer {command} of a damaged {file.name} ended with {process.returncode}:\n{said}"
    assert process.returncode in (0, 2, 3), told
    assert "Traceback" not in said, told
    sentences = [line for line in said.splitlines() if line.startswith("zinfer: error: ")]
    assert len(sentences) == (process.returncode == 2), told
    if process.returncode == 2:
        assert len(said) < 5000, told
