"""Products of experts: the grouped kernel beside float64, however tokens are spread, and in a graph."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Literal

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from kernel_cases import (
    DTYPES,
    FORMATS,
    FRAGMENTS,
    HALVES,
    MIXTRAL_8X7B,
    MXFP4,
    NVFP4,
    PUBLISHED,
    QWEN3_30B_A3B,
    TYPICAL_PUBLISHED,
    Mixture,
    fits_experts,
    grouped_allowed_error,
    random_choice,
    random_experts,
)
from kernel_tiles import grouped_candidates
from ptx_emulation import cut_into, emulated

from zinfer.kernels import grouped_linear as module
from zinfer.kernels.dequantize import dequantize
from zinfer.kernels.expert_routing import Groups, pair_order_kernel, pair_order_ref
from zinfer.kernels.fragment_linear import chosen_linear
from zinfer.kernels.grouped_linear import (
    ExpertWeights,
    can_group,
    decoded_linear,
    decodes,
    grouped_linear,
    grouped_linear_kernel,
    grouped_linear_ref,
    in_quarters,
)
from zinfer.kernels.grouped_tiles import (
    GroupedTiles,
    block_tokens_for,
    can_step,
    grouped_tiles_for,
    most_token_tiles,
    table_of,
    takes_words,
)
from zinfer.kernels.launching import INTERPRETED
from zinfer.kernels.quantized import QuantFormat, QuantizedMatrix
from zinfer.kernels.scaled_linear import can_scale, scaled_experts

GROUPED = [format for format in FORMATS if format.group_size != 5]
FORMS = (None, *GROUPED, *FRAGMENTS)
TYPICAL = (
    None,
    QuantFormat(8),
    QuantFormat(8, 128),
    QuantFormat(8, 128, symmetric=False),
    QuantFormat(8, is_float=True),
    QuantFormat(4, 128, in_fragments=True),
    QuantFormat(4, 64, symmetric=False),
)
SMALL = (Mixture(4, 2, 70, 192), Mixture(3, 1, 33, 35))
SMALL_FRAGMENTS = (Mixture(4, 2, 64, 256), Mixture(3, 1, 192, 512))
TILES = GroupedTiles(16, 64, 128, 4, 2)
IN_WORDS = replace(TILES, in_words=True)
WORDS = tuple(
    QuantFormat(8, size, symmetric=not is_asymmetric, is_float=is_float)
    for size in (None, 64)
    for is_asymmetric, is_float in ((False, False), (True, False), (False, True))
)


def assert_right(
    found: torch.Tensor,
    x: torch.Tensor,
    weight: ExpertWeights,
    groups: Groups,
    bias: torch.Tensor | None = None,
    rounds: bool = False,
) -> None:
    wanted = grouped_linear_ref(x.double(), weight, groups, bias)
    assert found.shape == wanted.shape
    assert found.dtype == x.dtype
    allowed = grouped_allowed_error(x, weight, groups, wanted, rounds)
    worst = ((found.double() - wanted).abs() / allowed).max().item()
    assert worst <= 1, f"{worst} times the allowed error"


def groups_of(counts: list[int], share: int, device: str) -> Groups:
    """So many pairs of each expert, in no order, ``share`` of a token beside each other."""
    experts = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    experts = experts[torch.randperm(len(experts))].view(-1, share)
    return Groups.of(experts.to(device), len(counts))


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize(
    ("format", "dtype"),
    [(format, dtype) for format in FORMS for dtype in (DTYPES if format in (*TYPICAL, *FRAGMENTS) else HALVES)],
    ids=str,
)
def test_every_form(kernel_device: str, format: QuantFormat | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shapes = SMALL_FRAGMENTS if format is not None and format.in_fragments else SMALL
    for mixture in filter(lambda mixture: fits_experts(format, mixture), shapes):
        weight = random_experts(format, mixture, dtype, kernel_device)
        groups = Groups.of(random_choice(mixture, 6, kernel_device), mixture.experts)
        bias = torch.randn(mixture.experts, mixture.rows, dtype=dtype, device=kernel_device)
        x = torch.randn(6, mixture.columns, dtype=dtype, device=kernel_device)
        assert_right(grouped_linear_kernel(x, weight, groups, bias, TILES), x, weight, groups, bias)


@pytest.mark.slow
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("format", FRAGMENTS, ids=str)
def test_few_pairs_of_fragments_each_read_their_matrix(
    kernel_device: str, format: QuantFormat, dtype: torch.dtype
) -> None:
    """A row of x for each token and one for each pair; experts that several chose, and the last of all."""
    torch.manual_seed(0)
    for mixture in (Mixture(4, 2, 192, 256), Mixture(3, 2, 128, 1024)):
        weight = random_experts(format, mixture, dtype, kernel_device)
        assert isinstance(weight, QuantizedMatrix)
        groups = Groups.of(torch.tensor([[1, 2], [mixture.experts - 1, 1]], device=kernel_device), mixture.experts)
        bias = torch.randn(mixture.experts, mixture.rows, dtype=dtype, device=kernel_device)
        for rows, programs in ((2, None), (2, 1), (4, 2)):
            x = torch.randn(rows, mixture.columns, dtype=dtype, device=kernel_device)
            with emulated(x, weight.codes, weight.scales) if INTERPRETED else nullcontext(), cut_into(programs):
                found = chosen_linear(x, weight, groups.chosen, mixture.rows, bias)
            assert_right(found, x, weight, groups, bias)
        with emulated(x, weight.codes, weight.scales) if INTERPRETED else nullcontext(), cut_into(programs):
            assert torch.equal(found, chosen_linear(x, weight, groups.chosen, mixture.rows, bias))


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("format", [format for format in PUBLISHED if format.outer is None], ids=str)
def test_published_formats(kernel_device: str, format: QuantFormat, dtype: torch.dtype) -> None:
    """Codes of e4m3 as bytes and as words, and small groups in bfloat16."""
    torch.manual_seed(0)
    for mixture in (Mixture(3, 2, 128, 320), Mixture(2, 1, 96, 192)):
        weight = random_experts(format, mixture, dtype, kernel_device)
        assert isinstance(weight, QuantizedMatrix)
        assert can_scale(weight) or can_step(weight) or (format.bits == 4 and dtype == torch.float16)
        if format.in_grid and mixture.rows % (format.group_rows or 1):
            continue
        groups = Groups.of(random_choice(mixture, 6, kernel_device), mixture.experts)
        bias = torch.randn(mixture.experts, mixture.rows, dtype=dtype, device=kernel_device)
        for lines in (6, groups.num_pairs):
            x = torch.randn(lines, mixture.columns, dtype=dtype, device=kernel_device)
            if can_scale(weight):
                assert_right(scaled_experts(x, weight, groups, bias), x, weight, groups, bias)
            if can_step(weight):
                for tiles in (TILES, IN_WORDS):
                    assert_right(grouped_linear_kernel(x, weight, groups, bias, tiles), x, weight, groups, bias)


@pytest.mark.parametrize("outer", ["times", "over"])
def test_experts_have_scales_of_the_second_level(kernel_device: str, outer: Literal["times", "over"]) -> None:
    torch.manual_seed(0)
    mixture = Mixture(4, 2, 80, 192)
    weight = random_experts(replace(NVFP4, outer=outer), mixture, torch.bfloat16, kernel_device)
    assert isinstance(weight, QuantizedMatrix)
    groups = Groups.of(random_choice(mixture, 7, kernel_device), mixture.experts)
    x = torch.randn(7, mixture.columns, dtype=torch.bfloat16, device=kernel_device)
    assert_right(scaled_experts(x, weight, groups), x, weight, groups)


@pytest.mark.sampled(5)
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("format", [*FORMATS, *FRAGMENTS[:1], *PUBLISHED], ids=str)
def test_experts_dequantized_a_few_at_a_time(kernel_device: str, format: QuantFormat, dtype: torch.dtype) -> None:
    """Experts without tokens, with one, and with several tiles of tokens; rows and columns that no tile divides."""
    torch.manual_seed(0)
    for mixture in (Mixture(5, 2, 96, 256), Mixture(4, 2, 128, 200)):
        if not fits_experts(format, mixture) or (not format.can_follow(mixture.rows) and format.outer is None):
            continue
        weight = random_experts(format, mixture, dtype, kernel_device)
        assert isinstance(weight, QuantizedMatrix)
        groups = groups_of([0, 37, 1, 0, 20][: mixture.experts], 2, kernel_device)
        bias = torch.randn(mixture.experts, mixture.rows, dtype=dtype, device=kernel_device)
        expert_bytes = mixture.rows * mixture.columns * dtype.itemsize
        for rows, max_bytes in ((groups.num_pairs // 2, 2 * expert_bytes), (groups.num_pairs, 1)):
            x = torch.randn(rows, mixture.columns, dtype=dtype, device=kernel_device)
            found = decoded_linear(x, weight, groups, bias, GroupedTiles(16, 64, 64, 4, 2), max_bytes)
            assert_right(found, x, weight, groups, bias, rounds=True)


def test_experts_with_many_tokens_are_dequantized_first() -> None:
    mixture = Mixture(8, 2, 64, 128)
    for format, dtype, mean, is_decoded in (
        (QuantFormat(8, 128), torch.bfloat16, 384, True),
        (QuantFormat(8, 128), torch.bfloat16, 383, False),
        (QuantFormat(8, 128), torch.float32, 999, False),
        (MXFP4, torch.bfloat16, 128, True),
        (MXFP4, torch.bfloat16, 127, False),
    ):
        weight = random_experts(format, mixture, dtype, "meta")
        assert isinstance(weight, QuantizedMatrix)
        assert decodes(weight, Groups.of(torch.zeros(mean * 8, dtype=torch.int64), 8)) is is_decoded


@pytest.mark.parametrize(
    ("mixture", "most"),
    [
        (Mixture(4, 2, 64, 256), 4),  # as many as experts
        (Mixture(384, 8, 7168, 256), 288),  # 56 tiles of rows for each, and 16,384 counters in all
    ],
    ids=str,
)
def test_which_pairs_each_read_their_matrix(monkeypatch: pytest.MonkeyPatch, mixture: Mixture, most: int) -> None:
    """Of fragments, where the kernel runs."""
    calls: list[str] = []
    for name in ("chosen_linear", "grouped_linear_kernel"):
        monkeypatch.setattr(module, name, lambda *_, name=name: calls.append(name))
    weight = random_experts(QuantFormat(4, 64, in_fragments=True), mixture, torch.float16, "meta")
    for can in (True, False):
        monkeypatch.setattr(module, "can_multiply", lambda _, can=can: can)
        for pairs in (most, most + mixture.chosen):
            groups = Groups.of(torch.zeros(pairs, dtype=torch.int64), mixture.experts)
            module.grouped_linear(torch.empty(pairs, mixture.columns, device="meta"), weight, groups)
    assert calls == ["chosen_linear"] + 3 * ["grouped_linear_kernel"]


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("format", WORDS, ids=str)
def test_codes_taken_as_words(kernel_device: str, format: QuantFormat, dtype: torch.dtype) -> None:
    """Columns that steps divide, those of a last step that is not full, a row for each token and one for each pair."""
    torch.manual_seed(0)
    for mixture in (Mixture(4, 2, 70, 192), Mixture(3, 1, 33, 68)):
        if not fits_experts(format, mixture):
            continue
        weight = random_experts(format, mixture, dtype, kernel_device)
        assert isinstance(weight, QuantizedMatrix)
        assert takes_words(weight, IN_WORDS)
        groups = Groups.of(random_choice(mixture, 6, kernel_device), mixture.experts)
        bias = torch.randn(mixture.experts, mixture.rows, dtype=dtype, device=kernel_device)
        for rows in (6, groups.num_pairs):
            x = torch.randn(rows, mixture.columns, dtype=dtype, device=kernel_device)
            assert_right(grouped_linear_kernel(x, weight, groups, bias, IN_WORDS), x, weight, groups, bias)


@pytest.mark.usefixtures("poisoned_empty")
def test_what_is_not_taken_as_words(kernel_device: str) -> None:
    """Rows of half a word, short groups, halves of bytes, x of 32 bits, and codes that begin within a word."""
    torch.manual_seed(0)
    mixture = Mixture(3, 2, 33, 96)
    cases = [
        (QuantFormat(8), 98, torch.float16, 0),
        (QuantFormat(8, 32), 96, torch.float16, 0),
        (QuantFormat(4), 96, torch.float16, 0),
        (QuantFormat(8), 96, torch.float32, 0),
        (QuantFormat(8), 96, torch.float16, 1),
    ]
    for format, columns, dtype, offset in cases:
        weight = random_experts(format, replace(mixture, columns=columns), dtype, kernel_device)
        assert isinstance(weight, QuantizedMatrix)
        held = torch.empty(weight.codes.numel() + offset, dtype=weight.codes.dtype, device=kernel_device)
        weight = replace(weight, codes=held[offset:].view(weight.codes.shape).copy_(weight.codes))
        assert not takes_words(weight, IN_WORDS)
        groups = Groups.of(random_choice(mixture, 5, kernel_device), mixture.experts)
        x = torch.randn(5, columns, dtype=dtype, device=kernel_device)
        assert_right(grouped_linear_kernel(x, weight, groups, tiles=IN_WORDS), x, weight, groups)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_columns_in_quarters(kernel_device: str, dtype: torch.dtype) -> None:
    for tokens, columns in ((0, 8), (1, 4), (3, 768), (7, 1028)):
        held = torch.randn(tokens * columns + 2, device=kernel_device).to(dtype)
        for begin in (0, 2):  # in the place of words of 64 bits, and not
            x = held[begin : begin + tokens * columns].view(tokens, columns)
            assert torch.equal(in_quarters(x), x.view(tokens, columns // 4, 4).permute(2, 0, 1))


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("format", [None, QuantFormat(8), QuantFormat(4), FRAGMENTS[1]], ids=str)
def test_a_row_for_each_pair_without_bias_and_in_the_tables_tiles(
    kernel_device: str, format: QuantFormat | None
) -> None:
    torch.manual_seed(0)
    mixture = SMALL_FRAGMENTS[1] if format in FRAGMENTS else SMALL[1]
    weight = random_experts(format, mixture, torch.float16, kernel_device)
    groups = Groups.of(random_choice(mixture, 5, kernel_device), mixture.experts)
    x = torch.randn(groups.num_pairs, mixture.columns, dtype=torch.float16, device=kernel_device)
    assert_right(grouped_linear_kernel(x, weight, groups), x, weight, groups)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matrices_that_lie_transposed(kernel_device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for mixture in SMALL:
        weight = random_experts(None, mixture, dtype, kernel_device)
        assert isinstance(weight, torch.Tensor)
        groups = Groups.of(random_choice(mixture, 6, kernel_device), mixture.experts)
        x = torch.randn(6, mixture.columns, dtype=dtype, device=kernel_device)
        turned = weight.transpose(1, 2).contiguous().transpose(1, 2)
        assert_right(grouped_linear_kernel(x, turned, groups, tiles=TILES), x, weight, groups)
        apart = torch.stack((weight, weight), dim=-1)[..., 0]
        assert_right(grouped_linear_kernel(x, apart, groups, tiles=TILES), x, weight, groups)


@given(
    format=st.sampled_from([None, QuantFormat(8), QuantFormat(8, 32), QuantFormat(4, 32, symmetric=False), *FRAGMENTS]),
    counts=st.lists(st.sampled_from([0, 0, 1, 2, 16, 17, 40]), min_size=1, max_size=5).filter(any),
    shares=st.booleans(),
    rows=st.integers(1, 70),
    groups_per_row=st.integers(1, 2),
    block_tokens=st.sampled_from([16, 32]),
    block_rows=st.sampled_from([32, 64]),
)
@hypothesis_settings(hypothesis_settings.get_profile("kernels"), suppress_health_check=[HealthCheck.too_slow])
def test_however_tokens_are_spread(
    format: QuantFormat | None,
    counts: list[int],
    shares: bool,
    rows: int,
    groups_per_row: int,
    block_tokens: int,
    block_rows: int,
) -> None:
    device = "cpu" if INTERPRETED else "cuda"
    in_fragments = format is not None and format.in_fragments
    columns = 256 * groups_per_row if in_fragments else 32 * groups_per_row
    mixture = Mixture(len(counts), 1, 64 * (1 + rows % 3) if in_fragments else rows, columns)
    weight = random_experts(format, mixture, torch.float16, device)
    share = 2 if shares and sum(counts) % 2 == 0 else 1
    groups = groups_of(counts, share, device)
    assert groups.ends.diff(prepend=groups.ends.new_zeros(1)).tolist() == counts
    x = torch.randn(sum(counts) // share, columns, dtype=torch.float16, device=device)
    tiles = replace(TILES, block_tokens=block_tokens, block_rows=block_rows)
    found = grouped_linear_kernel(x, weight, groups, tiles=tiles)
    assert_right(found, x, weight, groups)
    assert torch.equal(found, grouped_linear_kernel(x, weight, groups, tiles=tiles))


@given(counts=st.lists(st.integers(0, 300), min_size=1, max_size=40).filter(any), block=st.sampled_from([16, 64, 128]))
def test_there_are_programs_for_every_tile(counts: list[int], block: int) -> None:
    pairs = sum(counts)
    assert sum(-(-count // block) for count in counts) <= most_token_tiles(pairs, len(counts), block)


def test_most_token_tiles_can_be_filled() -> None:
    assert most_token_tiles(8, 128, 16) == 8
    assert most_token_tiles(16 + 2 + 16, 3, 16) == 3 + 31 // 16
    assert most_token_tiles(4096, 1, 128) == 1 + 4095 // 128


@pytest.mark.parametrize(
    "format", [None, QuantFormat(8), QuantFormat(8, 128), QuantFormat(4, 64, in_fragments=True)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tiles_are_of_an_experts_tokens(format: QuantFormat | None, dtype: torch.dtype) -> None:
    for mixture in (*QWEN3_30B_A3B, *MIXTRAL_8X7B):
        weight = random_experts(format, mixture, dtype, "meta")
        for tokens in (1, 16, 512, 4096, 100_000):
            pairs = tokens * mixture.chosen
            tiles = grouped_tiles_for(pairs, mixture.experts, mixture.rows, weight)
            mean = pairs / mixture.experts
            if dtype != torch.float32:
                assert tiles.block_tokens >= min(mean, 64 if format is not None and format.bits == 4 else 128)
                assert tiles.block_tokens < max(2 * mean, 17)
            assert tiles.block_rows >= 32


@pytest.mark.parametrize("format", [None, QuantFormat(8), QuantFormat(8, 128), QuantFormat(4)], ids=str)
def test_few_candidates_hold_the_tables_tiles(format: QuantFormat | None) -> None:
    mixture = QWEN3_30B_A3B[0]
    weight = random_experts(format, mixture, torch.bfloat16, "meta")
    for tokens in (16, 512, 1024, 4096):
        pairs = tokens * mixture.chosen
        tried = list(grouped_candidates(table_of(weight), block_tokens_for(pairs, mixture.experts)))
        assert len(set(tried)) == len(tried) <= 12
        assert grouped_tiles_for(pairs, mixture.experts, mixture.rows, weight) in tried


@pytest.mark.parametrize("format", [QuantFormat(8), QuantFormat(8, 128), QuantFormat(8, is_float=True)], ids=str)
def test_one_token_leaves_codes_as_bytes(format: QuantFormat) -> None:
    """Too few programs: rows are halved, and words are slower in so few. More tokens have enough."""
    for mixture, tokens, is_few in (
        (QWEN3_30B_A3B[0], 1, True),
        (QWEN3_30B_A3B[0], 4, False),
        (MIXTRAL_8X7B[0], 1, False),
    ):
        weight = random_experts(format, mixture, torch.bfloat16, "meta")
        tiles = grouped_tiles_for(tokens * mixture.chosen, mixture.experts, mixture.rows, weight)
        assert tiles.in_words is not is_few
        assert (tiles.block_rows == 32) is is_few


def test_groups_are_of_one_expert_each() -> None:
    groups = Groups.of(torch.tensor([[3, 0], [0, 3], [5, 0]]), 6)
    assert groups.order.tolist() == [1, 2, 5, 0, 3, 4]
    assert groups.ends.tolist() == [3, 3, 3, 5, 5, 6]
    assert groups.ends.dtype == torch.int32
    empty = Groups.of(torch.zeros(0, 2, dtype=torch.int64), 3)
    assert empty.ends.tolist() == [0, 0, 0]
    assert grouped_linear(torch.zeros(0, 8), torch.zeros(3, 5, 8), empty).shape == (0, 5)


@given(
    tokens=st.integers(0, 90),
    chosen=st.integers(1, 4),
    experts=st.sampled_from([1, 4, 8, 33, 128]),
    skew=st.sampled_from([1, 3, 40]),
)
@hypothesis_settings(hypothesis_settings.get_profile("kernels"), suppress_health_check=[HealthCheck.too_slow])
def test_few_pairs_are_put_in_order_by_a_kernel(tokens: int, chosen: int, experts: int, skew: int) -> None:
    device = "cpu" if INTERPRETED else "cuda"
    choice = torch.rand(tokens, chosen, device=device).pow(skew).mul(experts).long()
    for found, wanted in zip(pair_order_kernel(choice, experts), pair_order_ref(choice, experts), strict=True):
        assert torch.equal(found, wanted)
        assert found.dtype == wanted.dtype


@pytest.mark.gpu
def test_pairs_by_the_kernel_and_by_torch() -> None:
    for tokens in (1, 16, 1000, 1025, 4096):
        choice = random_choice(QWEN3_30B_A3B[0], tokens, "cuda")
        found, (order, ends) = Groups.of(choice, 128), pair_order_ref(choice.cpu(), 128)
        assert torch.equal(found.order.cpu(), order)
        assert torch.equal(found.ends.cpu(), ends)


@pytest.mark.parametrize("format", FORMS, ids=str)
def test_the_cpu_goes_expert_by_expert(format: QuantFormat | None) -> None:
    torch.manual_seed(0)
    mixture = SMALL_FRAGMENTS[0] if format is not None and format.in_fragments else SMALL[0]
    weight = random_experts(format, mixture, torch.float32, "cpu")
    groups = Groups.of(random_choice(mixture, 4, "cpu"), mixture.experts)
    x = torch.randn(4, mixture.columns)
    assert can_group(weight)
    assert_right(grouped_linear(x, weight, groups), x, weight, groups)


def test_experts_without_tokens_are_not_dequantized(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_experts(QuantFormat(8), Mixture(6, 2, 8, 32), torch.float32, "cpu")
    assert isinstance(weight, QuantizedMatrix)
    found: list[torch.Tensor] = []

    def noted(matrix: QuantizedMatrix) -> torch.Tensor:
        found.append(dequantize(matrix))
        return found[-1]

    monkeypatch.setattr(module, "dequantize", noted)
    grouped_linear(torch.randn(2, 32), weight, Groups.of(torch.tensor([[4, 0], [0, 4]]), 6))
    whole = dequantize(weight)
    assert len(found) == 2
    for matrix, expert in zip(found, (0, 4), strict=True):
        assert torch.equal(matrix, whole[8 * expert : 8 * expert + 8])


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("format", [*TYPICAL, *TYPICAL_PUBLISHED], ids=str)
@pytest.mark.parametrize(
    ("mixture", "dtype"),
    [
        (QWEN3_30B_A3B[1], torch.bfloat16),
        (MIXTRAL_8X7B[1], torch.float16),
        (replace(MIXTRAL_8X7B[0], rows=2048), torch.bfloat16),
    ],
    ids=str,
)
def test_large_products(format: QuantFormat | None, dtype: torch.dtype, mixture: Mixture) -> None:
    """The last numbers of tokens have experts of both models dequantized first."""
    torch.manual_seed(0)
    weight = random_experts(format, mixture, dtype, "cuda")
    assert can_group(weight) or (format in (MXFP4, NVFP4) and dtype == torch.float16)
    for tokens in (1, 40, 1024, 4096, 7000) if can_group(weight) else ():
        groups = Groups.of(random_choice(mixture, tokens, "cuda"), mixture.experts)
        x = torch.randn(tokens, mixture.columns, dtype=dtype, device="cuda")
        found = grouped_linear(x, weight, groups)
        is_decoded = isinstance(weight, QuantizedMatrix) and decodes(weight, groups)
        assert_right(found, x, weight, groups, rounds=is_decoded)
        assert torch.equal(found, grouped_linear(x, weight, groups))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [5, 20])  # fewer pairs than experts, and more
@pytest.mark.parametrize("format", TYPICAL, ids=str)
def test_a_graph_holds_it_whatever_is_chosen(format: QuantFormat | None, tokens: int) -> None:
    torch.manual_seed(0)
    mixture = QWEN3_30B_A3B[1]
    weight = random_experts(format, mixture, torch.float16, "cuda")
    chosen = random_choice(mixture, tokens, "cuda")
    x = torch.randn(tokens, mixture.columns, dtype=torch.float16, device="cuda")
    grouped_linear(x, weight, Groups.of(chosen, mixture.experts))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = grouped_linear(x, weight, Groups.of(chosen, mixture.experts))
    for choice in (random_choice(mixture, tokens, "cuda"), torch.full_like(chosen, 77)):
        chosen.copy_(choice)
        graph.replay()
        assert_right(found, x, weight, Groups.of(choice, mixture.experts))


@pytest.mark.gpu
def test_what_the_kernel_leaves_alone() -> None:
    mixture = Mixture(2, 1, 64, 320)
    for format in (QuantFormat(8, 5), QuantFormat(4, 20)):
        assert not can_group(random_experts(format, mixture, torch.float16, "cuda"))
    assert not can_group(torch.zeros(2, 3, 4, dtype=torch.float64, device="cuda"))
    matrix = random_experts(QuantFormat(8), mixture, torch.float16, "cuda")
    assert isinstance(matrix, QuantizedMatrix)
    assert can_group(matrix)
    assert not can_group(replace(matrix, column_scales=torch.ones(320, device="cuda")))
