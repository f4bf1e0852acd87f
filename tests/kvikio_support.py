"""A stand-in for the kvikio package: its files read real bytes, its driver's state is set by tests."""

import ctypes
import os
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest


class PretendDeviceMemory:
    """Host memory that shows itself as device memory does: by its address, and not as a Python buffer."""

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def __getitem__(self, part: slice) -> "PretendDeviceMemory":
        return PretendDeviceMemory(self.memory[part])


class PretendIOFuture:
    """Reads on a thread of its own; `get` waits for it."""

    def __init__(self, fd: int, address: int, size: int, offset: int) -> None:
        self._outcome: int | RuntimeError = 0
        self._thread = threading.Thread(target=self._read, args=(fd, address, size, offset))
        self._thread.start()

    def _read(self, fd: int, address: int, size: int, offset: int) -> None:
        content = os.pread(fd, size, offset)
        ctypes.memmove(address, content, len(content))
        missing = len(content) < size  # as kvikio, which does not give fewer bytes
        self._outcome = RuntimeError("pread: unexpected EOF within the requested range") if missing else size

    def get(self) -> int:
        self._thread.join()
        if isinstance(self._outcome, RuntimeError):
            raise self._outcome
        return self._outcome


class PretendCuFile:
    """What kvikio's CuFile does with device memory; host memory is refused, because it would take the page cache."""

    def __init__(self, path: Path) -> None:
        try:
            self._fd = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise RuntimeError(f"KvikIO failure: Unable to open file: {error.strerror}") from error

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        os.close(self._fd)

    def pread(self, buf: PretendDeviceMemory, size: int, file_offset: int) -> PretendIOFuture:
        assert not isinstance(buf, memoryview), "host memory goes past the page cache"
        assert size <= buf.nbytes
        return PretendIOFuture(self._fd, buf.__cuda_array_interface__["data"][0], size, file_offset)


def install_kvikio(monkeypatch: pytest.MonkeyPatch, cufile: type) -> SimpleNamespace:
    """Have `import kvikio` give a package over ``cufile`` whose driver works; returns the switches of what it says."""
    switches = SimpleNamespace(compatibility=False, driver=True, settings={})
    package, defaults, driver = (ModuleType(name) for name in ("kvikio", "kvikio.defaults", "kvikio.cufile_driver"))
    package.CuFile, package.defaults, package.cufile_driver = cufile, defaults, driver  # type: ignore[attr-defined]
    defaults.is_compat_mode_preferred = lambda: switches.compatibility  # type: ignore[attr-defined]
    defaults.set = switches.settings.update  # type: ignore[attr-defined]
    driver.get = lambda name: {"is_gds_available": switches.driver}[name]  # type: ignore[attr-defined]
    for module in (package, defaults, driver):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return switches
