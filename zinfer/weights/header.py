"""Reads and checks the header of one safetensors file, without its weights, and the JSON of a checkpoint.

Both are untrusted input. Offsets must cover the file exactly, without gaps or overlaps, and JSON has no duplicate keys,
broken text or numbers that overflow.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import torch

from zinfer.errors import CheckpointError
from zinfer.nvme.file_identity import FileIdentity
from zinfer.weights.folder import DOWNLOAD_AGAIN, TRUNCATED, check_pointer, fail, opened, shorten

MAX_NATURAL = 2**64 - 1
_HALF_PAIR = re.compile("[\ud800-\udfff]")


class JsonFault(ValueError):
    """An error in a JSON text; `position` is its byte offset, if known."""

    def __init__(self, reason: str, position: int | None = None) -> None:
        super().__init__(reason)
        self.position = position


def parse_object(data: bytes, *, lenient: bool = False) -> dict[str, Any]:
    """Return the JSON object in `data`, UTF-8 text.

    Only the integers 0 .. 2**64 - 1 become `int`; every other number is a `float`, as in the reference's serde_json,
    so that `-0` or an overflow cannot pass for a size. `lenient` accepts all that Python's parser does, as transformers
    does for configs.

    Raises:
        JsonFault: not UTF-8, not JSON, nested too deeply, not an object; unless lenient, also a key twice in one
            object, NaN, Infinity, or half a surrogate pair.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise JsonFault("not valid UTF-8", error.start) from error
    options: dict[str, Any] = {}
    if not lenient:
        options = {"object_pairs_hook": _unique_object, "parse_int": _natural, "parse_constant": _refuse_constant}
    try:
        value = json.loads(text, **options)
    except json.JSONDecodeError as error:
        raise JsonFault(f"not valid JSON: {error.msg}", len(text[: error.pos].encode("utf-8"))) from error
    except RecursionError as error:
        raise JsonFault("nested too deeply") from error
    except JsonFault:
        raise
    except ValueError as error:  # an integer longer than Python's limit on digits
        raise JsonFault(f"not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise JsonFault(f"{type(value).__name__} instead of an object {{...}}", 0)
    return value


def parse_file(path: Path, data: bytes, remedy: str, *, lenient: bool = False) -> dict[str, Any]:
    """As `parse_object`, for a file's bytes; raises CheckpointError with the file, the byte and the remedy."""
    try:
        return parse_object(data, lenient=lenient)
    except JsonFault as fault:
        where = "" if fault.position is None else f" at byte {fault.position}"
        raise CheckpointError(f"{path}:{where} {fault}: {remedy}") from fault


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for text in (text for pair in pairs for text in pair if isinstance(text, str)):
        if _HALF_PAIR.search(text):
            raise JsonFault(f"the text {shorten(text)} holds half a surrogate pair")
    members = dict(pairs)
    if len(members) != len(pairs):
        [(name, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise JsonFault(f"the name {shorten(name)} occurs twice in one object")
    return members


def _natural(digits: str) -> int | float:
    if len(digits) > 20 or digits.startswith("-"):
        return float(digits)
    number = int(digits)
    return number if number <= MAX_NATURAL else float(digits)


def _refuse_constant(text: str) -> NoReturn:
    raise JsonFault(f"not valid JSON: {text}")


LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSION = 2**63 - 1
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
SUB_BYTE_DTYPES = ("F4", "F6_E2M3", "F6_E3M2")


@dataclass(frozen=True)
class TensorEntry:
    """One tensor's place in a file: row-major, little-endian, `nbytes` bytes from `offset` of `file`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int

    def read(self) -> torch.Tensor:
        """Read the values into host memory.

        Raises:
            CheckpointError: the file cannot be read, or ends before them.
        """
        values = torch.empty(self.shape, dtype=self.dtype)
        with opened(self.file) as (file, _):
            file.seek(self.offset)
            if file.readinto(values.reshape(-1).view(torch.uint8).numpy().data) < self.nbytes:
                what = f"tensor {shorten(self.name)} at byte {self.offset} is not wholly in the file"
                fail(self.file, what, TRUNCATED)
        return values

    @property
    def pieces(self) -> tuple["TensorEntry", ...]:
        """Itself, as `JoinedTensor.pieces`."""
        return (self,)

    def seen_as(self, dtype: torch.dtype, shape: tuple[int, ...]) -> "TensorEntry":
        """Return the same bytes as another tensor."""
        assert prod(shape) * dtype.itemsize == self.nbytes
        return replace(self, dtype=dtype, shape=shape)


@dataclass(frozen=True)
class JoinedTensor:
    """A parameter stored as several tensors (experts, or matrices joined later): the concatenation of their bytes."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[TensorEntry, ...]

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], pieces: Sequence[TensorEntry]) -> "JoinedTensor | None":
        """Join pieces; None if they do not make up the shape (width or number of rows differ) or differ in dtype."""
        fits = all(
            piece.shape[1:] == shape[1:] or (len(piece.shape) in (1, 2) and piece.shape[-1:] == shape[-1:])
            for piece in pieces
        )
        numel = sum(prod(piece.shape) for piece in pieces)
        if not fits or numel != prod(shape) or len({piece.dtype for piece in pieces}) != 1:
            return None
        return cls(name, shape, tuple(pieces))

    @property
    def dtype(self) -> torch.dtype:
        return self.pieces[0].dtype

    @property
    def file(self) -> Path:
        """The first piece's file."""
        return self.pieces[0].file

    @property
    def offset(self) -> int:
        """The first piece's offset in its file."""
        return self.pieces[0].offset

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


@dataclass(frozen=True)
class Header:
    """The checked description of a file's tensors, sorted by offset; `sha256` is of that description.

    `identity` is the file's when the header was read.
    """

    file: Path
    tensors: dict[str, TensorEntry]
    identity: FileIdentity
    sha256: str


def read_header(path: Path) -> Header:
    """Read and check the header of the safetensors file at `path`.

    Raises:
        CheckpointError: the file cannot be read or breaks a rule of the format; the message names the file, the tensor,
            the byte offset in the file and the remedy. It is chained to an `OSError`.
    """
    path = Path(path)
    raw, identity = _read_raw(path)
    try:
        members = parse_object(raw[LENGTH_BYTES:])
    except JsonFault as fault:
        offset = LENGTH_BYTES + (fault.position or 0)
        raise CheckpointError(f"{path}: header at byte {offset}: {fault}: {DOWNLOAD_AGAIN}") from fault
    metadata = members.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        fail(path, "header entry '__metadata__' is not an object of texts")
    entries = [tensor_entry(path, len(raw), name, value) for name, value in members.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    _check_cover(path, entries, len(raw), identity.num_bytes)
    return Header(path, {entry.name: entry for entry in entries}, identity, hashlib.sha256(raw).hexdigest())


def _read_raw(path: Path) -> tuple[bytes, FileIdentity]:
    """Return the length prefix and header as bytes, and the file's identity."""
    with opened(path) as (file, identity):
        prefix = file.read(LENGTH_BYTES)
        if len(prefix) < LENGTH_BYTES:
            what = f"{len(prefix)} bytes long, a safetensors file begins with {LENGTH_BYTES} bytes of header length"
            fail(path, what, TRUNCATED)
        check_pointer(path, prefix)
        header_bytes = int.from_bytes(prefix, "little")
        where = f"header length at byte 0 is {header_bytes}"
        if header_bytes == 0:
            fail(path, where)
        if header_bytes > MAX_HEADER_BYTES:
            fail(path, f"{where}, more than the format's {MAX_HEADER_BYTES}")
        missing_bytes = LENGTH_BYTES + header_bytes - identity.num_bytes
        if missing_bytes > 0:
            what = f"{where}, but the file has {identity.num_bytes} bytes: {missing_bytes} bytes are missing"
            fail(path, what, TRUNCATED)
        raw = prefix + file.read(header_bytes)
    if len(raw) < LENGTH_BYTES + header_bytes:
        fail(path, f"shrank to {len(raw)} bytes while its header was read", "wait for what writes it")
    if raw[LENGTH_BYTES : LENGTH_BYTES + 1] != b"{":
        fail(path, f"header at byte {LENGTH_BYTES} starts with {raw[LENGTH_BYTES:][:1]!r}, not with '{{'")
    return raw, identity


def tensor_entry(path: Path, data_offset: int, name: str, value: Any) -> TensorEntry:
    """Return a header's entry, checked, with its offset from the file's start instead of from `data_offset`.

    Raises:
        CheckpointError: it breaks a rule of the format; names file and tensor.
    """

    def refuse(what: str, remedy: str = DOWNLOAD_AGAIN) -> NoReturn:
        fail(path, f"tensor {shorten(name)}: {what}", remedy)

    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        refuse("its header entry is not an object of exactly dtype, shape and data_offsets")
    dtype_name, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype_name, str):
        refuse("its dtype is not a text")
    if dtype_name in SUB_BYTE_DTYPES:
        refuse(f"dtype {dtype_name} packs elements below a byte", "use a checkpoint in another dtype")
    if dtype_name not in DTYPES:
        refuse(f"unknown dtype {shorten(dtype_name)}, known are {', '.join(DTYPES)}")
    # `type` and not `isinstance`: a `bool` is an `int`. The parser's `int` is never negative.
    are_naturals = all(isinstance(each, list) and all(type(n) is int for n in each) for each in (shape, offsets))
    if not are_naturals or len(offsets) != 2:
        refuse("shape and data_offsets (two of them) must be lists of non-negative integers")
    shown = str(shape) if len(shape) <= 12 else f"[{', '.join(map(str, shape[:12]))}, ... {len(shape)} dimensions]"
    num_elements = 1
    for dimension in shape:  # from the left, like the reference: an overflow is an error even if a zero follows
        num_elements *= dimension
        if num_elements > MAX_NATURAL or dimension > MAX_DIMENSION:
            refuse(f"shape {shown} overflows 64 bits")
    begin, end = data_offset + offsets[0], data_offset + offsets[1]
    if begin > end:
        refuse(f"begins at byte {begin} of the file and ends before, at byte {end}")
    nbytes = num_elements * DTYPES[dtype_name].itemsize
    if end - begin != nbytes:
        refuse(
            f"{dtype_name} of shape {shown} takes {nbytes} bytes, but its range from byte {begin} to {end} of the file "
            f"has {end - begin}"
        )
    return TensorEntry(name, DTYPES[dtype_name], tuple(shape), path, begin, nbytes)


def _check_cover(path: Path, entries: list[TensorEntry], data_offset: int, file_bytes: int) -> None:
    """Check that the sorted ranges cover the file from `data_offset` to its end, without holes or overlaps."""
    end, before = data_offset, "the header"
    for entry in entries:
        tensor = f"tensor {shorten(entry.name)}"
        if entry.offset < end:
            fail(path, f"{tensor}: begins at byte {entry.offset} and overlaps {before}, which ends at byte {end}")
        if entry.offset > end:
            what = f"begins at byte {entry.offset}, {entry.offset - end} bytes after the end of {before} at byte {end}"
            fail(path, f"{tensor}: {what}: a hole in the file")
        end, before = entry.offset + entry.nbytes, tensor
    if end > file_bytes:
        cut = next(entry for entry in entries if entry.offset + entry.nbytes > file_bytes)
        what = f"{end - file_bytes} bytes are missing at its end (byte {file_bytes} of {end})"
        fail(path, f"tensor {shorten(cut.name)} at byte {cut.offset} is not wholly in the file: {what}", TRUNCATED)
    if end < file_bytes:
        fail(path, f"{file_bytes - end} bytes follow the last tensor, which ends at byte {end}")
