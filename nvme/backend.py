"""The contract of a backend, which reads for a `Reader`: it starts requests and returns futures of byte counts."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeAlias


class DeviceBuffer(Protocol):
    """Contiguous bytes in device memory, such as a one-dimensional uint8 tensor."""

    @property
    def __cuda_array_interface__(self) -> Mapping[str, Any]: ...

    @property
    def nbytes(self) -> int: ...

    def __getitem__(self, part: slice, /) -> "DeviceBuffer": ...


Buffer: TypeAlias = memoryview | DeviceBuffer
"""Where bytes go: a writable memoryview of bytes, or device memory."""


class OpenFile(ABC):
    """One file that a backend has opened for reading."""

    path: Path

    @property
    @abstractmethod
    def direct(self) -> bool:
        """Whether host memory is filled past the page cache; turns False when the file system refuses that."""

    @abstractmethod
    def start(self, buffer: Buffer, offset: int) -> "Future[int]":
        """Start filling ``buffer`` from ``offset`` (bytes) on and return at once; called by any thread.

        The future gives the bytes read: all of ``buffer``, fewer only where the file ends. It raises OSError when the
        disk fails, and is cancelled when the backend was closed before the request began. Until it is done the backend
        keeps the buffer alive; afterwards nothing writes to it. Offset and length are multiples of 4096, and so is the
        address of host memory. The caller waits for device streams that still use the buffer.

        Raises:
            RuntimeError: the backend is closed.
        """

    @abstractmethod
    def close(self) -> None:
        """Give the descriptor back; no request may be under way."""


class Backend(ABC):
    """Moves bytes from files to buffers."""

    reads_device_memory: ClassVar[bool]
    """Whether a `DeviceBuffer` may be filled, not only host memory."""

    @abstractmethod
    def open(self, path: Path) -> OpenFile:
        """Open a file for reading; called by any thread.

        Raises:
            OSError: the file cannot be opened; ``errno`` says why.
        """

    @abstractmethod
    def close(self) -> None:
        """Cancel the requests that have not begun and wait for those that have; may be called again."""
