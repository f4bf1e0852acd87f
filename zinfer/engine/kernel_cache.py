"""Where Triton keeps compiled kernels from one process to the next."""

import logging
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

import triton

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
    try:
        check_kernel_cache()
    except ConfigError as error:
        log.warning("%s. Until then each process compiles them again", error)
        triton.knobs.cache.dir = _for_this_process().name


@cache
def _for_this_process() -> "TemporaryDirectory[str]":
    """The folder is deleted as the process ends."""
    return TemporaryDirectory(prefix="zinfer-kernels-")
