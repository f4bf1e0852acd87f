"""GPUDirect Storage: reads from the disk directly into device memory, by NVIDIA's cuFile and the ``kvikio`` package.

An optional extra (``pip install '.[gds]'``). Reads into host memory use `ThreadsBackend`, because kvikio would use
the page cache. If kvikio would only emulate GPUDirect Storage, `choose_backend` chooses threads and logs why.
"""

import errno
import importlib
import logging
import os
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from zinfer.nvme.backend import Backend, Buffer, DeviceBuffer, OpenFile
from zinfer.nvme.pool import Pool
from zinfer.nvme.threads import ThreadsBackend, ThreadsFile

log = logging.getLogger(__name__)


class GdsUnavailable(RuntimeError):
    """GPUDirect Storage cannot be used; the message has the reason and a remedy."""


class GdsBackend(Backend):
    """Reads into device memory with cuFile, into host memory with `ThreadsBackend`.

    Args:
        num_threads: concurrent requests; also set for kvikio's own pool, which the whole process shares.

    Raises:
        GdsUnavailable: kvikio or the driver is missing.
    """

    reads_device_memory = True

    def __init__(self, *, num_threads: int) -> None:
        self._kvikio = _load_kvikio()
        self._kvikio.defaults.set({"num_threads": num_threads})
        self._host = ThreadsBackend(num_threads=num_threads)
        self._waiters = Pool(num_threads, "zinfer-gds")

    def open(self, path: Path) -> "GdsFile":
        host = self._host.open(path)
        try:
            return GdsFile(host, self._kvikio.CuFile(path), self._waiters)
        except RuntimeError as error:
            host.close()
            raise _disk_error(error) from error

    def close(self) -> None:
        self._waiters.close()
        self._host.close()


class GdsFile(OpenFile):
    """A file opened twice: for reads into host memory, and with cuFile for reads into device memory."""

    def __init__(self, host: ThreadsFile, cufile: Any, waiters: Pool) -> None:
        self.path = host.path
        self._host = host
        self._cufile = cufile
        self._waiters = waiters

    @property
    def direct(self) -> bool:
        return self._host.direct

    def start(self, buffer: Buffer, offset: int) -> "Future[int]":
        if isinstance(buffer, memoryview):
            return self._host.start(buffer, offset)
        return self._waiters.submit(partial(self._fill, buffer, offset))

    def close(self) -> None:
        self._cufile.close()
        self._host.close()

    def _fill(self, buffer: DeviceBuffer, offset: int) -> int:
        # A kvikio read past the end of the file fails instead of returning fewer bytes.
        left = os.fstat(self._cufile.fileno()).st_size - offset
        if left <= 0:
            return 0
        try:
            return int(self._cufile.pread(buffer, min(buffer.nbytes, left), offset).get())
        except RuntimeError as error:
            raise _disk_error(error) from error


def choose_backend(use_gds: bool, *, num_threads: int) -> Backend:
    """Return the backend for ``aio.use_gds``; threads, with a warning, if GPUDirect Storage cannot be used."""
    if use_gds:
        try:
            return GdsBackend(num_threads=num_threads)
        except GdsUnavailable as reason:
            log.warning("GPUDirect Storage is not used, blocks are read by way of host memory: %s", reason)
    return ThreadsBackend(num_threads=num_threads)


def _load_kvikio() -> ModuleType:
    """Import kvikio and check that it uses cuFile with the nvidia-fs driver."""
    try:
        kvikio = importlib.import_module("kvikio")
        defaults = importlib.import_module("kvikio.defaults")
        driver = importlib.import_module("kvikio.cufile_driver")
    except (ImportError, OSError, RuntimeError) as error:  # or kvikio cannot load a library
        raise GdsUnavailable(f"kvikio cannot be imported ({error}); pip install '.[gds]'") from error
    if defaults.is_compat_mode_preferred():
        remedy = "install libcufile, make /run/udev readable and leave KVIKIO_COMPAT_MODE unset"
        raise GdsUnavailable(f"kvikio does not use cuFile here; {remedy}")
    if not driver.get("is_gds_available"):
        raise GdsUnavailable("the nvidia-fs driver is not loaded; load NVIDIA's driver with `modprobe nvidia-fs`")
    return kvikio


def _disk_error(error: RuntimeError) -> OSError:
    """Return an OSError for a failure of kvikio, which reports all errors as RuntimeError without a code."""
    return OSError(errno.EIO, f"kvikio: {error}")
