"""Products with matrices in the order of fragments: the kernel, its PTX emulated or on a GPU, beside float64."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import FRAGMENTS, HALVES, SMALL_FRAGMENTS, Shape, random_input, random_matrix
from ptx_emulation import cut_into, emulated
from test_kernels_quantized_linear import assert_right
from triton.runtime.errors import InterpreterError

from zinfer.kernels import fragment_linear as module
from zinfer.kernels import fragment_ptx
from zinfer.kernels import quantized_linear as dispatcher
from zinfer.kernels.dequantize import dequantize, dequantize_ref
from zinfer.kernels.fragment_linear import FragmentCut, fragment_linear
from zinfer.kernels.launching import INTERPRETED
from zinfer.kernels.quantized import FRAGMENT_COLUMNS, QuantFormat, QuantizedMatrix
from zinfer.kernels.quantized_linear import MOST_FRAGMENT_TOKENS, quantized_linear

GROUPS_OF_128 = QuantFormat(4, 128, in_fragments=True)


def product(
    x: torch.Tensor, matrix: QuantizedMatrix, bias: torch.Tensor | None = None, programs: int | None = None
) -> torch.Tensor:
    """By the kernel, whose inline PTX is emulated where it is interpreted."""
    flat = x.reshape(-1, matrix.columns).contiguous()
    with emulated(flat, matrix.codes, matrix.scales) if INTERPRETED else nullcontext(), cut_into(programs):
        return fragment_linear(flat, matrix, bias).view(*x.shape[:-1], matrix.rows)


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("format", FRAGMENTS, ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", SMALL_FRAGMENTS, ids=str)
def test_products(kernel_device: str, format: QuantFormat, dtype: torch.dtype, shape: Shape) -> None:
    torch.manual_seed(0)
    matrix = random_matrix(format, shape.rows, shape.columns, dtype, kernel_device)
    x, bias = random_input(shape, dtype, kernel_device)
    cut = FragmentCut.of(-(-shape.tokens // 16), shape.rows, shape.columns, 132)
    most = cut.num_tiles * cut.turns
    for programs in sorted({1, 2, most} & set(range(1, most + 1))):  # whole tiles, pieces of several, one turn each
        assert_right(product(x, matrix, bias, programs), x, matrix, bias)


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("tokens", range(1, 18))
def test_every_number_of_tokens(kernel_device: str, tokens: int) -> None:
    torch.manual_seed(tokens)
    matrix = random_matrix(GROUPS_OF_128, 64, 512, torch.float16, kernel_device)
    x, _ = random_input(Shape(tokens, 64, 512), torch.float16, kernel_device)
    found = product(x, matrix)
    assert_right(found, x, matrix, None)
    assert torch.equal(found, product(x, matrix))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_byte(kernel_device: str, dtype: torch.dtype) -> None:
    matrix = QuantizedMatrix.empty(GROUPS_OF_128, 64, 256, dtype, kernel_device)
    bytes_of = torch.arange(matrix.codes.numel(), device=kernel_device)
    matrix.codes.copy_((bytes_of + bytes_of // 256).view_as(matrix.codes))  # each byte at many a place of a fragment
    matrix.scales.fill_(1)
    unit = torch.eye(256, dtype=dtype, device=kernel_device)
    assert matrix.codes.unique().numel() == 256
    assert torch.equal(product(unit, matrix).T, dequantize_ref(matrix))


@pytest.mark.skipif(not INTERPRETED, reason="an interpreter counts barriers")
@pytest.mark.parametrize("programs", [1, 3])
def test_each_turn_has_a_barrier_of_those_that_share_x(programs: int) -> None:
    matrix = random_matrix(GROUPS_OF_128, 128, 1536, torch.float16, "cpu")
    x, _ = random_input(Shape(16, 128, 1536), torch.float16, "cpu")
    with emulated(x, matrix.codes, matrix.scales) as machine, cut_into(programs):
        fragment_linear(x, matrix)
    assert (
        machine.num_barriers == 2 * 3 + 2 * programs
    )  # two ranges of columns, of three turns each, which meet in the end


@pytest.mark.skipif(not INTERPRETED, reason="an interpreter knows who may read")
@pytest.mark.parametrize(
    ("asm", "text", "message"),
    [
        ("meet_asm", "cp.async.wait_all; mov.b32 $0, $1;", "read before it is known|overwritten while"),
        ("meet_asm", "bar.sync 1, 256; mov.b32 $0, $1;", "read before it is known|on its way"),
        ("meet_all_asm", "mov.b32 $0, $1;", "read before it is known"),
        ("copy_asm", "cp.async.cg.shared.global [$1], [$2], 16; mov.b32 $0, $1;", "outside"),
    ],
)
def test_the_emulation_sees_what_is_missing(asm: str, text: str, message: str) -> None:
    matrix = random_matrix(GROUPS_OF_128, 128, 1024, torch.float16, "cpu")
    x, _ = random_input(Shape(5, 128, 1024), torch.float16, "cpu")
    with (
        mock.patch.object(fragment_ptx, asm, return_value=text),
        emulated(x, matrix.codes, matrix.scales),
        pytest.raises(InterpreterError, match=message),
    ):
        fragment_linear(x, matrix)


def test_leading_dimensions_strides_and_no_tokens(kernel_device: str) -> None:
    torch.manual_seed(0)
    matrix = random_matrix(GROUPS_OF_128, 64, 256, torch.float16, kernel_device)
    x = torch.randn(2, 3, 257, dtype=torch.float16, device=kernel_device)[..., 1:]
    assert_right(product(x, matrix).view(6, 64), x.reshape(6, 256), matrix, None)
    assert fragment_linear(x[:, :0], matrix).shape == (2, 0, 64)
    shifted = torch.randn(2 * 256 + 1, dtype=torch.float16, device=kernel_device)[1:].view(2, 256)
    assert shifted.data_ptr() % 16 == 2
    if kernel_device == "cuda":  # the emulation would have to know the copy
        assert_right(fragment_linear(shifted, matrix), shifted, matrix, None)


@given(
    tokens=st.integers(1, 200),
    row_blocks=st.integers(1, 1000),
    units=st.integers(1, 200),
    processors=st.integers(1, 200),
)
def test_a_cut_fills_the_device_and_not_more(tokens: int, row_blocks: int, units: int, processors: int) -> None:
    rows, columns = 64 * row_blocks, FRAGMENT_COLUMNS * units
    cut = FragmentCut.of(-(-tokens // 16), rows, columns, processors)
    tile_rows = 32 * cut.row_warps
    assert cut.num_tiles * tile_rows == rows
    assert cut.turns * cut.k_warps * FRAGMENT_COLUMNS == columns
    total = cut.num_tiles * cut.turns
    assert 1 <= cut.programs <= total
    warps = cut.row_warps * cut.k_warps * -(-tokens // 16)
    assert cut.programs == 1 or cut.programs * warps <= 16 * processors
    ends = [program * total // cut.programs for program in range(cut.programs + 1)]
    for tile in range(0, cut.num_tiles, max(1, cut.num_tiles // 20)):  # who shares a tile, as the kernel finds it
        first, last = tile * cut.turns, (tile + 1) * cut.turns - 1
        found = [((turn + 1) * cut.programs - 1) // total for turn in (first, last)]
        assert all(ends[each] <= turn < ends[each + 1] for each, turn in zip(found, (first, last), strict=True))


def test_the_shapes_that_were_measured() -> None:
    assert FragmentCut.of(1, 28672, 7168, 132) == FragmentCut(4, 2, 14, 224, 264)
    assert FragmentCut.of(1, 7168, 28672, 132) == FragmentCut(4, 2, 56, 56, 264)


def test_which_way_a_product_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU the matrix is dequantized, by rule; with one, few tokens are not."""
    matrix = random_matrix(GROUPS_OF_128, 64, 256, torch.float16, "cpu")
    calls: list[int] = []
    monkeypatch.setattr(dispatcher, "fragment_linear", lambda x, *_: calls.append(len(x)))
    for can, expected in ((False, []), (True, [1, 16, MOST_FRAGMENT_TOKENS])):
        monkeypatch.setattr(dispatcher, "can_multiply", lambda _, can=can: can)
        for tokens in (1, 16, MOST_FRAGMENT_TOKENS, MOST_FRAGMENT_TOKENS + 1):
            quantized_linear(random_input(Shape(tokens, 64, 256), torch.float16, "cpu")[0], matrix)
        assert calls == expected


