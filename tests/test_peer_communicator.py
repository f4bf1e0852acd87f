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
NUM_REPLAYS = 20


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


def replayed_sums(rank: int, size: int) -> list[str]:
    """Sums of one kernel and sums by ranges in one graph, replayed with new values; returns what is wrong."""
    group = join_group("cuda")
    assert group is not None
    device = torch.device("cuda", torch.cuda.current_device())
    ranks = ModelRanks(group, device, Mesh(tensor=size))
    parts = ranks.communicator(("tensor",))
    nums = (1 << 18, 3 << 18, 3 << 20, 1 << 10, 7 << 18)
    places = [torch.zeros(num, dtype=torch.float16, device=device) for num in nums]
    for place in places:
        parts.all_reduce(place * 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        sums = [parts.all_reduce(each * 2) for _ in range(3) for each in places]
    draws = [torch.Generator(device).manual_seed(each) for each in range(size)]
    wrong = []
    for turn in range(NUM_REPLAYS):
        own = [[torch.randn(num, generator=draw, device=device).half() for num in nums] for draw in draws]
        for place, each in zip(places, own[rank], strict=True):
            place.copy_(each)
        if turn % size == rank:
            torch.cuda._sleep(2_000_000)  # about a millisecond, which the others wait for
        graph.replay()
        totals = [sum((2 * each).float() for each in ranked).half() for ranked in zip(*own, strict=True)]
        for at, found in enumerate(sums):
            if not torch.equal(found, totals[at % len(nums)]):
                wrong.append(f"sum of {nums[at % len(nums)]} in replay {turn}")
    torch.cuda.synchronize()
    del graph
    ranks.close()
    return wrong


@pytest.mark.parametrize("size", [2, 3])
def test_replayed_sums_are_those_of_one_process(size: int) -> None:
    assert run_ranks(size, replayed_sums, size) == [[]] * size


@pytest.mark.parametrize("size", [2, 3])
def test_exchanges_give_what_one_process_computes(size: int) -> None:
    assert run_ranks(size, exchanged, size) == [[]] * size
