"""Torch's grouped product between gathering and putting back: beside float64, and where it is taken."""

import pytest
import torch

import zinfer.kernels.grouped_linear
from zinfer.kernels.cases import (
    MIXTRAL_8X7B,
    QWEN3_30B_A3B,
    Mixture,
    grouped_allowed_error,
    random_choice,
    random_experts,
)
from zinfer.kernels.grouped_linear import grouped_linear, grouped_linear_ref
from zinfer.kernels.grouped_torch import LEAST_PAIRS_PER_EXPERT, grouped_linear_torch, has_kernel, is_torchs
from zinfer.kernels.groups import Groups
from zinfer.kernels.quantized import QuantFormat

MIXTURE = Mixture(5, 2, 24, 40)
MANY = LEAST_PAIRS_PER_EXPERT


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that lie anywhere count as a GPU's of compute capability 9.0."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "chosen",
    [
        torch.tensor([[4, 1], [1, 0], [4, 0], [0, 1], [1, 4], [0, 4], [1, 0]]),  # two have none
        torch.full((9, 1), 3),  # one has all
        torch.tensor([[0, 1, 2, 3, 4]]),
        torch.arange(5).repeat_interleave(torch.tensor([17, 1, 0, 8, 5]))[torch.randperm(31)].view(31, 1),
    ],
    ids=["few", "one", "each", "uneven"],
)
def test_pairs_are_gathered_and_put_back(chosen: torch.Tensor, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("torch multiplies float32 expert by expert there")
    weight = random_experts(None, MIXTURE, dtype, device)
    assert isinstance(weight, torch.Tensor)
    groups = Groups.of(chosen.to(device), MIXTURE.experts)
    bias = torch.randn(MIXTURE.experts, MIXTURE.rows, dtype=dtype, device=device)
    for rows in {len(chosen), groups.num_pairs}:
        x = torch.randn(rows, MIXTURE.columns, dtype=dtype, device=device)
        for lying in (weight, weight.transpose(1, 2).contiguous().transpose(1, 2)):
            wanted = grouped_linear_ref(x.double(), weight, groups)
            allowed = grouped_allowed_error(x, weight, groups, wanted)
            found = grouped_linear_torch(x, lying, groups)
            assert (found.shape, found.dtype) == (wanted.shape, dtype)
            assert bool(((found.double() - wanted).abs() <= allowed).all())
            biased = grouped_linear_ref(x.double(), weight, groups, bias)
            allowed += torch.finfo(dtype).eps * biased.abs()  # sums are rounded before and after
            assert bool(((grouped_linear_torch(x, lying, groups, bias).double() - biased).abs() <= allowed).all())


@pytest.mark.usefixtures("hopper")
def test_it_is_taken_for_large_matrices_and_many_pairs() -> None:
    models = QWEN3_30B_A3B[0], MIXTRAL_8X7B[0]
    weights = [
        torch.empty(each.experts, each.rows, each.columns, dtype=torch.bfloat16, device="meta") for each in models
    ]
    assert is_torchs(weights[1], groups_of(MANY * 8, 8))
    assert not is_torchs(weights[1], groups_of(MANY * 8 - 1, 8))
    assert not is_torchs(weights[0], groups_of(4096 * 8, 128))


@pytest.mark.usefixtures("hopper")
def test_weights_that_it_does_not_take_as_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.zeros(3, 16, 24, dtype=torch.bfloat16)
    assert has_kernel(weight)
    assert has_kernel(weight.transpose(1, 2))
    for other in (
        weight.half(),
        weight.float(),
        torch.zeros(3, 16, 20, dtype=torch.bfloat16),
        torch.zeros(3, 12, 16, dtype=torch.bfloat16),
        torch.zeros(3, 16, 25, dtype=torch.bfloat16)[..., :24],
        torch.zeros(3, 16, 48, dtype=torch.bfloat16)[..., ::2],
        torch.zeros(3 * 16 * 24 + 1, dtype=torch.bfloat16)[1:].view(3, 16, 24),
        torch.zeros(1024, 8, 8, dtype=torch.bfloat16),
    ):
        assert not has_kernel(other)
    for capability, takes in {(8, 0): False, (8, 9): False, (9, 0): True, (10, 0): True, (12, 0): False}.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert has_kernel(weight) == takes


@pytest.mark.gpu
def test_a_graph_holds_it_whatever_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    mixture = Mixture(4, 2, 2048, 2048)
    weight = random_experts(None, mixture, torch.bfloat16, "cuda")
    tokens = MANY * mixture.experts // mixture.chosen + 3
    chosen = random_choice(mixture, tokens, "cuda")
    x = torch.randn(tokens, mixture.columns, dtype=torch.bfloat16, device="cuda")
    taken: list[int] = []
    monkeypatch.setattr(
        zinfer.kernels.grouped_linear,
        "grouped_linear_torch",
        lambda *args: taken.append(args[2].num_pairs) or grouped_linear_torch(*args),
    )
    grouped_linear(x, weight, Groups.of(chosen, mixture.experts))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = grouped_linear(x, weight, Groups.of(chosen, mixture.experts))
    assert len(taken) == 2
    for choice in (random_choice(mixture, tokens, "cuda"), torch.full_like(chosen, 3)):
        chosen.copy_(choice)
        graph.replay()
        groups = Groups.of(choice, mixture.experts)
        wanted = grouped_linear_ref(x.double(), weight, groups)
        assert bool(((found.double() - wanted).abs() <= grouped_allowed_error(x, weight, groups, wanted)).all())
    quantized = random_experts(QuantFormat(8), mixture, torch.bfloat16, "cuda")
    grouped_linear(x, quantized, Groups.of(chosen, mixture.experts))
    assert len(taken) == 2


def groups_of(pairs: int, experts: int) -> Groups:
    """So many pairs, of whichever experts."""
    return Groups(torch.zeros(pairs, dtype=torch.int64, device="meta"), torch.zeros(experts, dtype=torch.int32))
