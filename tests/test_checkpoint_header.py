"""Every fault of a safetensors header has its own message: the file, the tensor or byte, and what to do."""

import io
import json
import os
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from zinfer.errors import CheckpointError
from zinfer.weights import read_header
from zinfer.weights.header import DTYPES, MAX_HEADER_BYTES

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
    assert min(entry.offset for entry in header.tensors.values()) == 8 + int.from_bytes(content[:8], "little")
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
        (b"", "0 bytes long, a safetensors file begins with 8 bytes of header length"),
        (b"1234567", "7 bytes long, a safetensors file begins with 8 bytes"),
        (struct.pack("<Q", 0), "header length at byte 0 is 0"),
        (struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}", "length at byte 0 is 100000001, more than the format's"),
        (struct.pack("<Q", 2**64 - 1) + b"{}", "length at byte 0 is 18446744073709551615, more than the format's"),
        (struct.pack("<Q", 50) + b"{}", "length at byte 0 is 50, but the file has 10 bytes: 48 bytes are missing"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer, not the weights: run `git lfs pull`"),
    ],
)
def test_header_length(path: Path, content: bytes, what: str) -> None:
    path.write_bytes(content)
    message = refusal(path)
    assert what in message
    assert "download it again" in message or "git lfs" in message


@pytest.mark.parametrize(
    ("header", "what"),
    [
        (b'{"\xff": 1}', "header at byte 10: not valid UTF-8"),
        (b" {}", "header at byte 8 starts with b' ', not with '{'"),
        (b"[]", "header at byte 8 starts with b'[', not with '{'"),
        (b'{"a": }', "header at byte 14: not valid JSON: Expecting value"),
        ('{"ä": }', "header at byte 15: not valid JSON: Expecting value"),
        (b"{}{}", "header at byte 10: not valid JSON: Extra data"),
        (b'{"a": NaN}', "header at byte 8: not valid JSON: NaN"),
        (b'{"a": -Infinity}', "header at byte 8: not valid JSON: -Infinity"),
        (b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", "header at byte 8: nested too deeply"),
        (f'{{"a":{json.dumps(ENTRY)},"\\u0061":{json.dumps(ENTRY)}}}', "the name 'a' occurs twice in one object"),
        ('{"a":{"dtype":"F32","dtype":"F32"}}', "the name 'dtype' occurs twice in one object"),
        ('{"__metadata__":{"k":"1","k":"2"}}', "the name 'k' occurs twice in one object"),
        ('{"\\ud800":{}}', "the text '\\ud800' holds half a surrogate pair"),
        ('{"__metadata__":{"k":"\\udfff"}}', "the text '\\udfff' holds half a surrogate pair"),
        ({"__metadata__": {"k": 1}}, "header entry '__metadata__' is not an object of texts"),
        ({"__metadata__": []}, "header entry '__metadata__' is not an object of texts"),
    ],
)
def test_header_text(path: Path, header: object, what: str) -> None:
    message = refusal(write(path, header, b""))
    assert what in message
    assert message.endswith("the file is corrupted: download it again")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"extra": 1}, "its header entry is not an object of exactly dtype, shape and data_offsets"),
        ({"dtype": None}, "its dtype is not a text"),
        ({"dtype": ["F32"]}, "its dtype is not a text"),
        ({"dtype": "Q3"}, "unknown dtype 'Q3', known are BOOL, U8"),
        ({"dtype": "f32"}, "unknown dtype 'f32'"),
        ({"dtype": "F4", "shape": [16]}, "dtype F4 packs elements below a byte: use a checkpoint in another dtype"),
        ({"shape": None}, "must be lists of non-negative integers"),
        ({"shape": 2}, "must be lists of non-negative integers"),
        ({"shape": [True, 2]}, "must be lists of non-negative integers"),
        ({"shape": ["2"]}, "must be lists of non-negative integers"),
        ({"data_offsets": [0, 4, 8]}, "data_offsets (two of them)"),
        ({"data_offsets": [8]}, "data_offsets (two of them)"),
        ({"data_offsets": [False, 8]}, "must be lists of non-negative integers"),
        ({"data_offsets": {"0": 0, "1": 8}}, "must be lists of non-negative integers"),
        ({"shape": [2**32, 2**32, 0]}, "shape [4294967296, 4294967296, 0] overflows 64 bits"),
        ({"shape": [0, 2**63]}, "shape [0, 9223372036854775808] overflows 64 bits"),
        ({"shape": [3]}, "F32 of shape [3] takes 12 bytes, but its range from byte 128 to 136 of the file has 8"),
        ({"shape": [1] * 20}, "F32 of shape [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, ... 20 dimensions] takes 4 bytes"),
        ({"dtype": "F16"}, "F16 of shape [2] takes 4 bytes, but its range from byte 128 to 136 of the file has 8"),
        ({"data_offsets": [8, 0]}, "begins at byte 136 of the file and ends before, at byte 128"),
    ],
)
def test_tensor_entry(path: Path, change: dict[str, Any], what: str) -> None:
    header = json.dumps({"layers.0.weight": ENTRY | change}).ljust(120)
    message = refusal(write(path, header))
    assert "tensor 'layers.0.weight': " in message
    assert what in message
    assert message.endswith("download it again") or "use a checkpoint" in message


