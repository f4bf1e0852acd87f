"""Ranks on one GPU exchange tensors out of each other's memory: what they get is what a process alone computes."""

import pytest
import torch
from ranks_support import run_ranks

import zinfer.ranks.peer_communicator as tested
from zinfer.ranks.group import join_group
from zinfer.ranks.mesh import Mesh
from zinfer.ranks.model_ranks import ModelRanks
from zinfer.ranks.peer_communicator import PeerCommunicator

pytestmark = pytest.mark.gpu
SIZES = (1, 1000, 3 << 18, 5 << 20)  # within one piece of the buffer, read as a whole or by ranges, and in pieces


def values(rank: int, num: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(num, generator=torch.Generator().manual_seed(10 * rank + num % 97)).to(dtype)


def exchanged(rank: int, size: int) -> list[str]:
    """Every exchange, in small pieces too; returns what is wrong."""
    tested._BUFFER_BYTES = 8 << 20
    group = join_group("cuda")
    assert group is not None
    device = torch.device("cuda", torch.cuda.current_device())
    ranks = ModelRanks(group, device, Mesh(tensor=size))
    parts = ranks.communicator(("tensor",))
    assert isinstance(parts, PeerCommunicator)
    wrong = []
    for num in SIZES:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            own = [values(each, num, dtype).to(device) for each in range(size)]
            total = sum(each.float() for each in own)
            for _ in range(2):
                found = parts.all_reduce(own[rank].clone())
                if not torch.equal(found, total.to(dtype)):
                    wrong.append(f"sum of {num} {dtype}")
            if not torch.equal(parts.all_gather(own[rank]), torch.stack(own)):
                wrong.append(f"gather of {num} {dtype}")
        bytes_of = [values(each, 256 * num, torch.float32).to(torch.uint8).to(device) for each in range(size)]
        whole = torch.cat(bytes_of)
        for slab in (torch.zeros_like(whole), parts.allocate(len(whole))):
            slab.view(size, -1)[rank].copy_(bytes_of[rank])
            parts.gather(slab)
            if not torch.equal(slab, whole):
                wrong.append(f"slab of {len(whole)}")
        part = torch.zeros_like(bytes_of[rank])
        parts.scatter(part, whole if rank == size - 1 else None, size - 1)
        if not torch.equal(part, bytes_of[rank]):
            wrong.append(f"scatter of {len(whole)}")
    torch.cuda.synchronize()
    ranks.close()
    return wrong


@pytest.mark.parametrize("size", [2, 3])
def test_exchanges_give_what_one_process_computes(size: int) -> None:
    assert run_ranks(size, exchanged, size) == [[]] * size
