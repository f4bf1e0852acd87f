"""The files of a store and its folder: one safetensors file per block, and config, index and tokenizer files.

A block's file has its tensors in the slab's order, end to end, from a multiple of 4096 bytes on. The safetensors
library sorts tensors by name and width and aligns nothing; the format requires neither, and permits trailing spaces in
the header, which align the weights (huggingface/safetensors, README.md, "Format"). The folder is new, empty, or has the
same store unfinished, and one process locks it.
"""

import fcntl
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from zinfer.errors import CheckpointError, ConfigError
from zinfer.model.partition import ModelBlock
from zinfer.nvme import whole_file
from zinfer.nvme.aligned import ALIGNMENT_BYTES, align_up
from zinfer.nvme.file_lock import try_lock
from zinfer.offload.block import Block, SlabTensor
from zinfer.weights import Checkpoint
from zinfer.weights.checkpoint import text_files
from zinfer.weights.folder import EXPLICIT_KEY, INDEX_NAME, listed
from zinfer.weights.header import DTYPES, LENGTH_BYTES, parse_object
from zinfer.weights.native import FORMAT_VERSION, MANIFEST_NAME, METHOD, Identity, Manifest
from zinfer.weights.slab_matrix import SlabMatrix

_DTYPE_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class BlockFile:
    """The file of one block.

    Attributes:
        block: the block.
        file: the file's name.
        tensors: with full names and their offsets in the slab; in this order in the file.
    """

    block: Block
    file: str
    tensors: tuple[SlabTensor, ...]

    @classmethod
    def of(cls, block: ModelBlock, num_files: int) -> "BlockFile":
        """Make the file of a block; ``num_files`` is part of its name."""
        file = f"block-{block.block.index + 1:05}-of-{num_files:05}.safetensors"
        return cls(block.block, file, stored_tensors(block.block, name_prefix(block)))

    @cached_property
    def header(self) -> bytes:
        """The bytes before the weights, a multiple of 4096."""
        members: dict[str, object] = {"__metadata__": {"format": "pt"}}
        begin = 0
        for tensor in self.tensors:
            members[tensor.name] = {
                "dtype": _DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [begin, begin + tensor.nbytes],
            }
            begin += tensor.nbytes
        text = json.dumps(members, separators=(",", ":")).encode()
        text = text.ljust(align_up(LENGTH_BYTES + len(text), ALIGNMENT_BYTES) - LENGTH_BYTES)
        return len(text).to_bytes(LENGTH_BYTES, "little") + text

    @property
    def data_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def num_bytes(self) -> int:
        """Size of the whole file."""
        return len(self.header) + self.data_bytes

    def data(self, slab: memoryview) -> Iterator[memoryview]:
        """Yield the weights, tensor by tensor, from the block's slab."""
        for tensor in self.tensors:
            yield slab[tensor.offset : tensor.end]


def name_prefix(block: ModelBlock) -> str:
    """Return the prefix that names in a block's slab lack, so that the layers of a model have equal layouts."""
    return f"{block.block.name}." if block.is_layer else ""


def stored_tensors(block: Block, prefix: str = "") -> tuple[SlabTensor, ...]:
    """Return the tensors of a block's slab as stored in a file, where a quantized matrix is several tensors."""
    return tuple(
        SlabTensor(prefix + part.name, part.dtype, part.shape, part.offset)
        for tensor in block.layout.tensors
        for part in (tensor.parts() if isinstance(tensor, SlabMatrix) else [tensor])
    )


def sidecar_files(
    checkpoint: Checkpoint, dtype: torch.dtype, files: Sequence[BlockFile], text: Mapping[str, Any] | None = None
) -> dict[str, bytes]:
    """Return the contents of config.json, the index and the tokenizer's files, by name.

    The config is the source's, or ``text`` of its text side alone, except for keys about the storage of weights. It
    states the dtype explicitly; otherwise readers could take the codes' dtype for it, which is floating-point in some
    formats.

    Raises:
        OSError: the source cannot be read.
    """
    config = parse_object(checkpoint.config_path.read_bytes(), lenient=True) if text is None else text
    config = {key: value for key, value in config.items() if key not in ("torch_dtype", EXPLICIT_KEY)}
    config["dtype"] = str(dtype).removeprefix("torch.")
    config["quantization_config"] = {"quant_method": METHOD, "format_version": FORMAT_VERSION}
    places = {tensor.name: file.file for file in files for tensor in file.tensors}
    index = {"metadata": {"total_size": sum(file.data_bytes for file in files)}, "weight_map": places}
    made = {checkpoint.config_path.name: config, INDEX_NAME: index}
    texts = {name: (json.dumps(each, indent=2, sort_keys=True) + "\n").encode() for name, each in made.items()}
    folder = checkpoint.folder
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in text_files(folder)} | texts


log = logging.getLogger(__name__)

