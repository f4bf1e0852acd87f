"""Damaged safetensors files: a CheckpointError, or exactly what the reference reads; never another outcome."""

import json
import random
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from zinfer.errors import CheckpointError
from zinfer.weights import Header, read_header

# What the reference lets pass and zinfer refuses, by the words of the refusal.
STRICTER = (
    "starts with b",
    "occurs twice in one object",
    "not an object of exactly dtype, shape and data_offsets",
    "its dtype is not a text",
    "packs elements below a byte",
    "overflows 64 bits",
)
DTYPES = ["BOOL", "U8", "I8", "F8_E4M3", "I16", "F16", "BF16", "F32", "I32", "F64", "I64", "C64", "F4", "F6_E2M3", "Q9"]
TORCH_DTYPES = [torch.uint8, torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.float8_e5m2]
BAD_NUMBERS = [2**31, 2**32, 2**62, 2**63, 2**64 - 1, 2**64, -1, -0.0, 1.5, True, None, "1", [], {}]
SCRAPS = [b"{", b"}", b"[", b"]", b'"', b",", b":", b"null", b"-1", b"1e9", b"NaN", b"\\ud800", b"\xff", b"\x00", b"  "]
SCRAPS += [b"18446744073709551616", b"4", b"[" * 3000, b'"dtype"', b'"F4"', b"true", b"{}", b'{"a":1}']
Members = dict[str, Any]


@st.composite
def valid_files(draw: st.DrawFn) -> bytes:
    """A file as the reference writes it: one to five tensors, scalars and empty ones among them."""
    shapes = st.lists(st.integers(0, 4), max_size=3)
    tensors = {}
    for index in range(draw(st.integers(1, 5))):
        dtype, shape = draw(st.sampled_from(TORCH_DTYPES)), draw(shapes)
        pattern = torch.arange(1, 1 + dtype.itemsize * torch.Size(shape).numel(), dtype=torch.uint8) + 17 * index
        if dtype is torch.bool:
            pattern %= 2
        tensors[f"layers.{index}.weight"] = pattern.view(dtype).reshape(shape)
    return save(tensors, metadata=draw(st.sampled_from([None, {}, {"format": "pt"}])))


def header_end(file: bytes) -> int:
    return 8 + int.from_bytes(file[:8], "little")


def split(file: bytes) -> tuple[Members, bytes]:
    end = header_end(file)
    return json.loads(file[8:end]), file[end:]


def join(members: object, data: bytes, *, header: bytes | None = None) -> bytes:
    text = json.dumps(members).encode() if header is None else header
    return struct.pack("<Q", len(text)) + text + data


