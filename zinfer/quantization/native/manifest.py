"""A store's manifest: the store's source, how its parameters are quantized, and which block files it has.

A writer replaces it after each block, and again with ``finished`` set once everything else is on disk, so that a killed
writer can resume and a reader recognises unfinished stores.
"""

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, NonNegativeInt, ValidationError

from zinfer.checkpoint.faults import unreadable
from zinfer.checkpoint.folder import STORE_NAME, check_file_name
from zinfer.errors import CheckpointError
from zinfer.kernels.quantized import QuantFormat
from zinfer.nvme.whole_file import replace_file
from zinfer.quantization.native.identity import Identity

MANIFEST_NAME: Final = STORE_NAME
METHOD: Final = "zinfer"
"""``quant_method`` in the ``quantization_config`` of a store's config.json."""
FORMAT_VERSION: Final = 3  # 1: codes in the order of rows only; 2: blocks of an unfinished store in a second file

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

    format_version: Literal[3]
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
