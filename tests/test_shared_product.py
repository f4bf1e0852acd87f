"""One product for several layers: what they share, for how long, and when each computes for itself."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from product_counting import counted_products
from torch import nn

from zinfer.inject.fusion_groups import FusionGroup, find_packs
from zinfer.inject.injection import Injection
from zinfer.inject.shared_product import joined


class Own(nn.Module):
    """Three layers, called as a test says; weights lie as one matrix."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(width, width, bias=False) for _ in range(3))
        slab = torch.randn(3 * width, width)
        for index, layer in enumerate((self.first, self.second, self.third)):
            layer.weight = nn.Parameter(slab[index * width : (index + 1) * width], requires_grad=False)

    def forward(self, x: torch.Tensor, how: str = "same") -> list[torch.Tensor]:
        found = [self.first(x)]
        if how == "changed":
            x += 1
        elif how == "other":
            x = x.clone()
        elif how == "fails":
            raise OSError("no memory")
        found += [self.second(x), self.third(x)]
        return [*found, self.third(x)] if how == "again" else found


PACK = FusionGroup("own", ("first", "second", "third"), ("weight",))


def shared(module: Own) -> nn.ModuleDict:
    parts = nn.ModuleDict({"own": module})
    assert find_packs(parts) == [PACK]
    Injection(parts, [PACK])
    return parts


@pytest.mark.parametrize(
    ("how", "num_products"), [("same", [24]), ("changed", [24, 8, 8]), ("other", [24, 8, 8]), ("again", [24, 8])]
)
def test_layers_share_only_what_is_the_same(how: str, num_products: list[int]) -> None:
    module, x = Own(), torch.randn(2, 3, 8)
    wanted = module(x.clone(), how)
    shared(module)
    with torch.no_grad(), counted_products() as rows:
        found = module(x.clone(), how)
    assert rows == num_products
    torch.testing.assert_close(found, wanted)


def test_a_part_that_nobody_takes_is_forgotten() -> None:
    module, x = Own(), torch.randn(3, 8)
    shared(module)
    with pytest.raises(OSError, match="no memory"):
        module(x, "fails")
    gone = weakref.ref(x)
    with torch.no_grad(), counted_products() as rows:
        torch.testing.assert_close(module.second(x), x @ module.second.weight.T)
        module.first(x)
    assert rows == [8, 8], "outside the module's forward each layer is for itself"
    del x
    gc.collect()
    assert gone() is None


def test_inference_tensors_are_multiplied_apart() -> None:
    module = Own()
    shared(module)
    with torch.inference_mode(), counted_products() as rows:
        x = torch.randn(3, 8)
        torch.testing.assert_close(module(x)[2], x @ module.third.weight.T)
    assert rows == [8, 8, 8]


@torch.no_grad()
def test_weights_are_those_that_lie_there_at_each_call() -> None:
    module, other, x = Own(), Own(), torch.randn(3, 8)
    shared(module)
    wanted = module(x), other(x)
    with counted_products() as rows:
        for _ in range(2):  # as a layer's weights come in one slot or another
            torch.testing.assert_close(module(x), wanted[0])
            mine = [layer.weight for layer in module.children()]
            for layer, another in zip(module.children(), other.children(), strict=True):
                layer.weight = another.weight
            torch.testing.assert_close(module(x), wanted[1])
            for layer, weight in zip(module.children(), mine, strict=True):
                layer.weight = weight
    assert rows == [24] * 4
    module.second.weight = nn.Parameter(torch.randn(8, 8), requires_grad=False)
    with counted_products() as rows:
        torch.testing.assert_close(module(x)[1], x @ module.second.weight.T)
    assert rows == [8, 8, 8]


def test_gradients_are_those_of_each_weight() -> None:
    module, x = Own(), torch.randn(3, 8)
    shared(module)
    module.second.weight.requires_grad_()
    module(x)[1].sum().backward()
    torch.testing.assert_close(module.second.weight.grad, x.sum(0).expand(8, 8))


@torch.no_grad()
def test_copies_compute_with_their_own_weights() -> None:
    parts, x = shared(Own()), torch.randn(3, 8)
    parts["own"](x)
    for other in (copy.deepcopy(parts), pickle.loads(pickle.dumps(parts))):
        for parameter in other.parameters():
            parameter.mul_(3)
        torch.testing.assert_close(other["own"](x), [3 * each for each in parts["own"](x)])
        assert other["own"].first is not parts["own"].first


def test_joined_tensors_lie_one_behind_the_other() -> None:
    slab = torch.arange(48.0)
    parts = [nn.Parameter(slab[begin : begin + 12].view(3, 4), requires_grad=False) for begin in (0, 12, 24, 36)]
    one = joined(parts[1:3])
    assert one is not None
    assert one.tolist() == slab[12:36].view(6, 4).tolist()
    assert joined([parts[0], parts[2]]) is None
    assert joined([parts[1], parts[0]]) is None
    assert joined([parts[0], nn.Parameter(slab[12:24].view(4, 3), requires_grad=False)]) is None
    assert joined([parts[0], nn.Parameter(slab.half()[12:24].view(3, 4), requires_grad=False)]) is None
