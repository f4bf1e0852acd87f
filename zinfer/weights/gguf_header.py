"""Reads and checks the header of one GGUF file, versions 2 and 3: its metadata, and where its tensors are.

The file is untrusted: every count, length and offset is compared with the file's size before it is used, and tensors
must follow one another without holes or overlaps, as llama.cpp demands. Imports no torch, so that commands refuse a
damaged file at once. The layout is that of ggml's docs/gguf.md: little-endian; a text is its length in 64 bits and its
bytes in UTF-8; the dimensions of a tensor begin with the innermost, and are reversed here.
"""

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias

import numpy as np

from zinfer.nvme.aligned import align_up
from zinfer.nvme.file_identity import FileIdentity
from zinfer.weights.folder import DOWNLOAD_AGAIN, TRUNCATED, check_pointer, fail, opened, shorten

MAGIC: Final = b"GGUF"
MAX_HEADER_BYTES: Final = 256 << 20
MAX_KEYS: Final = 1 << 16
MAX_DIMENSIONS: Final = 4
MAX_ALIGNMENT: Final = 1 << 20
MAX_NAME_BYTES: Final = 1 << 10
_VERSIONS: Final = (2, 3)
_USUAL_ALIGNMENT: Final = 32
_FLOAT32, _BOOL, _STRING, _ARRAY = 6, 7, 8, 9
_SCALARS: Final = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "u1"} | {
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
"""numpy's dtype of each fixed-size type of a value."""

Value: TypeAlias = bool | int | float | str | list[Any]


@dataclass(frozen=True)
class GgmlType:
    """How ggml stores values: ``values`` of them in a block of ``nbytes``, along a row."""

    name: str
    values: int
    nbytes: int

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row of whole blocks."""
        return columns // self.values * self.nbytes


GGML_TYPES: Final[Mapping[int, GgmlType]] = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    10: GgmlType("Q2_K", 256, 84),
    11: GgmlType("Q3_K", 256, 110),
    12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210),
    20: GgmlType("IQ4_NL", 32, 18),
    23: GgmlType("IQ4_XS", 256, 136),
    30: GgmlType("BF16", 1, 2),
    39: GgmlType("MXFP4", 32, 17),
}
"""The types that are read, by ggml's numbers."""
_OTHER_TYPES: Final = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
}
_OTHER_FILE: Final = (
    "take the model's file in one that is read ({}), such as Q4_K_M; a page on the hub usually has several"
)


@dataclass(frozen=True)
class GgufTensor:
    """A tensor's place: rows of blocks, `nbytes` bytes from `offset` of `file`; ``shape`` in values."""

    name: str
    type: GgmlType
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GgufHeader:
    """The checked header of a file; `sha256` is of its bytes, `identity` the file's when it was read."""

    file: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]
    identity: FileIdentity
    sha256: str


def read_gguf_header(path: Path) -> GgufHeader:
    """Read and check the header of the GGUF file at `path`.

    Raises:
        CheckpointError: the file cannot be read, is damaged or cut short, or holds a type that is not read; the message
            names the file, the key or tensor, the byte and the remedy.
    """
    with opened(path) as (file, identity):
        source = _Bytes(path, file, identity.num_bytes)
        _check_beginning(source)
        num_tensors, num_keys = source.count("number of tensors"), source.count("number of keys")
        if num_keys > MAX_KEYS:
            source.fail(f"its header states {num_keys} keys, more than {MAX_KEYS}")
        metadata = dict[str, Value]()
        for _ in range(num_keys):
            key = source.text("name of a key", MAX_NAME_BYTES)
            if key in metadata:
                source.fail(f"the key {shorten(key)} occurs twice")
            metadata[key] = _value(source, key)
        stated = [_tensor(source) for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _USUAL_ALIGNMENT)
        is_power = type(alignment) is int and 0 < alignment <= MAX_ALIGNMENT and alignment & (alignment - 1) == 0
        if not is_power:
            fail(path, f"general.alignment is {shorten(str(alignment))}, not a power of two up to {MAX_ALIGNMENT}")
        assert isinstance(alignment, int)
        tensors = _placed(path, stated, source.position, alignment, identity.num_bytes)
    return GgufHeader(path, metadata, tensors, identity, source.digest.hexdigest())


class _Bytes:
    """The bytes of a header, read one after another; none beyond the file's end or the limit of a header."""

    def __init__(self, path: Path, file: BufferedReader, num_bytes: int) -> None:
        self.path, self.position, self.digest = path, 0, hashlib.sha256()
        self._file, self._num_bytes = file, num_bytes

    def fail(self, what: str, remedy: str = DOWNLOAD_AGAIN) -> NoReturn:
        """Raise CheckpointError with the byte that was reached."""
        what = f"byte {self.position}: {what}"
        fail(self.path, what, remedy)

    def take(self, count: int, what: str) -> bytes:
        """Return the next ``count`` bytes. Raises CheckpointError if there are fewer."""
        left = self._num_bytes - self.position
        if count > left:
            self.fail(f"{what} takes {count} bytes, and {left} are left in the file", TRUNCATED)
        if self.position + count > MAX_HEADER_BYTES:
            self.fail(f"{what} takes {count} bytes, and a header has at most {MAX_HEADER_BYTES}")
        data = self._file.read(count)
        if len(data) < count:
            self.fail("the file shrank while its header was read", "wait for what writes it")
        self.position += count
        self.digest.update(data)
        return data

    def unsigned(self, count: int, what: str) -> int:
        """Return the next whole number of ``count`` bytes."""
        return int.from_bytes(self.take(count, what), "little")

    def count(self, what: str) -> int:
        """Return the next 64 bits, a number of things of at least one byte each."""
        number = self.unsigned(8, what)
        if number > self._num_bytes - self.position:
            self.fail(f"{what} is {number}, more than the file has bytes")
        return number

    def text(self, what: str, max_bytes: int = MAX_HEADER_BYTES) -> str:
        """Return the next text."""
        length = self.count(f"length of the {what}")
        if length > max_bytes:
            self.fail(f"the {what} has {length} bytes, more than {max_bytes}")
        try:
            return self.take(length, f"the {what}").decode("utf-8")
        except UnicodeDecodeError:
            self.fail(f"the {what} is not valid UTF-8")


