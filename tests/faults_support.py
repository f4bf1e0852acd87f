"""Shared by tests of faults: reads, copies and files that fail on demand, and checks that failures arrive in time."""

import errno
import gc
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Final

import psutil
import pytest
import torch
from engine_support import PROMPT
from threads import settled_threads

import zinfer
from zinfer.nvme.page_cache import CachedPages
from zinfer.offload.stream import CopyStream, open_stream

NO_HANG_S: Final = 20
PROMPT_FAILURE_S: Final = 5  # one is the promise; the rest is for a loaded machine

Preadv = Callable[[int, Sequence[memoryview], int], int]
ReadEffect = Callable[[Preadv, int, Sequence[memoryview], int], int]


class Death(BaseException):
    """Ends whatever thread it strikes, as SystemExit would."""


@dataclass
class Fault:
    """Something that fails while it is ``armed``, ``num_good`` times excepted; ``struck_at_s`` is when it first did."""

    armed: bool = True
    num_good: int = 0
    struck_at_s: float | None = field(default=None, init=False)

    def strikes(self) -> bool:
        """Whether the caller is to fail now."""
        if self.armed and self.num_good:
            self.num_good -= 1
            return False
        if self.armed and self.struck_at_s is None:
            self.struck_at_s = time.perf_counter()
        return self.armed


def failure_of(run: Callable[[], object], fault: Fault | None = None, label: str = "") -> BaseException:
    """What ``run`` fails with, on a thread of its own: it neither hangs nor succeeds, nor fails late.

    The time runs from the fault's first strike, or from the call if there was none.
    """
    found: list[BaseException | None] = []
    begin_s = time.perf_counter()

    def call() -> None:
        try:
            run()
        except BaseException as error:
            found.append(error.with_traceback(None))  # which would keep the failed engine's memory
        else:
            found.append(None)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(NO_HANG_S)
    assert found, f"no answer for {NO_HANG_S} s: it hangs"
    since_s = begin_s if fault is None or fault.struck_at_s is None else fault.struck_at_s
    elapsed_s = time.perf_counter() - since_s
    assert found[0] is not None, "nothing failed"
    print(f"{label or 'the failure'} reached the caller after {elapsed_s * 1e3:.1f} ms: {found[0]!r}")
    assert elapsed_s < PROMPT_FAILURE_S
    return found[0]


def read_error(real: Preadv, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def read_nothing(real: Preadv, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    return 0


def read_half_a_page(real: Preadv, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    return min(2048, real(fd, buffers, offset))


def die(real: Preadv, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    raise Death


@contextmanager
def failing_reads(effect: ReadEffect, fault: Fault) -> Iterator[None]:
    """While the fault is armed every read ends as ``effect`` says."""
    real = os.preadv

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int, *flags: int) -> int:
        return effect(real, fd, buffers, offset) if fault.strikes() else real(fd, buffers, offset, *flags)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "preadv", preadv)
        patched.setattr(CachedPages, "hold", lambda *_: False)  # all of it from the disk
        yield


def failing_stream(device: torch.device, method: str, error: BaseException, fault: Fault) -> CopyStream:
    """The device's own copy stream, whose ``method`` fails while the fault strikes."""
    stream = open_stream(device)
    real = getattr(stream, method)

    def fail(*args: object) -> object:
        if fault.strikes():
            raise error
        return real(*args)

    setattr(stream, method, fail)
    return stream


def own_descriptors() -> list[str]:
    """What this process has open; not what a device's driver opens for itself, when it likes."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that lists the folder
            found.append(os.readlink(link))
    return [name for name in found if "nvidia" not in name and not name.startswith("anon_inode")]


@dataclass(frozen=True)
class Holdings:
    """What this process holds: threads, descriptors and, where there is one, bytes of the device."""

    threads: int
    descriptors: int
    device_bytes: int

    @classmethod
    def now(cls) -> "Holdings":
        device_bytes = 0
        if torch.cuda.is_available():
            gc.collect()
            torch._C._cuda_clearCublasWorkspaces()  # a thread's first product of matrices takes one, for good
            device_bytes = torch.cuda.memory_allocated()
        return cls(settled_threads(), len(own_descriptors()), device_bytes)

    def __le__(self, before: "Holdings") -> bool:
        """Whether no more of anything is held; a thread of an earlier test may have ended meanwhile."""
        return all(now <= then for now, then in zip(astuple(self), astuple(before), strict=True))


def resident_bytes() -> int:
    """Memory of this process that lies in RAM."""
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def logits_of(engine: zinfer.InferenceEngine) -> torch.Tensor:
    """Of one pass over the prompt, [1, tokens, vocabulary]."""
    logits: torch.Tensor = engine(input_ids=PROMPT).logits
    return logits


@contextmanager
def files_away(folder: Path) -> Iterator[None]:
    """The folder's weights are gone for a while; then the very same files are back."""
    elsewhere = folder.with_name(folder.name + "-away")
    elsewhere.mkdir()
    shards = sorted(folder.glob("*.safetensors"))
    for shard in shards:
        shutil.move(shard, elsewhere / shard.name)
    try:
        yield
    finally:
        for shard in shards:
            shutil.move(elsewhere / shard.name, shard)
        elsewhere.rmdir()
