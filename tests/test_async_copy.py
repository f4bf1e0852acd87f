"""Small things go to the device beside what it computes, and are there for what is launched after."""

import pytest
import torch

from zinfer.kernels.read_pinned import read_pinned
from zinfer.sampling import async_copy as delivery

NUM = 1000


def test_numbers_come_as_they_are(device: str) -> None:
    for begin in range(3):
        sent = delivery.send(list(range(begin, begin + NUM)), torch.int32, torch.device(device))
        assert sent.device.type == device
        assert sent.tolist() == list(range(begin, begin + NUM))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
@pytest.mark.parametrize("count", [0, 1, 1023, 3000])
def test_a_kernel_reads_what_is_in_host_memory(kernel_device: str, dtype: torch.dtype, count: int) -> None:
    numbers = torch.arange(count, dtype=dtype)[:, None].repeat(1, 3)
    host = numbers.pin_memory() if kernel_device == "cuda" else numbers
    assert torch.equal(read_pinned(host, torch.device(kernel_device)).cpu(), numbers)


@pytest.mark.gpu
def test_memory_is_not_used_again_before_it_is_read() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    found = []
    for begin in range(50):
        with torch.cuda.stream(delivery._sender(device).stream):
            torch.cuda._sleep(1_000_000)
        found.append(delivery.send(list(range(begin, begin + NUM)), torch.int32, device))
    assert [each.tolist() for each in found] == [list(range(begin, begin + NUM)) for begin in range(50)]


@pytest.mark.gpu
def test_a_slab_on_the_link_does_not_hold_numbers_up() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    slab = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    there, link = torch.empty(1 << 30, dtype=torch.uint8, device=device), torch.cuda.Stream(device)
    delivery.send([0], torch.int32, device)  # compiles
    torch.cuda.synchronize()
    with torch.cuda.stream(link):
        for _ in range(4):
            there.copy_(slab, non_blocking=True)
        copied = link.record_event()
    delivery.send(list(range(NUM)), torch.int32, device)
    torch.cuda.current_stream(device).synchronize()
    assert not copied.query()
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_what_is_launched_after_waits_for_a_copy_that_is_late() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    compute, own = torch.cuda.current_stream(device), delivery._sender(device).stream
    found = []
    for begin in range(50):
        with torch.cuda.stream(own):
            torch.cuda._sleep(1_000_000)
        sent = delivery.send(list(range(begin, begin + NUM)), torch.int32, device)
        found.append(sent + 1)
        del sent  # its memory may be given to the next one, not before the sum is taken
    assert torch.cuda.current_stream(device) == compute
    assert [each.tolist() for each in found] == [list(range(begin + 1, begin + 1 + NUM)) for begin in range(50)]
