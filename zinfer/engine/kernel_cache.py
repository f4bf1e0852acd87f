"""Where Triton keeps compiled kernels from one process to the next, and for which models they are there.

Triton writes each file of a kernel under another name first, and last a group file that names them all; a process that
is killed leaves kernels that do not count. But it trusts the files of a group: one that is missing, cut or empty, after
a full disk or a loss of power, would end a job with an error of json, of a lookup or of the driver.
"""

import atexit
import json
import logging
import os
import struct
from codecs import utf_8_decode
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final

import torch
import triton
from triton.runtime.cache import triton_key

from zinfer import __version__
from zinfer.config import Settings
from zinfer.errors import ConfigError
from zinfer.nvme.pool import start_thread
from zinfer.nvme.temporary_folder import temporary_folder
from zinfer.weights import Checkpoint

log = logging.getLogger("zinfer")

_HEAD_BYTES: Final = 256  # of texts, which Triton reads but does not use
_BINARIES: Final = frozenset(["cubin", "hsaco", "so"])  # ELF files
_GROUP: Final = "__grp__"
_ELF: Final = struct.Struct("<4s28x2Q6x4H")  # magic; offsets, then size and number of entries, of segments and sections


def check_kernel_cache() -> Path:
    """Return the folder of compiled kernels, which is made, without those that are damaged; a warning counts them.

    Raises:
        ConfigError: it cannot be written.
    """
    folder = Path(triton.knobs.cache.dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            num_damaged = _discard_damaged(folder)
    except OSError as error:
        raise ConfigError(
            f"{folder}: compiled kernels cannot be kept there ({error.strerror}); set TRITON_CACHE_DIR to a folder "
            "that can be written"
        ) from error
    if num_damaged:
        kernels = "1 kernel is" if num_damaged == 1 else f"{num_damaged} kernels are"
        log.warning("%s: %s damaged, and compiled again", folder, kernels)
    return folder


def _discard_damaged(folder: Path) -> int:
    """Delete what lets Triton find kernels whose files are damaged, and return how many there were."""
    damaged = [path for path in _entries(folder) if not _is_whole(path)]
    for path in damaged:
        with suppress(FileNotFoundError):  # another process of the job is as far
            os.remove(path)
    return len(damaged)


def _entries(folder: Path) -> Iterator[str]:
    """Yield the paths of group files, and of libraries, which are no part of a group."""
    with os.scandir(folder) as found:
        for kernel in found:
            if kernel.is_dir():
                for name in os.listdir(kernel.path):
                    if name.endswith(".so") or (name.startswith(_GROUP) and name.endswith(".json")):
                        yield f"{kernel.path}/{name}"


def _is_whole(path: str) -> bool:
    """Whether a file, and those that it names if it is a group, has all that Triton needs of it."""
    kind = path[path.rfind(".") + 1 :]
    try:
        if kind != "json":
            head, num_bytes = _read_head(path)
            return _elf_bytes(head) <= num_bytes if kind in _BINARIES else bool(_text(head))
        with open(path, "rb") as file:
            document = json.load(file)
        if f"/{_GROUP}" not in path:
            return "target" in document
        return all(map(_is_whole, document["child_paths"].values()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error):
        return False


def _read_head(path: str) -> tuple[bytes, int]:
    """Return the beginning of a file, and its size. There are thousands of files, and `open` takes longer."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, _HEAD_BYTES), os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def _elf_bytes(head: bytes) -> int:
    """Return the size of an ELF file, which ends with one of its two tables; raises ValueError if it is none."""
    magic, segments, sections, *counts = _ELF.unpack_from(head)
    if magic != b"\x7fELF":
        raise ValueError("no ELF file")
    return int(max(segments + counts[0] * counts[1], sections + counts[2] * counts[3]))


def _text(head: bytes) -> str:
    """Return the beginning of a text, whose last character may be cut; raises UnicodeDecodeError if it is none."""
    return utf_8_decode(head)[0]


@cache
def ensure_kernel_cache() -> None:
    """Let kernels be compiled for this process alone where its folder cannot be written; a warning says so."""
    # 0.3 s before the first kernel otherwise, which raises what fails here
    start_thread("zinfer-triton-key", triton_key, partial(log.warning, "Triton's files cannot be hashed: %s"))
    try:
        check_kernel_cache()
    except ConfigError as error:
        log.warning("%s. Until then each process compiles them again", error)
        triton.knobs.cache.dir = str(_for_this_process())


@cache
def _for_this_process() -> Path:
    """The folder is deleted as the process ends."""
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(temporary_folder("kernels"))


def kernels_name(checkpoint: Checkpoint, settings: Settings) -> str:
    """Return a name for the kernels that a model launches, by all that they depend on but the sizes of passes."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    formats = settings.dtype, settings.quantization, settings.kernel_inject, settings.batching.kv_cache_dtype
    parts = __version__, torch.__version__, triton.__version__, gpu, *map(str, formats)
    return sha256("\n".join(parts).encode() + checkpoint.config_path.read_bytes()).hexdigest()[:32]


def note_compiled(name: str) -> None:
    """Note beside the kernels that those of this name are there; without a place for the note, nothing is noted."""
    folder = Path(triton.knobs.cache.dir)
    with suppress(OSError):
        (folder / f"zinfer-{name}").write_text("\n".join(sorted(_names(folder))))


def are_compiled(name: str) -> bool:
    """Whether the kernels of this name were noted, and all that were there then still are."""
    folder = Path(triton.knobs.cache.dir)
    try:
        noted = (folder / f"zinfer-{name}").read_text(errors="replace")
        return _names(folder).issuperset(noted.splitlines())
    except OSError:  # nothing is noted, or it cannot be read: what may be there is compiled again
        return False


def _names(folder: Path) -> set[str]:
    return {path.removeprefix(f"{folder}/") for path in _entries(folder)}
