"""A copy that several threads share moves every byte to its place, and no other."""

from contextlib import closing

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zinfer.nvme.pool import Pool
from zinfer.offload import stream
from zinfer.offload.stream import HostStream

LEAST_SHARED_BYTES = 5000


@given(nbytes=st.integers(0, 100_000), num_copiers=st.integers(1, 5), offset=st.integers(0, 100))
def test_shared_copies_are_exact(nbytes: int, num_copiers: int, offset: int) -> None:
    source = torch.randint(0, 256, (offset + nbytes,), dtype=torch.uint8)[offset:]
    target = torch.full((offset + nbytes + 1,), 7, dtype=torch.uint8)
    with pytest.MonkeyPatch.context() as patch, closing(Pool(num_copiers, "copier")) as copiers:
        patch.setattr(stream, "_LEAST_SHARED_BYTES", LEAST_SHARED_BYTES)
        HostStream(copiers).copy(target[offset:-1], source)
    assert torch.equal(target[offset:-1], source)
    assert (target[:offset] == 7).all()
    assert target[-1] == 7


def test_large_copies_are_shared_and_small_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_LEAST_SHARED_BYTES", LEAST_SHARED_BYTES)
    with closing(Pool(2, "copier")) as copiers:
        submitted: list[int] = []
        submit = copiers.submit
        monkeypatch.setattr(copiers, "submit", lambda call: (submitted.append(call.args[2]), submit(call))[1])
        for nbytes in (LEAST_SHARED_BYTES - 1, 3 * LEAST_SHARED_BYTES):
            HostStream(copiers).copy(torch.empty(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8))
        assert submitted == [8192, 3 * LEAST_SHARED_BYTES - 8192]
