"""Host buffers of exact size: anonymous memory, touched by several threads, registered with CUDA to pin them.

torch's pinned allocator rounds up to powers of two; a private mapping only to whole pages. Registering 512 GiB or more
at once fails on some systems, so a buffer is registered in parts of at most 64 GiB, and no copy may cross two parts.
"""

import ctypes
import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch

from zinfer.nvme.aligned import ALIGNMENT_BYTES, align_up
from zinfer.nvme.memory import map_memory, warn_once

log = logging.getLogger(__name__)
_libc = ctypes.CDLL(None, use_errno=True)

MOST_REGISTERED_BYTES: Final = 64 << 30
"""Size of one registration; copies must not cross a multiple of it."""

_MADV_POPULATE_WRITE: Final = 23  # since Linux 5.14 (madvise(2)): faults pages in and leaves their bytes alone
_PORTABLE: Final = 1  # cudaHostRegisterPortable: pinned for every CUDA context (CUDA runtime API, cudaHostRegister)
_TOUCH_BYTES: Final = 8 << 20  # per call: less costs more calls, more leaves threads idle at the end
_MOST_TOUCH_THREADS: Final = 4  # measured in a virtual machine: more are no faster, and loading has other work


class HostBuffer:
    """Page-aligned host memory, as a uint8 tensor and as a memoryview.

    ``pin=True`` pins the buffer in the constructor; `pin` does it later. If CUDA refuses the registration, the buffer
    stays pageable, a warning is logged and ``pinned`` stays False.
    """

    def __init__(self, nbytes: int, *, pin: bool = False) -> None:
        self.nbytes = align_up(max(nbytes, 1), ALIGNMENT_BYTES)
        # The tensor keeps the mapping alive; it is unmapped with its last view.
        self._map = map_memory(self.nbytes)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self.memory = memoryview(self._map)
        self.pinned = False
        if pin:
            self.touch()
            self.pin()

    def touch(self) -> None:
        """Fault in the pages, zeroed, with several threads; keeps the buffer's contents.

        Registration and copies would fault them in one by one.
        """
        num_threads = max(1, min(os.cpu_count() or 1, _MOST_TOUCH_THREADS, self.nbytes // _TOUCH_BYTES))
        address = self.tensor.data_ptr()

        def populate(begin: int) -> None:  # ctypes releases the GIL
            nbytes = min(_TOUCH_BYTES, self.nbytes - begin)
            if _libc.madvise(ctypes.c_void_p(address + begin), ctypes.c_size_t(nbytes), _MADV_POPULATE_WRITE):
                why = os.strerror(ctypes.get_errno())
                warn_once(f"MADV_POPULATE_WRITE: {why} (needs Linux 5.14); pages are faulted in one by one")

        with ThreadPoolExecutor(num_threads, thread_name_prefix="zinfer-touch") as pool:
            # From front to back, like the bytes: with one range per thread, copies would fault in the first pages.
            for _ in pool.map(populate, range(0, self.nbytes, _TOUCH_BYTES)):
                pass

    def pin(self) -> None:
        """Register the buffer with CUDA, so that copies are asynchronous."""
        done: list[int] = []
        for begin, nbytes in self._registrations():
            if not self._register(begin, nbytes):
                for registered in done:
                    self._unregister(registered)
                return
            done.append(begin)
        self.pinned = True

    def close(self) -> None:
        """Undo the registration; no copy from or to the buffer may be under way."""
        if self.pinned:
            self.pinned = False
            for begin, _ in self._registrations():
                self._unregister(begin)

    def _registrations(self) -> Iterator[tuple[int, int]]:
        for begin in range(0, self.nbytes, MOST_REGISTERED_BYTES):
            yield begin, min(MOST_REGISTERED_BYTES, self.nbytes - begin)

    def _register(self, begin: int, nbytes: int) -> bool:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = int(runtime.cudaHostRegister(self.tensor.data_ptr() + begin, nbytes, _PORTABLE))
        if code == 0:
            return True
        _clear_last_error()
        log.warning(
            "pinning %d bytes of host memory failed (CUDA error %d); they stay pageable, copies will be slower. "
            "Raise the memory-lock limit (ulimit -l) or lower zinfer.max_pinned_memory.",
            nbytes,
            code,
        )
        return False

    def _unregister(self, begin: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr() + begin)  # type: ignore[no-untyped-call]


def _clear_last_error() -> None:
    """Clear the failed call's error in the CUDA runtime, or torch's next launch would report it."""
    try:
        torch.empty(1, device="cuda").zero_()
    except RuntimeError as error:
        log.debug("cleared CUDA error: %s", error)
