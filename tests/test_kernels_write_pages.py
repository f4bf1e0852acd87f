"""Writing of pages: the kernel beside the reference bit for bit, and the reference beside what codes may lose."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from zinfer.kernels.kv_pages import KV_CODES, KVPages, read_pages_ref, write_pages_ref
from zinfer.kernels.launching import INTERPRETED
from zinfer.kernels.write_pages import write_pages, write_pages_kernel

CODES = (torch.int8, torch.float8_e4m3fn)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes; Triton's interpreter drops the sign of a code that is rounded to zero."""
    found = tensor.contiguous().view(torch.uint8)
    return found.where(found != 0x80, 0) if tensor.dtype == torch.float8_e4m3fn else found


def poisoned(pages: KVPages) -> KVPages:
    for part in pages.parts():
        part.view(torch.uint8).fill_(0x7F)
    return pages


def both_written(
    keys: torch.Tensor, values: torch.Tensor, page_size: int, dtype: torch.dtype, *, values_in_keys: bool = False
) -> tuple[KVPages, KVPages, torch.Tensor]:
    """Pages by the kernel and by the reference, among them places that nothing is written to; where tokens went."""
    tokens, kv_heads, head_dim = keys.shape
    num_pages = tokens // page_size + 2
    places = torch.randperm(num_pages * page_size)[:tokens].to(keys.device)
    place = (num_pages, page_size, kv_heads, head_dim, values.shape[2])
    made = [poisoned(KVPages.empty(*place, dtype, keys.device, values_in_keys=values_in_keys)) for _ in range(2)]
    write_pages_kernel(made[0], keys, values, places)
    write_pages_ref(made[1], keys, values, places)
    return made[0], made[1], places


@given(
    tokens=st.integers(1, 40),
    kv_heads=st.integers(1, 5),
    head_dim=st.sampled_from([8, 64, 80, 112, 192]),
    value_dim=st.sampled_from([8, 64, 80, 128]),
    page_size=st.sampled_from([1, 16, 64]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    codes=st.sampled_from([None, *CODES]),
    seed=st.integers(0, 1 << 20),
)
@example(7, 5, 192, 8, 1, torch.float16, torch.float8_e4m3fn, 427)
@hypothesis_settings(hypothesis_settings.get_profile("kernels"))
def test_the_kernel_writes_what_the_reference_writes(
    tokens: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    page_size: int,
    dtype: torch.dtype,
    codes: torch.dtype | None,
    seed: int,
) -> None:
    device = "cpu" if INTERPRETED else "cuda"
    torch.manual_seed(seed)
    # As attention modules give them: [heads, tokens, dim], transposed.
    keys = torch.randn(kv_heads, tokens, head_dim, device=device).to(dtype).transpose(0, 1)
    values = torch.randn(kv_heads, tokens, 2 * value_dim, device=device).to(dtype).transpose(0, 1)[..., ::2]
    keys[tokens // 2, kv_heads // 2] = 0
    found, wanted, _ = both_written(keys, values, page_size, codes or dtype)
    for mine, other in zip(found.parts(), wanted.parts(), strict=True):
        assert torch.equal(bits(mine), bits(other))


@pytest.mark.parametrize("dtype", [torch.float16, *CODES], ids=str)
def test_values_that_are_the_first_columns_of_keys_are_written_once(kernel_device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    keys = torch.randn(50, 1, 96, dtype=torch.float16, device=kernel_device) * 7
    found, wanted, places = both_written(keys, keys[..., :64], 16, dtype, values_in_keys=True)
    assert [part.shape[-1] for part in found.parts()] == ([96, 16] if dtype in CODES else [96])
    for mine, other in zip(found.parts(), wanted.parts(), strict=True):
        assert torch.equal(bits(mine), bits(other))
    table = torch.arange(found.keys.shape[0], device=kernel_device)
    all_keys, all_values = read_pages_ref(found, table)
    assert torch.equal(all_values[places], all_keys[places][..., :64])
    alone, _, same_places = both_written(keys, keys[..., :64], 16, dtype)
    assert torch.equal(all_keys[places], read_pages_ref(alone, table)[0][same_places])


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_codes_are_off_by_half_a_step(kernel_device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    keys = torch.randn(50, 3, 64, dtype=torch.float16, device=kernel_device) * 7
    keys[7, 1] = 0
    found, _, places = both_written(keys, keys, 16, dtype)
    numbers, _ = read_pages_ref(found, torch.arange(found.keys.shape[0], device=kernel_device))
    largest = keys.float().abs().amax(-1, keepdim=True)
    step = largest / KV_CODES[dtype]
    if dtype != torch.int8:  # three places behind the point, and below 2**-6 steps of 2**-9
        step = torch.maximum(keys.float().abs() / 8, step / 512)
    assert ((numbers[places] - keys.float()).abs() <= step / 2 + largest * 1e-6).all()
    assert (numbers[places[7], 1] == 0).all()
    assert (numbers[places].abs().amax(-1) - largest.squeeze(-1)).abs().max() <= largest.max() * 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_numbers_are_kept(kernel_device: str, dtype: torch.dtype) -> None:
    keys = torch.randn(70, 2, 96, device=kernel_device).to(dtype)
    values = torch.randn(70, 2, 32, device=kernel_device).to(dtype)
    found, _, places = both_written(keys, values, 16, dtype)
    assert torch.equal(found.keys.flatten(0, 1)[places], keys)
    assert torch.equal(found.values.flatten(0, 1)[places], values)


def test_no_tokens_and_the_cpu() -> None:
    pages, other = (poisoned(KVPages.empty(2, 16, 2, 8, 8, torch.int8, "cpu")) for _ in range(2))
    nothing = torch.empty(0, 2, 8)
    write_pages_kernel(pages, nothing, nothing, torch.empty(0, dtype=torch.int64))
    assert all(torch.equal(bits(mine), bits(left)) for mine, left in zip(pages.parts(), other.parts(), strict=True))
    keys = torch.randn(3, 2, 8)
    write_pages(pages, keys, keys, torch.tensor([31, 0, 5]))
    write_pages_ref(other, keys, keys, torch.tensor([31, 0, 5]))
    assert all(torch.equal(bits(mine), bits(left)) for mine, left in zip(pages.parts(), other.parts(), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, *CODES], ids=str)
def test_many_tokens(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    keys = torch.randn(8, 20000, 128, dtype=torch.float16, device="cuda").transpose(0, 1)
    found, wanted, _ = both_written(keys, keys, 64, dtype)
    assert all(torch.equal(bits(mine), bits(left)) for mine, left in zip(found.parts(), wanted.parts(), strict=True))