def flip_bytes(file: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(file)
    region_bytes = rng.choice((8, header_end(file), len(file)))
    for _ in range(rng.randint(1, 4)):
        damaged[rng.randrange(region_bytes)] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def change_length(file: bytes, rng: random.Random) -> bytes:
    length = int.from_bytes(file[:8], "little")
    wrong = rng.choice([0, 1, length - 1, length + 1, length + rng.randrange(64), len(file), 10**8, 2**63, 2**64 - 1])
    return struct.pack("<Q", wrong) + file[8:]


def truncate(file: bytes, rng: random.Random) -> bytes:
    return file[: rng.randrange(len(file))]


def append(file: bytes, rng: random.Random) -> bytes:
    return file + rng.randbytes(rng.randint(1, 40))


def overwrite_header(file: bytes, rng: random.Random) -> bytes:
    end = header_end(file)
    begin = rng.randrange(8, end)
    scrap = rng.choice(SCRAPS)
    header = file[8:begin] + scrap + file[begin + rng.choice([0, 1, len(scrap)]) : end]
    return join(None, file[end:], header=header)


def overwrite_in_place(file: bytes, rng: random.Random) -> bytes:
    begin = rng.randrange(8, header_end(file))
    return file[:begin] + rng.choice([b"9", b"0", b" ", b'"', b"}", b"1", b"e"]) + file[begin + 1 :]


def any_entry(members: Members, rng: random.Random) -> Members:
    return members[rng.choice([name for name in members if name != "__metadata__"])]


def change_entry(file: bytes, rng: random.Random) -> bytes:
    members, data = split(file)
    entry = any_entry(members, rng)
    numbers = [0, 1, 2, 3, 8, *BAD_NUMBERS]
    match rng.randrange(6):
        case 0:
            entry["dtype"] = rng.choice([*DTYPES, *DTYPES, 3, None, ["F32"], {"F32": None}])
        case 1:
            entry["shape"] = [rng.choice(numbers) for _ in range(rng.randint(0, 3))]
        case 2:
            num_offsets = rng.choice([1, 2, 2, 2, 2, 3])
            entry["data_offsets"] = [rng.choice([*numbers, len(data)]) for _ in range(num_offsets)]
        case 3:
            entry[rng.choice(["extra", "dtype", "shape", "data_offsets"])] = rng.choice(numbers)
        case 4:
            del entry[rng.choice(["dtype", "shape", "data_offsets"])]
        case 5:
            entry["shape"] = rng.sample(entry["shape"], len(entry["shape"]))
    return join(members, data)


def swap_entries(file: bytes, rng: random.Random) -> bytes:
    members, data = split(file)
    one, other = any_entry(members, rng), any_entry(members, rng)
    for key in rng.sample(["dtype", "shape", "data_offsets"], rng.randint(1, 3)):
        one[key], other[key] = other[key], one[key]
    return join(members, data)


def shift_offsets(file: bytes, rng: random.Random) -> bytes:
    members, data = split(file)
    by = rng.choice([-8, -1, 1, 4, 8])
    for name in rng.sample(sorted(members), rng.randint(1, len(members))):
        if name != "__metadata__":
            members[name]["data_offsets"] = [offset + by for offset in members[name]["data_offsets"]]
    return join(members, data)


def change_members(file: bytes, rng: random.Random) -> bytes:
    members, data = split(file)
    names = [name for name in members if name != "__metadata__"]
    name = rng.choice(names)
    match rng.randrange(6):
        case 0:
            del members[name]
        case 1:
            members[rng.choice(["", "ä\u0000", "x" * 300, "__metadata__"])] = members.pop(name)
        case 2:
            members["copy"] = members[name]
        case 3:
            members["__metadata__"] = rng.choice([None, {}, [], {"k": "v"}, {"k": None}, {"k": {}}, "text", 1])
        case 4:
            entry = members[name]
            members[name] = rng.choice([None, [], {}, 7, [entry["dtype"], entry["shape"], entry["data_offsets"]]])
        case 5:
            text = json.dumps(members)
            twin = f"{{{json.dumps(name)}: {json.dumps(members[rng.choice(names)])}, {text[1:]}"
            return join(None, data, header=twin.encode())
    return join(members, data)


def respell(file: bytes, rng: random.Random) -> bytes:
    """Another spelling of the same header, mostly still valid."""
    members, data = split(file)
    names = rng.sample(sorted(members), len(members))
    text = json.dumps({name: members[name] for name in names}, indent=rng.choice([None, 0, 3])).encode()
    before = rng.choice([b"", b"", b"", b"", b"", b" ", b"\n"])
    return join(None, data, header=before + text + rng.choice([b"", b" \n\t ", b" " * 9, b"\x00"]))


def change_data(file: bytes, rng: random.Random) -> bytes:
    """Other weights: no reader can tell, and both must read them alike."""
    end = header_end(file)
    return file[:end] + rng.randbytes(len(file) - end)


Damage = Callable[[bytes, random.Random], bytes]
BYTE_DAMAGES: list[Damage] = [flip_bytes, change_length, truncate, append, overwrite_header, overwrite_in_place]
ENTRY_DAMAGES: list[Damage] = [change_entry, swap_entries, shift_offsets, change_members, respell, change_data]


@st.composite
def damages(draw: st.DrawFn) -> list[Damage]:
    """One or two; the second works on bytes, for the first may leave no header to take apart."""
    first = draw(st.sampled_from([*ENTRY_DAMAGES, *BYTE_DAMAGES]))
    if first in BYTE_DAMAGES or draw(st.integers(0, 2)):
        return [first]
    return [first, draw(st.sampled_from(BYTE_DAMAGES))]


def reference(path: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]] | None:
    """What the reference library reads from the file: dtype, shape and bytes by name; None where it refuses."""
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, TypeError):  # TypeError: a dimension that torch cannot hold
        return None
    return {
        name: (tensor.dtype, tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, tensor in tensors.items()
    }


def found(path: Path, header: Header) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    content = path.read_bytes()
    assert header.identity.num_bytes == len(content)
    return {
        name: (entry.dtype, entry.shape, content[entry.offset : entry.offset + entry.nbytes])
        for name, entry in header.tensors.items()
    }


@pytest.mark.timeout(120)
def test_damage_is_refused_or_read_as_the_reference_reads_it(tmp_path: Path) -> None:
    outcomes: Counter[str] = Counter()
    path = tmp_path / "model.safetensors"

    @settings(max_examples=500, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(file=valid_files(), damages=damages(), rng=st.randoms(use_true_random=False))
    def check(file: bytes, damages: list[Damage], rng: random.Random) -> None:
        for damage in damages:
            file = damage(file, rng)
        path.write_bytes(file)
        expected = reference(path)
        try:
            header = read_header(path)
        except CheckpointError as error:
            message = str(error)
            assert message.startswith(f"{path}: ")
            assert len(message) < 2000
            assert expected is None or any(words in message for words in STRICTER), message
            outcomes["refused" if expected is None else "refused, stricter"] += 1
        else:
            assert expected is not None, "the reference refuses this file"
            assert found(path, header) == expected
            outcomes["read"] += 1

    check()
    print(dict(outcomes))
    assert outcomes.total() >= 500
    # Both answers must be among them, or the comparison shows nothing.
    assert outcomes["refused"] >= 200
    assert outcomes["read"] >= 40


def test_every_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    file = save({"a": torch.arange(4.0), "b": torch.arange(3)}, metadata={"format": "pt"})
    path = tmp_path / "model.safetensors"
    for num_bytes in range(len(file)):
        path.write_bytes(file[:num_bytes])
        with pytest.raises(CheckpointError, match="cut short: download it again"):
            read_header(path)


@pytest.mark.parametrize("damage", [*ENTRY_DAMAGES, *BYTE_DAMAGES])
def test_each_damage_changes_files(damage: Damage) -> None:
    file = save({"a": torch.arange(4.0).reshape(2, 2), "b": torch.arange(3)}, metadata={"format": "pt"})
    assert any(damage(file, random.Random(seed)) != file for seed in range(10))