@pytest.mark.parametrize("number", ["-0", "-1", "0.0", "0e0", "1e999", str(2**64), "9" * 5000])
def test_numbers_that_only_look_like_sizes(path: Path, number: str) -> None:
    text = json.dumps({"t": ENTRY | {"shape": [0], "data_offsets": [0, 0]}})
    for damaged in (text.replace('"shape": [0]', f'"shape": [{number}]'), text.replace("[0, 0]", f"[0, {number}]")):
        assert damaged != text
        message = refusal(write(path, damaged, b""))
        assert "tensor 't': shape and data_offsets (two of them) must be lists of non-negative integers" in message


def test_an_entry_in_the_references_terse_forms_is_refused(path: Path) -> None:
    for terse in (["F32", [2], [0, 8]], {"dtype": "F32", "shape": [2]}, None):
        assert "is not an object of exactly dtype, shape and data_offsets" in refusal(write(path, {"t": terse}))


def test_a_huge_name_is_cut_in_the_message(path: Path) -> None:
    message = refusal(write(path, {"x" * 1_000_000: None}))
    assert len(message) < 500
    assert "(1000000 characters)" in message


@pytest.mark.parametrize(
    ("ranges", "what"),
    [
        ([(0, 8), (4, 12)], "tensor 'b': begins at byte 260 and overlaps tensor 'a', which ends at byte 264"),
        ([(0, 8), (0, 8)], "tensor 'b': begins at byte 256 and overlaps tensor 'a', which ends at byte 264"),
        ([(0, 8), (12, 20)], "'b': begins at byte 268, 4 bytes after the end of tensor 'a' at byte 264: a hole"),
        ([(8, 16), (16, 24)], "'a': begins at byte 264, 8 bytes after the end of the header at byte 256: a hole"),
    ],
)
def test_ranges_follow_each_other(path: Path, ranges: list[tuple[int, int]], what: str) -> None:
    header = {name: ENTRY | {"data_offsets": span} for name, span in zip("ab", ranges, strict=True)}
    message = refusal(write(path, json.dumps(header).ljust(248), bytes(ranges[-1][1])))
    assert what in message
    assert "corrupted: download it again" in message


def test_truncated_file_names_the_first_tensor_cut_and_the_missing_bytes(path: Path) -> None:
    header = {"a": ENTRY, "b": ENTRY | {"data_offsets": [8, 16]}, "c": ENTRY | {"data_offsets": [16, 24]}}
    message = refusal(write(path, json.dumps(header).ljust(248), bytes(11)))
    assert "tensor 'b' at byte 264 is not wholly in the file" in message
    assert "13 bytes are missing at its end (byte 267 of 280)" in message
    assert "cut short: download it again" in message


def test_trailing_bytes(path: Path) -> None:
    message = refusal(write(path, json.dumps({"a": ENTRY}).ljust(120), bytes(11)))
    assert "3 bytes follow the last tensor, which ends at byte 136: the file is corrupted: download it again" in message


def test_absent_file_keeps_the_errno(path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"No such file or directory \(errno 2\): check the path") as caught:
        read_header(path)
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_a_read_error_in_the_middle_keeps_the_errno(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, {"a": ENTRY})

    class Failing(io.BufferedReader):
        def read(self, num_bytes: int | None = -1, /) -> bytes:
            if num_bytes != 8:
                raise OSError(5, "Input/output error")
            return super().read(num_bytes)

    monkeypatch.setattr(Path, "open", lambda self, mode: Failing(io.FileIO(self, mode)))
    with pytest.raises(CheckpointError, match=r"Input/output error \(errno 5\): .* the disk"):
        read_header(path)


def test_a_file_that_shrinks_while_it_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, {"a": ENTRY})
    stat = os.fstat

    def shrink(descriptor: int) -> os.stat_result:
        before = stat(descriptor)
        os.truncate(path, 8)
        return before

    monkeypatch.setattr(os, "fstat", shrink)
    assert "shrank to 8 bytes while its header was read: wait for what writes it" in refusal(path)


def test_folders_and_pipes_are_not_opened(path: Path, tmp_path: Path) -> None:
    os.mkfifo(path)
    assert "not a regular file: name the file with the weights itself" in refusal(path)
    assert "not a regular file" in refusal(tmp_path)
