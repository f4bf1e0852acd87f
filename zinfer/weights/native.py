"""The store format of zinfer itself: a store's source, its manifest, and the scheme that reads its matrices.

The source is identified by samples and modification times of its files and by every setting that changes the store's
bytes: looking up a store must not read a whole checkpoint, whose folder may move. A writer replaces the manifest after
each block, and again with ``finished`` set once everything else is on disk, so that a killed writer can resume and a
reader recognises unfinished stores.
"""

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, NonNegativeInt, ValidationError

from zinfer.config.quantization_rules import Quantization
from zinfer.errors import CheckpointError
from zinfer.kernels.quantized import QuantFormat
from zinfer.nvme.file_identity import FileIdentity
from zinfer.nvme.whole_file import replace_file
from zinfer.weights import Checkpoint
from zinfer.weights.checkpoint import weights_sample
from zinfer.weights.folder import STORE_NAME, check_file_name, unreadable
from zinfer.weights.formats.scheme import IN_PLACE, EncodedMatrix, Entry, Scheme

_NAME = "name"


@dataclass(frozen=True)
class Identity:
    """The identity of a store's source; the folder's name in ``source`` is for messages and not compared."""

    source: Mapping[str, str]
    settings: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        rules: Quantization,
        dtype: torch.dtype,
        calibration: str | None = None,
        shard: str | None = None,
        side: str | None = None,
    ) -> "Identity":
        """Make the identity of an opened source; reads samples of its weights, which distinguish fine-tunes of a model.

        Args:
            calibration: hash of the calibration's prompts.
            shard: the rank among how many whose part of each layer the store holds; None: whole layers.
            side: the one side of a multimodal model that it holds; None: all that the model has.

        Raises:
            OSError: a file cannot be read.
        """
        source = {
            _NAME: checkpoint.folder.name,
            "fingerprint": checkpoint.fingerprint,
            "weights_sample": weights_sample(tuple(checkpoint.files)),
            "weights_written": _written(checkpoint.files),
        }
        settings = {"dtype": str(dtype).removeprefix("torch.")} | rules.as_document()
        del settings["activations"]  # changes no byte of a store
        settings |= {"calibration_sha256": calibration} if calibration else {}
        settings |= {"side": side} if side else {}
        return cls(source, settings | ({"shard": shard} if shard else {}))

    def digest(self) -> str:
        """Return the SHA-256 of all compared values, in hexadecimal digits."""
        source = {name: value for name, value in self.source.items() if name != _NAME}
        members = {"source": source, "settings": dict(self.settings)}
        return hashlib.sha256(json.dumps(members, sort_keys=True).encode()).hexdigest()

    def differences(self, now: "Identity") -> list[str]:
        """Return one line for each difference, worded for the user; empty for the same store."""
        former, new = dict(self.source), dict(now.source)
        if {**former, _NAME: ""} == {**new, _NAME: ""}:
            former = new
        old_values = dict(_leaves(former, "source")) | dict(_leaves(self.settings, "settings"))
        new_values = dict(_leaves(new, "source")) | dict(_leaves(now.settings, "settings"))
        return [
            f"{path}: {old_values.get(path, 'absent')} in the store, {new_values.get(path, 'absent')} now"
            for path in dict.fromkeys((*old_values, *new_values))
            if old_values.get(path) != new_values.get(path)
        ]


def _leaves(value: object, path: str) -> Iterator[tuple[str, str]]:
    """Yield the path and the JSON text of every scalar in a JSON document."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _leaves(part, f"{path}.{key}")
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from _leaves(part, f"{path}[{number}]")
    else:
        yield path, json.dumps(value)


def _written(files: Mapping[Path, FileIdentity]) -> str:
    """Return the latest modification time of the files, and a digest of their names, sizes and times."""
    known = sorted((file.name, identity.num_bytes, identity.mtime_ns) for file, identity in files.items())
    last = max(files.values(), key=lambda identity: identity.mtime_ns)
    return f"{last.written_at} ({hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]})"


MANIFEST_NAME: Final = STORE_NAME
METHOD: Final = "zinfer"
"""``quant_method`` in the ``quantization_config`` of a store's config.json."""
FORMAT_VERSION: Final = 4
"""1: codes in the order of rows only. 2: blocks of an unfinished store in a second file. 3: inputs in the rows of
experts that modules hold transposed (gpt-oss's)."""

_WRITE_AGAIN: Final = "copy the whole folder again, or write the store again with zinfer quantize"


def _in_the_folder(name: str) -> str:
    check_file_name(name, "it")
    return name


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class StoredBlock(_Part):
    """A block's name in the model, the size of its file, and the xxh3_128 of its bytes after the header, in hex."""

    name: str
    num_bytes: NonNegativeInt
    checksum: str


