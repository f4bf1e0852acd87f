"""Operators that wait for the device are refused while a graph is recorded, each by its name, and no others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from zinfer.graphs.form import CannotCapture
from zinfer.graphs.no_sync import NoSyncMode

Compute = Callable[[torch.Tensor, torch.Tensor], Any]
"""Of numbers and of a mask on a device."""

MODES = pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
"""In the second, operators that consist of others come in one piece."""
ASKING: dict[str, tuple[str, Compute]] = {
    "a number": ("aten::_local_scalar_dense", lambda x, mask: x[0].item()),
    "a decision": ("aten::_local_scalar_dense", lambda x, mask: bool(mask.any())),
    "where": ("aten::nonzero", lambda x, mask: torch.where(mask)),
    "equality": ("aten::equal", lambda x, mask: torch.equal(x, x + 1)),
    "what a mask shows": ("aten::index.Tensor", lambda x, mask: x[mask]),
    "into a mask": ("aten::index_put_", lambda x, mask: x.index_put_((mask,), x[:2])),
    "a mask among others": ("aten::index.Tensor", lambda x, mask: x[None][torch.zeros_like(x[:1]).long(), mask]),
    "different ones": ("aten::_unique2", lambda x, mask: torch.unique(x)),
    "repeated": ("aten::repeat_interleave.Tensor", lambda x, mask: torch.repeat_interleave(mask.long())),
}
COPYING: dict[str, tuple[str, Compute]] = {
    "to the host": ("aten::_to_copy", lambda x, mask: x.cpu()),
    "to the host, as another dtype": ("aten::_to_copy", lambda x, mask: x.to("cpu", torch.float64)),
    "from the host": ("aten::_to_copy", lambda x, mask: torch.ones(4).to(x.device)),
    "from unpinned memory, not waited for": (
        "aten::_to_copy",
        lambda x, mask: torch.ones(4).to(x.device, non_blocking=True),
    ),
    "into the host's": ("aten::copy_", lambda x, mask: torch.ones(4).copy_(x)),
    "into unpinned memory, not waited for": ("aten::copy_", lambda x, mask: torch.ones(4).copy_(x, non_blocking=True)),
    "out of the host's": ("aten::copy_", lambda x, mask: x.copy_(torch.ones(4))),
    "places on the host": ("aten::index.Tensor", lambda x, mask: x[torch.zeros(2, dtype=torch.long)]),
    "a number of the host in some places": (
        "aten::index_put_",
        lambda x, mask: x.index_put_((torch.zeros_like(mask, dtype=torch.long),), torch.tensor(1.0)),
    ),
}
WAITLESS: dict[str, Compute] = {
    "a chain": lambda x, mask: torch.nn.functional.linear(x[None], x[None]).softmax(-1),
    "rows": lambda x, mask: x[torch.zeros_like(mask, dtype=torch.long)],
    "into rows": lambda x, mask: x.clone().index_put_((torch.zeros_like(mask, dtype=torch.long),), x[:1]),
    "filled": lambda x, mask: x.clone().index_put_((mask,), torch.tensor(1.0)),
    "chosen": lambda x, mask: torch.where(mask, x, 0.0),
    "as another dtype": lambda x, mask: x.to(torch.float64),
    "repeated as often as is said": lambda x, mask: torch.repeat_interleave(x, mask.long() + 1, output_size=6),
    "a number of the host": lambda x, mask: x * torch.ones(()),
}


def given(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(4.0, device=device), torch.tensor([True, False, True, False]).to(device)


@MODES
@pytest.mark.parametrize("kind", ASKING)
def test_what_asks_the_device_is_refused(kind: str, grad_mode: Any, device: str) -> None:
    name, compute = ASKING[kind]
    x, mask = given(device)
    with (
        grad_mode(),
        pytest.raises(CannotCapture, match=f"^{name} waits for the device$"),
        NoSyncMode(torch.device(device)),
    ):
        compute(x, mask)
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0], "it was computed"


@MODES
@pytest.mark.parametrize("kind", COPYING)
@pytest.mark.parametrize("apart", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_copies_between_host_and_device_are_refused(kind: str, grad_mode: Any, apart: str) -> None:
    name, compute = COPYING[kind]
    x, mask = given(apart)
    with (
        grad_mode(),
        pytest.raises(CannotCapture, match=f"^{name} waits for the device$"),
        NoSyncMode(torch.device(apart)),
    ):
        compute(x, mask)


@MODES
@pytest.mark.parametrize("kind", WAITLESS)
def test_others_compute_as_ever(kind: str, grad_mode: Any, device: str) -> None:
    x, mask = given(device)
    with grad_mode():
        wanted = WAITLESS[kind](x, mask)
        with NoSyncMode(torch.device(device)):
            found = WAITLESS[kind](x, mask)
    assert torch.equal(found, wanted)


@MODES
def test_what_lies_on_the_host_may_be_asked(grad_mode: Any) -> None:
    x, mask = given("cpu")
    with grad_mode(), NoSyncMode(torch.device("meta")):
        assert (float(x[1]), x[mask].tolist(), torch.equal(x, x)) == (1.0, [0.0, 2.0], True)


@pytest.mark.gpu
def test_pinned_memory_is_copied_without_waiting() -> None:
    pinned = torch.ones(4).pin_memory()
    with NoSyncMode(torch.device("cuda")):
        there = pinned.to("cuda", non_blocking=True)
        back = there.to("cpu", non_blocking=True)
        pinned.copy_(there + 1, non_blocking=True)
    torch.cuda.synchronize()
    assert (back.tolist(), pinned.tolist()) == ([1.0] * 4, [2.0] * 4)


@MODES
def test_another_way_after_a_refusal_is_no_way_out(grad_mode: Any) -> None:
    mode = NoSyncMode(torch.device("cpu"))

    def compute() -> None:
        with mode:
            try:
                torch.ones(1).item()
            except CannotCapture:
                torch.ones(1).to(torch.float64)

    for _ in range(2):
        with grad_mode(), pytest.raises(CannotCapture, match="_local_scalar_dense"):
            compute()
    with mode:
        torch.ones(1)
    with pytest.raises(ArithmeticError, match="its own"), mode:
        raise ArithmeticError("its own")
