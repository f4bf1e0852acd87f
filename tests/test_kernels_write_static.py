"""Writing to static places: the kernel beside the reference bit for bit, and the reference beside transformers."""

import pytest
import torch
from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from transformers.cache_utils import StaticLayer

from zinfer.kernels.write_static import write_static

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
POISON = 77.0


def write_static_ref(
    keys: torch.Tensor, values: torch.Tensor, length: torch.Tensor, new_keys: torch.Tensor, new_values: torch.Tensor
) -> None:
    tokens = new_keys.shape[2]
    place = torch.arange(tokens, device=length.device) + length
    keys.index_copy_(2, place, new_keys)
    values.index_copy_(2, place, new_values)
    length.add_(tokens)


class Places:
    """Static places, poisoned, some of which are taken."""

    def __init__(
        self, new_keys: torch.Tensor, new_values: torch.Tensor, places: int, taken: int, device: torch.device | str
    ) -> None:
        self.keys, self.values = (
            torch.full((*new.shape[:2], places, new.shape[3]), POISON, dtype=new.dtype, device=device)
            for new in (new_keys, new_values)
        )
        self.length = torch.tensor(taken, device=device)
        self.arrivals = torch.zeros((), dtype=torch.int32, device=device)

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        return self.keys, self.values, self.length, self.arrivals


def states(batch: int, heads: int, tokens: int, dim: int, dtype: torch.dtype, kind: str, device: str) -> torch.Tensor:
    """As modules give them: heads beside each other in a token, a part of a product of several, or as they lie."""
    if kind == "as they lie":
        return torch.randn(batch, heads, tokens, dim, device=device).to(dtype)
    members = 3 if kind == "a part" else 1
    made = torch.randn(batch, tokens, members * heads * dim, device=device).to(dtype)
    return made[..., -heads * dim :].view(batch, tokens, heads, dim).transpose(1, 2)


def written(new_keys: torch.Tensor, new_values: torch.Tensor, places: int, taken: int) -> tuple[Places, Places]:
    found, wanted = (Places(new_keys, new_values, places, taken, new_keys.device) for _ in range(2))
    write_static(*found.parts, new_keys, new_values)
    write_static_ref(*wanted.parts[:3], new_keys, new_values)
    return found, wanted


def assert_same(found: Places, wanted: Places) -> None:
    for mine, other in zip(found.parts, wanted.parts, strict=True):
        assert torch.equal(mine, other)


@given(
    batch=st.integers(1, 4),
    heads=st.integers(1, 5),
    tokens=st.integers(1, 40),
    head_dim=st.sampled_from([8, 64, 80, 112]),
    value_dim=st.sampled_from([8, 64, 80, 128]),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(["transposed", "a part", "as they lie"]),
    taken=st.integers(0, 20),
    spare=st.integers(0, 9),
)
@example(1, 25, 1, 64, 64, torch.float16, "a part", 9, 3)  # one program
@example(4, 5, 40, 112, 128, torch.float16, "transposed", 7, 0)  # 25 programs
@hypothesis_settings(
    hypothesis_settings.get_profile("kernels"), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_the_kernel_writes_what_the_reference_writes(
    kernel_device: str,
    batch: int,
    heads: int,
    tokens: int,
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    kind: str,
    taken: int,
    spare: int,
) -> None:
    new_keys = states(batch, heads, tokens, head_dim, dtype, kind, kernel_device)
    new_values = states(batch, heads, tokens, value_dim, dtype, kind, kernel_device)
    found, wanted = written(new_keys, new_values, taken + tokens + spare, taken)
    assert_same(found, wanted)
    assert found.length == taken + tokens
    assert (found.keys[:, :, :taken] == POISON).all()
    assert (found.values[:, :, taken + tokens :] == POISON).all()


def test_pass_after_pass(kernel_device: str) -> None:
    """A prompt of many programs, then a token at a time; the count of programs begins at zero each time."""
    torch.manual_seed(0)
    prompt = states(3, 4, 30, 64, torch.float16, "transposed", kernel_device)
    found, wanted = (Places(prompt, prompt, 40, 0, kernel_device) for _ in range(2))
    for new in (prompt, *(states(3, 4, 1, 64, torch.float16, "transposed", kernel_device) for _ in range(9))):
        write_static(*found.parts, new, -new)
        write_static_ref(*wanted.parts[:3], new, -new)
        assert_same(found, wanted)
    assert found.length == 39


def test_what_has_no_place_is_written_nowhere(kernel_device: str) -> None:
    new = states(2, 3, 5, 16, torch.float32, "transposed", kernel_device)
    places = Places(new, new, 8, 6, kernel_device)
    write_static(*places.parts, new, new)
    assert torch.equal(places.keys[:, :, 6:], new[:, :, :2])
    assert (places.keys[:, :, :6] == POISON).all(), "those of the next head"


def test_no_tokens(kernel_device: str) -> None:
    new = torch.empty(2, 3, 0, 16, device=kernel_device)
    found, wanted = written(new, new, 4, 2)
    assert_same(found, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_what_transformers_writes(kernel_device: str, dtype: torch.dtype) -> None:
    made = [[states(2, 3, tokens, dim, dtype, "a part", kernel_device) for dim in (24, 40)] for tokens in (7, 1, 3)]
    layer = StaticLayer(20)
    found = Places(*made[0], 20, 0, kernel_device)
    for part in (found.keys, found.values):
        part.zero_()
    for keys, values in made:
        layer.update(keys, values)
        write_static(*found.parts, keys, values)
        for mine, other in zip(found.parts, (layer.keys, layer.values, layer.cumulative_length), strict=False):
            assert torch.equal(mine, other)


@pytest.mark.gpu
def test_many_programs_at_once() -> None:
    """Thousands of programs, again and again: one that read a length already moved on would write elsewhere."""
    torch.manual_seed(0)
    new = states(8, 32, 500, 128, torch.float16, "transposed", "cuda")
    found, wanted = (Places(new, new, 2000, 0, "cuda") for _ in range(2))
    for _ in range(50):
        for each in (found, wanted):
            each.length.zero_()
            each.keys.fill_(POISON)
        for _ in range(4):
            write_static(*found.parts, new, new)
            write_static_ref(*wanted.parts[:3], new, new)
        assert_same(found, wanted)