class StoredParameter(_Part):
    """A quantized parameter's matrix; ``columns`` is stored because packed 4-bit codes do not show an odd number."""

    format: QuantFormat
    columns: NonNegativeInt


class Manifest(_Part):
    """A store.

    Attributes:
        finished: whether all files are in the folder; if not, ``blocks`` has those written so far.
        parameters: the quantized ones, by their names in the model.
        blocks: by file name; in a finished store, in the model's order.
    """

    format_version: Literal[4]
    finished: bool = False
    identity: Identity
    parameters: dict[str, StoredParameter]
    blocks: dict[Annotated[str, AfterValidator(_in_the_folder)], StoredBlock] = {}

    def write(self, folder: Path) -> None:
        """Replace the folder's manifest. Raises OSError, keeping the old one, if the disk is full or failed."""
        replace_file(folder / MANIFEST_NAME, self.model_dump_json(indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read the manifest of a folder; the store may be unfinished.

        Raises:
            CheckpointError: it is missing, of another version, or damaged; names the file, the key and the remedy.
        """
        path = folder / MANIFEST_NAME
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            raise CheckpointError(f"{path}: no such file, but a store has one; {_WRITE_AGAIN}") from None
        except OSError as error:
            raise unreadable(path, error) from error
        except ValidationError as error:
            fault = error.errors()[0]
            if fault["loc"] == ("format_version",):
                found = "missing" if fault["type"] == "missing" else fault["input"]
                what = f"format_version is {found}, this zinfer reads {FORMAT_VERSION}"
                remedy = "write the store again with zinfer quantize, or use the zinfer that wrote it"
                raise CheckpointError(f"{path}: {what}; {remedy}") from error
            what = ": ".join(part for part in (".".join(map(str, fault["loc"])), fault["msg"]) if part)
            raise CheckpointError(f"{path}: {what}: the manifest is damaged; {_WRITE_AGAIN}") from error

    def check_files(self, folder: Path) -> None:
        """Raise CheckpointError if a block's file is missing or has another size."""
        for file, block in self.blocks.items():
            path = folder / file
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


def read_manifest(folder: Path) -> Manifest:
    """Read a finished store's manifest and check its files. Raises CheckpointError if unfinished, or as the methods."""
    manifest = Manifest.read(folder)
    if not manifest.finished:
        raise CheckpointError(
            f"{folder}: a store that is not finished; run the same zinfer quantize command again, it resumes"
        )
    manifest.check_files(folder)
    return manifest


class StoreScheme(Scheme):
    """The scheme of `zinfer quantize`: parts are those of `QuantizedMatrix` and need no conversion."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._path, self._manifest = folder / MANIFEST_NAME, manifest

    @property
    def part(self) -> str | None:
        return self._manifest.identity.settings.get("shard")

    @property
    def checksums(self) -> Mapping[Path, str]:
        """The xxh3_128 of each block file's bytes after the header, in hex, by absolute path."""
        return {self._path.parent / file: block.checksum for file, block in self._manifest.blocks.items()}

    @classmethod
    def open(cls, folder: Path) -> "StoreScheme":
        """Open a finished store. Raises CheckpointError as `read_manifest`."""
        return cls(folder.absolute(), read_manifest(folder.absolute()))

    def stored(self, names: Collection[str]) -> dict[str, dict[str, str]]:
        found = {
            parameter: {part: f"{parameter}.{part}" for part in stored.format.part_shapes(0, stored.columns)}
            for parameter, stored in self._manifest.parameters.items()
        }
        absent = [tensor for parts in found.values() for tensor in parts.values() if tensor not in names]
        if absent:
            raise CheckpointError(
                f"{self._path}: parameters names {len(absent)} tensors that no file holds, "
                f"{absent[0]} the first: files and manifest are of different stores; copy the whole folder again"
            )
        return found

    def matrix(self, parameter: str, parts: Mapping[str, Entry]) -> EncodedMatrix[Entry]:
        stored = self._manifest.parameters[parameter]
        format, columns, codes = stored.format, stored.columns, parts["codes"].shape
        rows = codes[0] if codes else 0
        expected = format.part_shapes(rows, columns)
        for part, entry in parts.items():
            if tuple(entry.shape) != expected[part]:
                raise CheckpointError(
                    f"{parameter}.{part} has shape {list(entry.shape)}, {MANIFEST_NAME} wants {list(expected[part])}: "
                    "files and manifest are of different stores; copy the whole folder again"
                )
        try:
            format.check_shape(rows, columns)
        except ValueError as error:
            raise CheckpointError(
                f"{self._path}: {parameter}: {error}: the manifest is damaged; copy the whole folder again"
            ) from error
        return EncodedMatrix(format, rows, columns, IN_PLACE, parts)
