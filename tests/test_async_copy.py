"""Small things go to the device beside what it computes, and are there for what is launched after."""

import pytest
import torch

from zinfer.sampling import async_copy as delivery

NUM = 1000


def test_numbers_come_as_they_are(device: str) -> None:
    for begin in range(3):
        sent = delivery.send(list(range(begin, begin + NUM)), torch.int32, torch.device(device))
        assert sent.device.type == device
        assert sent.tolist() == list(range(begin, begin + NUM))


@pytest.mark.gpu
def test_what_is_launched_after_waits_for_a_copy_that_is_late() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    compute, own = torch.cuda.current_stream(device), delivery._stream(device)
    found = []
    for begin in range(50):
        with torch.cuda.stream(own):
            torch.cuda._sleep(1_000_000)
        sent = delivery.send(list(range(begin, begin + NUM)), torch.int32, device)
        found.append(sent + 1)
        del sent  # its memory may be given to the next one, not before the sum is taken
    assert torch.cuda.current_stream(device) == compute
    assert [each.tolist() for each in found] == [list(range(begin + 1, begin + 1 + NUM)) for begin in range(50)]
