"""A weight that is away cannot be used by mistake, and says why."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from zinfer.engine.placeholder import PlaceholderParameter

USES: dict[str, Callable[[torch.Tensor], object]] = {
    "linear": lambda weight: F.linear(torch.ones(1, 4), weight),
    "matmul": lambda weight: torch.ones(1, 3) @ weight,
    "embedding": lambda weight: F.embedding(torch.tensor([0]), weight),
    "index": lambda weight: weight[0],
    "data": lambda weight: weight.data,
    "transpose": lambda weight: weight.T,
    "cpu": lambda weight: weight.cpu(),
    "sum": lambda weight: weight.sum(),
    "clone": lambda weight: weight.clone(),
    "source of a copy": lambda weight: torch.ones(3, 4).copy_(weight),
    "target of a copy": lambda weight: weight.copy_(torch.ones(3, 4)),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_every_use_is_an_error(use: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(RuntimeError, match="not on the device: a streamed weight is there only while its block runs"):
        use(PlaceholderParameter.like(torch.ones(3, 4)))


def test_shape_and_dtype_can_be_asked_for() -> None:
    weight = PlaceholderParameter.like(torch.ones(3, 4, dtype=torch.float16))
    assert weight.shape == (3, 4)
    assert weight.dtype == torch.float16
    assert weight.numel() == 12
    assert weight.is_meta
    assert not weight.requires_grad
    assert "size=(3, 4)" in repr(weight)


def test_a_module_lists_it_in_its_state() -> None:
    module = torch.nn.Linear(4, 3, bias=False)
    module.weight = PlaceholderParameter.like(module.weight)
    state = module.state_dict()
    assert list(state) == ["weight"]
    with pytest.raises(RuntimeError, match="not on the device"):
        state["weight"].sum()
