"""Memory for direct reads: exact, zeroed, private to the process, in huge pages where the system has them."""

import ctypes
import errno
import faulthandler
import logging
import mmap
import os
import signal
from pathlib import Path

import pytest

from zinfer.nvme import memory
from zinfer.nvme.memory import map_memory

MIB = 1 << 20
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def smaps_of(mapping: mmap.mmap) -> dict[str, str]:
    """What the kernel says of the mapping's area: /proc/self/smaps (proc(5))."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    fields: dict[str, str] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if "-" in name and not name.endswith(":"):
            first, last = (int(bound, 16) for bound in name.split("-"))
            inside = first <= address < last
        elif inside:
            fields[name.removesuffix(":")] = rest.strip()
    return fields


def test_it_is_zeroed_exact_and_writable() -> None:
    mapping = map_memory(5 * 4096)
    assert len(mapping) == 5 * 4096
    assert mapping[:] == bytes(5 * 4096)
    mapping[4096:4099] = b"abc"
    assert mapping[4096:4099] == b"abc"


def test_the_kernel_knows_it_as_private_not_forked_and_huge() -> None:
    mapping = map_memory(8 * MIB)
    mapping[:] = b"x" * len(mapping)
    flags = smaps_of(mapping)["VmFlags"].split()
    assert "sh" not in flags
    assert "dc" in flags  # do not copy area on fork
    if THP.exists():
        assert "hg" in flags
        if "[never]" not in THP.read_text():
            assert int(smaps_of(mapping)["AnonHugePages"].split()[0]) > 0


def test_a_forked_child_cannot_touch_it() -> None:
    mapping = map_memory(4096)
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        mapping[0] = 1
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGSEGV
    assert mapping[0] == 0


def test_a_kernel_without_huge_pages_is_said_once_and_the_memory_works(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class NoHugePages(mmap.mmap):
        def madvise(self, option: int, *args: int) -> None:
            if option == mmap.MADV_HUGEPAGE:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            super().madvise(option, *args)

    monkeypatch.setattr(memory.mmap, "mmap", NoHugePages)
    memory.warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        first, second = map_memory(4096), map_memory(4096)
    memory.warn_once.cache_clear()
    assert (len(first), second[:4]) == (4096, bytes(4))
    assert caplog.text.count("no huge pages for host memory (Invalid argument)") == 1
