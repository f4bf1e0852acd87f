"""Host buffers of exact size: anonymous ``mmap``, registered with CUDA when they are to be pinned.

torch's pinned allocator rounds up to powers of two; a private mapping is rounded to whole pages only. One buffer is
one registration, so no copy ever crosses two of them.
"""

import logging
import mmap

import torch

from zinfer.nvme.aligned import ALIGNMENT_BYTES, align_up

log = logging.getLogger(__name__)

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every CUDA context (CUDA runtime API, cudaHostRegister)


class HostBuffer:
    """Page-aligned host memory, seen as a uint8 tensor and as a memoryview.

    ``pinned`` tells what came out: a refused registration leaves the buffer pageable, and is logged.
    """

    def __init__(self, nbytes: int, *, pin: bool) -> None:
        self.nbytes = align_up(max(nbytes, 1), ALIGNMENT_BYTES)
        # The tensor keeps the mapping alive; the mapping is given back when the last view of it is gone.
        self._map = mmap.mmap(-1, self.nbytes)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self.memory = memoryview(self._map)
        self.pinned = pin and self._register()

    def close(self) -> None:
        """Undo the registration; no copy from or to the buffer may be under way."""
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())  # type: ignore[no-untyped-call]
            self.pinned = False

    def _register(self) -> bool:
        self.tensor.zero_()  # registration faults pages in one by one; a fill does it with all of torch's threads
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = int(runtime.cudaHostRegister(self.tensor.data_ptr(), self.nbytes, _PORTABLE))
        if code == 0:
            return True
        _clear_last_error()
        log.warning(
            "pinning %d bytes of host memory failed (CUDA error %d); they stay pageable, copies will be slower. "
            "Raise the memory-lock limit (ulimit -l) or lower zinfer.max_pinned_memory.",
            self.nbytes,
            code,
        )
        return False


def _clear_last_error() -> None:
    """Take the failed call's code off the CUDA runtime, or torch's next launch would report it as its own."""
    try:
        torch.empty(1, device="cuda").zero_()
    except RuntimeError as error:
        log.debug("CUDA error taken off the runtime: %s", error)
