"""A damaged safetensors header is refused by a message with the file and what to do."""

import json
import os
import re
import struct
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from zinfer.checkpoint import read_header
from zinfer.checkpoint.header import DTYPES
from zinfer.errors import CheckpointError

ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
DATA = bytes(range(8))


def write(path: Path, header: object, data: bytes = DATA, *, header_bytes: int | None = None) -> Path:
    """A file with any header: an object becomes JSON, a text UTF-8, bytes stay; the length may lie."""
    if not isinstance(header, bytes):
        header = (header if isinstance(header, str) else json.dumps(header)).encode("utf-8", "surrogatepass")
    path.write_bytes(struct.pack("<Q", len(header) if header_bytes is None else header_bytes) + header + data)
    return path


def refusal(path: Path) -> str:
    """The message of `read_header`, which must name the file, less the file's name."""
    with pytest.raises(CheckpointError, match=re.escape(str(path))) as caught:
        read_header(path)
    return str(caught.value).replace(str(path), "FILE")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model-00001-of-00002.safetensors"


def test_places_every_tensor_as_the_reference_does(path: Path) -> None:
    tensors = {
        "b.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "a": torch.tensor(7, dtype=torch.int64),
        "empty": torch.empty(0, 4, dtype=torch.bfloat16),
        "mask": torch.tensor([True, False, True]),
    }
    path.write_bytes(save(tensors, metadata={"format": "pt"}))
    header = read_header(path)
    content = path.read_bytes()
    assert header.file == path
    assert header.identity.num_bytes == len(content)
    assert header.data_offset == 8 + int.from_bytes(content[:8], "little")
    assert header.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        entry = header.tensors[name]
        assert (entry.name, entry.file, entry.dtype, entry.shape) == (name, path, tensor.dtype, tuple(tensor.shape))
        stored = content[entry.offset : entry.offset + entry.nbytes]
        assert stored == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    offsets = [entry.offset for entry in header.tensors.values()]
    assert offsets == sorted(offsets)


def test_reads_no_byte_of_the_weights(path: Path) -> None:
    entry = {"dtype": "U8", "shape": [2**40], "data_offsets": [0, 2**40]}
    write(path, {"huge": entry}, b"")
    data_offset = path.stat().st_size
    os.truncate(path, data_offset + 2**40)
    assert read_header(path).tensors["huge"].nbytes == 2**40


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_knows_the_references_dtypes(path: Path, name: str) -> None:
    itemsize = DTYPES[name].itemsize
    write(path, {"t": {"dtype": name, "shape": [3], "data_offsets": [0, 3 * itemsize]}}, bytes(3 * itemsize))
    with safe_open(path, "pt") as reference:
        assert read_header(path).tensors["t"].dtype is reference.get_tensor("t").dtype


def test_unknown_dtypes_of_the_reference_are_all_listed(path: Path) -> None:
    with pytest.raises(SafetensorError, match="unknown variant") as caught:
        safe_open(write(path, {"t": ENTRY | {"dtype": "Q3"}}), "pt")
    known = set(re.findall(r"`([A-Z0-9_]+)`", str(caught.value))) - {"Q3"}
    assert known == {*DTYPES, "F4", "F6_E2M3", "F6_E3M2"}


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "8 bytes of its header are missing"),
        (b"1234567", "bytes of its header are missing"),
        (struct.pack("<Q", 0), "EOF while parsing"),
        (struct.pack("<Q", 2**64 - 1) + b"{}", "bytes of its header are missing"),
        (struct.pack("<Q", 50) + b"{}", "48 bytes of its header are missing"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer, not the weights: run `git lfs pull`"),
    ],
)
def test_header_length(path: Path, content: bytes, what: str) -> None:
    path.write_bytes(content)
    message = refusal(path)
    assert what in message
    assert "download it again" in message or "git lfs" in message


@pytest.mark.parametrize(
    "header",
    [
        b'{"\xff": 1}',
        b" {}",
        b"[]",
        b'{"a": }',
        b"{}{}",
        b'{"a": NaN}',
        b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        json.dumps({"t": ENTRY | {"extra": 1}})
        .encode()
        .replace(b": 1}", b": " + b"[" * 200_000 + b"]" * 200_000 + b"}"),
        '{"a":{"dtype":"F32","dtype":"F32"}}',
        '{"\\ud800":{}}',
        {"__metadata__": {"k": 1}},
        {"t": ["F32", [2], [0, 8]]},
        {"t": {"dtype": "F32", "shape": [2]}},
        {"x" * 1_000_000: None},
    ],
)
def test_damaged_header(path: Path, header: object) -> None:
    message = refusal(write(path, header))
    assert message.endswith("the file is cut short or damaged: download it again")
    assert len(message) < 500


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "F6_E3M2"])
def test_dtypes_below_a_byte(path: Path, dtype: str) -> None:
    bits = int(dtype[1])
    header = {"w": {"dtype": dtype, "shape": [16], "data_offsets": [0, 2 * bits]}}
    message = refusal(write(path, header, bytes(2 * bits)))
    assert f"tensor 'w': dtype {dtype} is not supported: use a checkpoint in another dtype" in message


def test_absent_file_keeps_the_errno(path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"No such file or directory \(errno 2\): check the path") as caught:
        read_header(path)
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_folders_and_pipes_are_not_opened(path: Path, tmp_path: Path) -> None:
    os.mkfifo(path)
    assert "not a regular file: name the safetensors file itself" in refusal(path)
    assert "not a regular file" in refusal(tmp_path)
