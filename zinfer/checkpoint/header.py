"""Reads and checks the header of one safetensors file; it reads the 8 + N header bytes and never a weight.

The safetensors library checks the header, but does not tell where in the file a tensor begins: that is read here.
Dtypes below one byte (F4, F6_*) are refused, because nothing here streams parts of bytes.
"""

import hashlib
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from zinfer.checkpoint.faults import shorten, unreadable
from zinfer.checkpoint.json_text import parse_file
from zinfer.errors import CheckpointError
from zinfer.nvme.file_identity import FileIdentity

LENGTH_BYTES = 8
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
DAMAGED = "the file is cut short or damaged: download it again"


@dataclass(frozen=True)
class TensorEntry:
    """One tensor's place in a safetensors file: row-major, little-endian, `nbytes` bytes from `offset` of `file`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int

    @property
    def pieces(self) -> tuple["TensorEntry", ...]:
        """Itself: a parameter may also be made up of several."""
        return (self,)


@dataclass(frozen=True)
class JoinedTensor:
    """A parameter in several tensors (experts, or matrices joined later): their bytes, end to end, are its own."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[TensorEntry, ...]

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], pieces: Sequence[TensorEntry]) -> "JoinedTensor | None":
        """None where the pieces do not make up the shape: rows of another width, other numbers of them, two dtypes."""
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
        """Of the first piece."""
        return self.pieces[0].file

    @property
    def offset(self) -> int:
        """Of the first piece in its file."""
        return self.pieces[0].offset

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


@dataclass(frozen=True)
class Header:
    """A checked header. `tensors` goes by offset; weights begin at `data_offset`; `sha256` is of all bytes before.

    `identity` tells whether the file is still the one whose offsets these are.
    """

    file: Path
    tensors: dict[str, TensorEntry]
    data_offset: int
    identity: FileIdentity
    sha256: str


def read_header(path: Path) -> Header:
    """Returns the checked header of the safetensors file at `path`.

    Raises:
        CheckpointError: the file cannot be read or breaks a rule of the format; the message names the file, what is
            wrong and the remedy. An `OSError` or `SafetensorError` behind it is chained.
    """
    path = Path(path)
    try:
        # Asked before opening: opening a named pipe would wait for a writer forever.
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(f"{path}: not a regular file: name the safetensors file itself")
        raw, identity = _read_raw(path)
        with safe_open(path, "np"):
            pass
    except OSError as error:
        raise unreadable(path, error) from error
    except SafetensorError as error:
        raise CheckpointError(f"{path}: {shorten(str(error))}: {DAMAGED}") from error
    members = parse_file(path, raw[LENGTH_BYTES:], DAMAGED)
    members.pop("__metadata__", None)
    entries = [_entry(path, len(raw), name, value) for name, value in members.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    return Header(path, {entry.name: entry for entry in entries}, len(raw), identity, hashlib.sha256(raw).hexdigest())


def _read_raw(path: Path) -> tuple[bytes, FileIdentity]:
    """The length and the header as bytes of the file, and the file's identity."""
    with path.open("rb") as file:
        identity = FileIdentity.from_stat(os.fstat(file.fileno()))
        prefix = file.read(LENGTH_BYTES)
        if prefix == b"version ":
            raise CheckpointError(f"{path}: a Git LFS pointer, not the weights: run `git lfs pull` in its folder")
        header_bytes = int.from_bytes(prefix, "little")
        missing_bytes = LENGTH_BYTES + header_bytes - identity.num_bytes
        if missing_bytes > 0:
            raise CheckpointError(f"{path}: {missing_bytes} bytes of its header are missing: {DAMAGED}")
        return prefix + file.read(header_bytes), identity


def _entry(path: Path, data_offset: int, name: str, value: Any) -> TensorEntry:
    """Offsets in the header count from `data_offset`, those in the result from the file's start."""
    if not isinstance(value, dict):  # the library also takes a list of the three
        raise CheckpointError(f"{path}: tensor {shorten(name)}: its header entry is not an object: {DAMAGED}")
    dtype, (begin, end) = value["dtype"], value["data_offsets"]
    if dtype not in DTYPES:
        remedy = "use a checkpoint in another dtype"
        raise CheckpointError(f"{path}: tensor {shorten(name)}: dtype {dtype} is not supported: {remedy}")
    return TensorEntry(name, DTYPES[dtype], tuple(value["shape"]), path, data_offset + begin, end - begin)