LOCK_NAME: Final = ".zinfer_store.lock"
TEMPORARY: Final = ".zinfer_store.*.tmp"
"""Matches the temporary files that a killed writer may leave."""


@dataclass(frozen=True)
class Caller:
    """The words of messages for the caller that writes a store.

    Attributes:
        subject: the name of the folder in messages, before its path.
        option: the option or key that names the folder.
        on_cpu: how to convert the weights without a GPU.
        waits: whether to wait for another process that writes there, instead of refusing.
    """

    subject: str
    option: str
    on_cpu: str
    waits: bool


COMMAND: Final = Caller("output", "--output", "convert with --device cpu", waits=False)
"""`zinfer quantize`."""


def find_manifest(folder: Path, identity: Identity, caller: Caller = COMMAND) -> Manifest | None:
    """Return the manifest of the store in a folder, finished or not; None if there is none. Writes nothing.

    Raises:
        ConfigError: the path is not a folder, or holds another store or other files.
        CheckpointError: the manifest is damaged, or does not match the files of a finished store.
    """
    if folder.is_symlink() and not folder.exists():
        raise ConfigError(
            f"{caller.subject} {folder} is a link to nothing; make what it points to, or give another {caller.option}"
        )
    if not folder.exists():
        return None
    if not folder.is_dir():
        raise ConfigError(f"{caller.subject} {folder} is not a folder; give another {caller.option}")
    names = os.listdir(folder)  # before the check for a manifest: another process may start the store meanwhile
    if not (folder / MANIFEST_NAME).is_file():
        if strangers := sorted(name for name in names if name != LOCK_NAME and not fnmatch(name, TEMPORARY)):
            raise ConfigError(
                f"{caller.subject} {folder} holds files that are no store's: {listed(strangers)}; they are left as "
                f"they are: give a new or empty folder as {caller.option}"
            )
        return None
    manifest = Manifest.read(folder)
    if differences := manifest.identity.differences(identity):
        lines = "".join(f"\n  {line}" for line in differences)
        raise ConfigError(
            f"{caller.subject} {folder} belongs to another store; what differs:{lines}\n"
            f"Use the former model and settings to go on with that one, give another {caller.option}, or empty the "
            "folder."
        )
    if manifest.finished:
        manifest.check_files(folder)
    return manifest


def place_file(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """As `whole_file.place_file`, with a temporary name that ``TEMPORARY`` matches."""
    whole_file.place_file(path, pieces, path.with_name(TEMPORARY.replace("*", path.name)))


@contextmanager
def locked(folder: Path, caller: Caller = COMMAND) -> Iterator[None]:
    """Create the folder if needed and hold its lock, which the kernel releases with the process.

    Only the writer that finishes the store removes the lock file; writers that waited for it then find the store.

    Raises:
        ConfigError: another process writes a store there, and the caller does not wait.
        OSError: the folder cannot be made or written to, or the file system has no locks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_NAME).open("ab") as file:
        try:
            is_locked = try_lock(file)
        except OSError as error:
            reason = f"{error.strerror}; give another {caller.option}, on a file system with locks"
            raise OSError(error.errno, reason, str(folder / LOCK_NAME)) from error
        if not is_locked:
            if not caller.waits:
                what = "is being written by another process; wait for it or end it"
                raise ConfigError(f"{caller.subject} {folder} {what}")
            log.warning("%s %s is being written by another process; waiting for it", caller.subject, folder)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


CALIBRATION_NAME: Final = ".zinfer_calibration"


class Calibration:
    """Mean squares of the inputs of each weight.

    Args:
        sha256: of the prompts, in hexadecimal digits.
        measure: runs the model; returns mean squares [columns] by the weights' names.
    """

    def __init__(self, sha256: str, measure: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        self.sha256 = sha256
        self._measure = measure
        self._squares: Mapping[str, torch.Tensor] | None = None

    def open(self, folder: Path) -> None:
        """Load the result of a former run from the folder, else measure; raises CheckpointError if it is damaged."""
        path = folder / CALIBRATION_NAME
        if not path.is_file():
            self._squares = self._measure()
            return
        try:
            self._squares = load(path.read_bytes())
        except SafetensorError as error:
            raise CheckpointError(f"{path}: damaged ({error}); delete it, and it is measured again") from error

    def keep(self, folder: Path) -> None:
        """Save the result in the folder; raises OSError if the disk is full or failed."""
        assert self._squares is not None, "open it first"
        if not (folder / CALIBRATION_NAME).is_file():
            place_file(folder / CALIBRATION_NAME, [save(dict(self._squares))])

    def squares(self, parameter: str) -> torch.Tensor | None:
        """Return the mean squares of a parameter's inputs, [columns]; None if no prompt has reached it."""
        assert self._squares is not None, "open it first"
        return self._squares.get(parameter)
