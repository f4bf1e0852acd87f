"""The interface of a `Reader`'s backend, which starts requests and returns futures of byte counts."""

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
"""The target of a read: a writable memoryview of bytes, or device memory."""


class OpenFile(ABC):
    """One file that a backend has opened for reading."""

    path: Path

    @property
    @abstractmethod
    def direct(self) -> bool:
        """Whether reads into host memory bypass the page cache; turns False when the file system refuses that."""

    def in_memory(self, offset: int, num_bytes: int) -> bool:
        """Whether these bytes are copied from memory, not read from a disk."""
        return False

    @abstractmethod
    def start(self, buffer: Buffer, offset: int) -> "Future[int]":
        """Start to fill ``buffer`` from ``offset`` (bytes) and return at once; called by any thread.

        The future returns the number of bytes read, fewer than ``buffer`` only at the end of the file. It raises
        OSError if the disk fails, and is cancelled if the backend is closed before the request starts. The backend
        keeps the buffer alive until the future is done, and does not write to it after. Offset, length and the address
        of host memory are multiples of 4096. The caller waits for device streams that still use the buffer.

        Raises:
            RuntimeError: the backend is closed.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the descriptor; no request may be under way."""


class Backend(ABC):
    """Reads bytes of files into buffers."""

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
        """Cancel requests not started and wait for those under way; may be called again."""
