"""A copy towards the device, cut where the copy engine may turn to others, moves every byte to its place."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zinfer.offload import stream
from zinfer.offload.stream import CudaStream

YIELD_BYTES = 3000


@given(shape=st.lists(st.integers(0, 40), max_size=3), dtype=st.sampled_from([torch.uint8, torch.float16]))
def test_pieces_make_up_the_tensor_and_are_small(shape: list[int], dtype: torch.dtype) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).to(dtype).view(shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "_YIELD_BYTES", YIELD_BYTES)
        pieces = list(stream._pieces(tensor))
    assert torch.equal(torch.cat([piece.reshape(-1) for piece in pieces]), tensor.reshape(-1))
    row_bytes = tensor.nbytes // shape[0] if shape and shape[0] else 0
    assert max(piece.nbytes for piece in pieces) <= max(YIELD_BYTES, row_bytes) or not shape


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(), (0,), (1,), (2999,), (3000,), (3001,), (100_003,), (7, 1500), (7, 5000)])
def test_copies_in_pieces_are_exact(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_YIELD_BYTES", YIELD_BYTES)
    source = torch.randint(0, 256, shape, dtype=torch.uint8).pin_memory()
    target = torch.full(shape, 7, dtype=torch.uint8, device="cuda")
    copies = CudaStream(target.device)
    # The stream sleeps first: what waits for `mark` finds the bytes only if each piece is before it.
    with torch.cuda.stream(copies._stream):
        torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
    copies.copy(target, source)
    copies.join(copies.mark())
    assert torch.equal(target.clone().cpu(), source)


@pytest.mark.gpu
def test_the_copy_engine_is_yielded_by_bytes_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_YIELD_BYTES", YIELD_BYTES)
    copies = CudaStream(torch.device("cuda", 0))
    waits: list[object] = []
    wait_stream = copies._idle_stream.wait_stream
    monkeypatch.setattr(
        copies._idle_stream, "wait_stream", lambda other: (waits.append(other), wait_stream(other)), raising=False
    )
    target, source = torch.empty(10_000, dtype=torch.uint8, device="cuda"), torch.ones(10_000, dtype=torch.uint8)
    for size, wanted in ((1000, 0), (1000, 0), (1000, 1), (999, 1), (10_000, 4)):
        copies.copy(target[:size], source[:size].pin_memory())
        assert len(waits) == wanted
