"""Sums that a kernel computes while a graph is recorded, and those that are torch's as before."""

import pytest
import torch

from zinfer.graphs import capture
from zinfer.graphs.capture import DependentLaunchAdds
from zinfer.kernels.add import added_kernel


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of what the kernel has added."""
    found: list[tuple[int, ...]] = []

    def counting(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found.append(tuple(x.shape))
        return added_kernel(x, y)

    monkeypatch.setattr(capture, "added_kernel", counting)
    return found


def test_sums_of_layers(kernel_device: str, counts: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(16, 16).half().to(kernel_device)
    x = torch.randn(1, 2, 16).half().to(kernel_device)
    with torch.no_grad():
        wanted = x + layer(x)
        with DependentLaunchAdds():
            found = x + layer(x)
        x + wanted
    assert counts == [(1, 2, 16)]
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3)


def test_other_sums_are_torchs(kernel_device: str, counts: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 4, device=kernel_device).half()
    wide, many = x.float(), torch.ones(1 << 17, dtype=torch.float16, device=kernel_device)
    others = [
        lambda: x + 1,
        lambda: x + wide,
        lambda: wide + wide,
        lambda: x + x[0],
        lambda: x + x.t(),
        lambda: torch.add(x, x, alpha=2),
        lambda: many + many,
        lambda: x.long() + x.long(),
    ]
    for other in others:
        wanted = other()
        with DependentLaunchAdds():
            assert torch.equal(other(), wanted)
    y = x.clone()
    with DependentLaunchAdds():
        y += x
    assert torch.equal(y, x + x)
    assert counts == []