def _check_beginning(source: _Bytes) -> None:
    beginning = source.take(8, "the beginning of a GGUF file")
    check_pointer(source.path, beginning)
    if not beginning.startswith(MAGIC):
        fail(source.path, f"it begins with {beginning[:4]!r} and not with {MAGIC!r}: no GGUF file, or a damaged one")
    (version,) = struct.unpack("<I", beginning[4:])
    if version in _VERSIONS:
        return
    if int.from_bytes(beginning[4:], "big") in _VERSIONS:
        fail(source.path, "a GGUF file in big-endian order", "take the one in little-endian order")
    known = " and ".join(map(str, _VERSIONS))
    fail(source.path, f"version {version} of GGUF, and {known} are read", "convert the model again with llama.cpp")


def _value(source: _Bytes, key: str) -> Value:
    what = f"value of {shorten(key)}"
    kind = source.unsigned(4, f"type of the {what}")
    if kind == _STRING:
        return source.text(what)
    if kind in _SCALARS:
        value: Value = _numbers(source, kind, 1, what)[0]
        return (
            float(str(np.float32(float(str(value))))) if kind == _FLOAT32 else value
        )  # 1e-6 was written as the nearest float32
    if kind != _ARRAY:
        source.fail(f"the {what} has type {kind}, which GGUF does not define")
    kind, count = source.unsigned(4, f"type of the {what}"), source.count(f"length of the {what}")
    if kind == _STRING:
        return [source.text(what) for _ in range(count)]
    if kind in _SCALARS:
        return _numbers(source, kind, count, what)
    source.fail(f"the {what} is a list of type {kind}: lists of numbers and texts are read")


def _numbers(source: _Bytes, kind: int, count: int, what: str) -> list[Any]:
    dtype = np.dtype(_SCALARS[kind])
    numbers = np.frombuffer(source.take(count * dtype.itemsize, f"the {what}"), dtype)
    if kind != _BOOL:
        return list(numbers.tolist())
    if count and int(numbers.max()) > 1:
        source.fail(f"the {what} is {int(numbers.max())}, not true or false")
    return [bool(number) for number in numbers]


def _tensor(source: _Bytes) -> GgufTensor:
    """Return the next tensor's entry, with an offset from where tensors begin."""
    name = source.text("name of a tensor", MAX_NAME_BYTES)

    def refuse(what: str, remedy: str = DOWNLOAD_AGAIN) -> NoReturn:
        source.fail(f"tensor {shorten(name)}: {what}", remedy)

    num_dimensions = source.unsigned(4, f"tensor {shorten(name)}")
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        refuse(f"it has {num_dimensions} dimensions, and tensors have 1 to {MAX_DIMENSIONS}")
    data = source.take(8 * num_dimensions + 12, f"tensor {shorten(name)}")
    *dimensions, number, offset = struct.unpack(f"<{num_dimensions}QIQ", data)
    shape = tuple(reversed(dimensions))
    if prod(shape) >= 1 << 60 or 0 in shape:
        refuse(f"its shape {list(shape)} holds no value, or more than a file can")
    kind = GGML_TYPES.get(number)
    if kind is None:
        known = ", ".join(each.name for each in GGML_TYPES.values())
        if number in _OTHER_TYPES:
            refuse(f"its type {_OTHER_TYPES[number]} is not read", _OTHER_FILE.format(known))
        refuse(f"its type is number {number}, which is not known ({known} are)")
    if shape[-1] % kind.values:
        refuse(f"its rows have {shape[-1]} values, and {kind.name} stores them in blocks of {kind.values}")
    return GgufTensor(name, kind, shape, source.path, offset, prod(shape[:-1]) * kind.row_bytes(shape[-1]))


def _placed(
    path: Path, stated: list[GgufTensor], header_bytes: int, alignment: int, file_bytes: int
) -> dict[str, GgufTensor]:
    """Return the tensors by name, with offsets in the file, after checking that they follow one another."""
    begin = end = align_up(header_bytes, alignment)
    tensors = dict[str, GgufTensor]()
    for each in sorted(stated, key=lambda tensor: tensor.offset):
        offset = begin + each.offset
        if each.name in tensors:
            fail(path, f"the tensor {shorten(each.name)} occurs twice")
        if offset != end:
            fail(path, f"tensor {shorten(each.name)} begins at byte {offset} instead of byte {end}, after the others")
        if offset + each.nbytes > file_bytes:
            what = f"tensor {shorten(each.name)} ends at byte {offset + each.nbytes}, and the file at {file_bytes}"
            fail(path, what, TRUNCATED)
        tensors[each.name] = replace(each, offset=offset)
        end = align_up(offset + each.nbytes, alignment)
    return tensors
