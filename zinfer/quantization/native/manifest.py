"""A store's manifest: what it was made of, which parameters are quantized how, and what each block's file must be.

It is written last, so that a folder without one is no store yet. Reading it checks that the files are there in their
sizes; checksums are for whoever reads the weights.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from zinfer.checkpoint.faults import unreadable
from zinfer.checkpoint.folder import STORE_JOURNAL_NAME, STORE_NAME
from zinfer.checkpoint.json_text import JsonFault, parse_object
from zinfer.checkpoint.weight_index import check_file_name
from zinfer.errors import CheckpointError
from zinfer.kernels.quantized import QuantFormat
from zinfer.nvme.whole_file import replace_file
from zinfer.quantization.native.identity import Identity

METHOD: Final = "zinfer"
"""``quant_method`` in the ``quantization_config`` of a store's config.json."""
FORMAT_VERSION: Final = 2  # 1: codes in the order of rows only
MANIFEST_NAME: Final = STORE_NAME
JOURNAL_NAME: Final = STORE_JOURNAL_NAME

_CHECKSUM: Final = "xxh3_128 over all bytes of a file after its safetensors header, in hexadecimal digits"
_WRITE_AGAIN: Final = "copy the whole folder again, or write the store again with zinfer quantize"


@dataclass(frozen=True)
class StoredBlock:
    """A block's name in the model, its file's name and size, and the checksum of the weights in it."""

    name: str
    file: str
    num_bytes: int
    checksum: str

    def as_json(self) -> dict[str, str | int]:
        return {"name": self.name, "file": self.file, "bytes": self.num_bytes, "checksum": self.checksum}


@dataclass(frozen=True)
class StoredParameter:
    """The matrix that a quantized parameter is; two codes a byte do not tell an odd number of ``columns``."""

    format: QuantFormat
    columns: int


@dataclass(frozen=True)
class Manifest:
    """A store. ``parameters`` are the quantized ones, by their names in the model; ``folder`` is absolute."""

    folder: Path
    identity: Identity
    parameters: Mapping[str, StoredParameter]
    blocks: tuple[StoredBlock, ...]

    def write(self) -> None:
        """Put it into its folder, as a whole.

        Raises:
            OSError: the disk is full or failed; nothing is left behind.
        """
        formats = list(dict.fromkeys(parameter.format for parameter in self.parameters.values()))
        document = {
            "format_version": FORMAT_VERSION,
            "source": dict(self.identity.source),
            "settings": dict(self.identity.settings),
            "formats": [asdict(format) for format in formats],
            "parameters": {
                name: {"format": formats.index(parameter.format), "columns": parameter.columns}
                for name, parameter in self.parameters.items()
            },
            "checksum": _CHECKSUM,
            "blocks": [block.as_json() for block in self.blocks],
        }
        replace_file(self.folder / MANIFEST_NAME, json.dumps(document, indent=1) + "\n")


def is_store(folder: Path) -> bool:
    """Whether a folder is a store, or the beginning of one."""
    return (folder / MANIFEST_NAME).is_file() or (folder / JOURNAL_NAME).is_file()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a finished store, all of whose files are there in their sizes.

    Opening the folder as a checkpoint has refused one that is written half.

    Raises:
        CheckpointError: there is none, it is of another version or damaged, or a block's file is missing or of another
            size; names the file, the key and the remedy.
    """
    path = folder.absolute() / MANIFEST_NAME
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file, but a store has one; {_WRITE_AGAIN}") from None
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        document = _Object(path, "", parse_object(data))
    except JsonFault as fault:
        where = "" if fault.position is None else f" at byte {fault.position}"
        raise CheckpointError(f"{path}:{where} {fault}: the manifest is damaged; {_WRITE_AGAIN}") from fault
    version = document.members.get("format_version")
    if version != FORMAT_VERSION:
        remedy = "write the store again with zinfer quantize, or use the zinfer that wrote it"
        raise CheckpointError(f"{path}: format_version is {version!r}, this zinfer reads {FORMAT_VERSION}; {remedy}")
    manifest = _manifest(document)
    for block in manifest.blocks:
        _check_file(manifest.folder / block.file, block)
    return manifest


@dataclass(frozen=True)
class _Object:
    """An object of the manifest; ``key`` is its own, empty for the whole."""

    path: Path
    key: str
    members: Mapping[str, Any]

    def natural(self, name: str) -> int:
        value = self.members.get(name)
        return value if type(value) is int else self.refuse(name, "not a whole number")

    def text(self, name: str) -> str:
        value = self.members.get(name)
        return value if isinstance(value, str) else self.refuse(name, "not a text")

    def object(self, name: str) -> "_Object":
        value = self.members.get(name)
        return (
            _Object(self.path, self._full(name), value) if isinstance(value, dict) else self.refuse(name, "no object")
        )

    def objects(self, name: str) -> list["_Object"]:
        values = self.members.get(name)
        if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
            self.refuse(name, "not a list of objects")
        return [_Object(self.path, f"{self._full(name)}[{number}]", value) for number, value in enumerate(values)]

    def refuse(self, name: str, what: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: {self._full(name)}: {what}: the manifest is damaged; {_WRITE_AGAIN}")

    def _full(self, name: str) -> str:
        return ".".join(part for part in (self.key, name) if part)


def _manifest(document: _Object) -> Manifest:
    source, settings = document.object("source"), document.object("settings")
    identity = Identity({name: source.text(name) for name in source.members}, dict(settings.members))
    formats = [_format(each) for each in document.objects("formats")]
    parameters = document.object("parameters")
    blocks = [_block(each) for each in document.objects("blocks")]
    files = [block.file for block in blocks]
    if not files or len(set(files)) < len(files):
        document.refuse("blocks", "no list of different files")
    return Manifest(
        document.path.parent,
        identity,
        {name: _parameter(parameters.object(name), formats) for name in parameters.members},
        tuple(blocks),
    )


def _format(members: _Object) -> QuantFormat:
    try:
        format = QuantFormat(**members.members)
    except (TypeError, ValueError) as error:
        members.refuse("", f"no format of this version ({error})")
    sizes = (format.bits, format.group_size or 1, format.group_rows or 1)
    flags = (format.symmetric, format.is_float, format.scales_columns, format.orders_columns, format.in_fragments)
    if not all(type(size) is int for size in sizes) or not all(isinstance(flag, bool) for flag in flags):
        members.refuse("", "no format: sizes are whole numbers, the others true or false")
    return format


def _parameter(members: _Object, formats: list[QuantFormat]) -> StoredParameter:
    number = members.natural("format")
    if number >= len(formats):
        members.refuse("format", f"{number}, but there are {len(formats)} formats")
    return StoredParameter(formats[number], members.natural("columns"))


def _block(members: _Object) -> StoredBlock:
    file = members.text("file")
    check_file_name(file, f"{members.path}: {members.key}.file")
    return StoredBlock(members.text("name"), file, members.natural("bytes"), members.text("checksum"))


def _check_file(path: Path, block: StoredBlock) -> None:
    try:
        num_bytes = path.stat().st_size
    except FileNotFoundError:
        what = f"no such file, but {MANIFEST_NAME} names it for the block {block.name}"
        raise CheckpointError(f"{path}: {what}; {_WRITE_AGAIN}") from None
    except OSError as error:
        raise unreadable(path, error) from error
    if num_bytes != block.num_bytes:
        what = f"{num_bytes} bytes long, but {MANIFEST_NAME} says {block.num_bytes} for the block {block.name}"
        raise CheckpointError(f"{path}: {what}; {_WRITE_AGAIN}")
