"""Where Triton keeps compiled kernels from one process to the next, and for which models they are there."""

import logging
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from threading import Thread

import torch
import triton
from triton.runtime.cache import triton_key

from zinfer import __version__
from zinfer.checkpoint import Checkpoint
from zinfer.config import Settings
from zinfer.errors import ConfigError

log = logging.getLogger("zinfer")


def check_kernel_cache() -> Path:
    """Return the folder of compiled kernels, which is made.

    Raises:
        ConfigError: it cannot be written.
    """
    folder = Path(triton.knobs.cache.dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise ConfigError(
            f"{folder}: compiled kernels cannot be kept there ({error.strerror}); set TRITON_CACHE_DIR to a folder "
            "that can be written"
        ) from error


@cache
def ensure_kernel_cache() -> None:
    """Let kernels be compiled for this process alone where its folder cannot be written; a warning says so."""
    Thread(target=triton_key, name="zinfer-triton-key", daemon=True).start()  # 0.3 s before the first kernel otherwise
    try:
        check_kernel_cache()
    except ConfigError as error:
        log.warning("%s. Until then each process compiles them again", error)
        triton.knobs.cache.dir = _for_this_process().name


@cache
def _for_this_process() -> "TemporaryDirectory[str]":
    """The folder is deleted as the process ends."""
    return TemporaryDirectory(prefix="zinfer-kernels-")


def kernels_name(checkpoint: Checkpoint, settings: Settings) -> str:
    """Return a name for the kernels that a model launches, by all that they depend on but the sizes of passes."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    formats = settings.dtype, settings.quantization, settings.kernel_inject, settings.batching.kv_cache_dtype
    parts = __version__, torch.__version__, triton.__version__, gpu, *map(str, formats)
    return sha256("\n".join(parts).encode() + checkpoint.config_path.read_bytes()).hexdigest()[:32]


def note_compiled(name: str) -> None:
    """Note beside the kernels that those of this name are there; without a place for the note, nothing is noted."""
    with suppress(OSError):
        (Path(triton.knobs.cache.dir) / f"zinfer-{name}").touch()


def are_compiled(name: str) -> bool:
    """Whether the kernels of this name were noted."""
    return (Path(triton.knobs.cache.dir) / f"zinfer-{name}").exists()