def test_the_cpu_does_not_multiply_by_the_kernel() -> None:
    assert not module.can_multiply(random_matrix(GROUPS_OF_128, 64, 256, torch.float16, "cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("format", FRAGMENTS, ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    "shape", [(28672, 7168), (7168, 28672), (4096, 4096), (1024, 4096), (11008, 4096), (4096, 11008)], ids=str
)
def test_large_products(format: QuantFormat, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrix = random_matrix(format, *shape, dtype, "cuda")
    for tokens in (1, 8, 9, 16, 17, 70):
        x, bias = random_input(Shape(tokens, *shape), dtype, "cuda")
        found = [fragment_linear(x, matrix, bias) for _ in range(5)]
        assert_right(found[0], x, matrix, bias)
        assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.gpu
def test_products_in_parts_on_several_streams() -> None:
    """Each stream has counters of its own."""
    matrix = random_matrix(GROUPS_OF_128, 7168, 28672, torch.float16, "cuda")
    x, _ = random_input(Shape(16, 7168, 28672), torch.float16, "cuda")
    wanted = fragment_linear(x, matrix)
    torch.cuda.synchronize()
    found: list[torch.Tensor] = []
    for _ in range(8):
        for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
            with torch.cuda.stream(stream):
                found.append(fragment_linear(x, matrix))
    torch.cuda.synchronize()
    assert all(torch.equal(each, wanted) for each in found)


@pytest.mark.gpu
def test_products_follow_each_other_in_a_graph() -> None:
    """Dependent launches: each product takes what the one before gives, while its own first codes are loaded."""
    up = random_matrix(GROUPS_OF_128, 28672, 7168, torch.float16, "cuda")
    down = random_matrix(GROUPS_OF_128, 7168, 28672, torch.float16, "cuda")
    for matrix in (up, down):
        matrix.scales.mul_(1 / 64)  # or eight products overflow, and NaN equals nothing
    x, _ = random_input(Shape(16, 7168, 7168), torch.float16, "cuda")

    def chain() -> torch.Tensor:
        hidden = x
        for _ in range(4):
            hidden = fragment_linear(fragment_linear(hidden, up), down)
        return hidden

    wanted = x
    for _ in range(4):
        middle = fragment_linear(wanted, up)
        torch.cuda.synchronize()
        wanted = fragment_linear(middle, down)
        torch.cuda.synchronize()
    assert wanted.isfinite().all()
    assert wanted.std() > 0
    assert torch.equal(chain(), wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain()
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, wanted)


@pytest.mark.gpu
def test_dequantizing_a_large_matrix() -> None:
    matrix = random_matrix(GROUPS_OF_128, 7168, 28672, torch.bfloat16, "cuda")
    assert torch.equal(dequantize(matrix), dequantize_ref(matrix))
