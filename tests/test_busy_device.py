"""An engine that is made while the device still computes fills no memory that the compute still writes to."""

from pathlib import Path

import pytest
import torch
from engines import blocks_of, engine_for

MODEL = Path(__file__).resolve().parent.parent / "examples" / "demo" / "model"
IDS = torch.tensor([[1, 5, 9, 3, 12, 7, 4]])
BUSY_CYCLES = 4_000_000_000  # about two seconds: longer than making an engine takes on the host


@pytest.mark.gpu
@pytest.mark.parametrize("homes", ["disk", "host", "resident", "mixed"])
def test_memory_that_was_just_given_back(homes: str) -> None:
    """torch hands it out again at once, although kernels that write to it wait in the compute stream."""
    ids = IDS.cuda()  # now: a copy to the device waits for it
    with engine_for(MODEL, homes, 2, "cuda") as engine:
        expected = engine(input_ids=ids).logits.clone()
        plan = engine.plan
    sizes = [plan.slot_bytes] * plan.num_slots + [block.nbytes for block in blocks_of(MODEL)]
    leftovers = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
    torch.cuda._sleep(1)
    for leftover in leftovers:
        leftover.fill_(0)  # loads the kernel now: later, loading it would wait for the device
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    for leftover in leftovers:
        leftover.fill_(0x3F)
    filled = torch.cuda.Event()
    filled.record()
    del leftover, leftovers
    assert not filled.query(), "the device must be busy for the test to say anything"
    with engine_for(MODEL, homes, 2, "cuda") as engine:
        logits = engine(input_ids=ids).logits
        for _ in range(3):
            assert torch.equal(logits, expected)
            logits = engine(input_ids=ids).logits
