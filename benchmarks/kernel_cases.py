"""Matrices, activations and tolerances that the kernels' tests and benchmarks share."""

from dataclasses import dataclass, replace
from typing import Final

import torch

from zinfer.kernels.dequantize import dequantize_ref
from zinfer.kernels.expert_routing import Groups
from zinfer.kernels.grouped_linear import ExpertWeights, grouped_linear_ref
from zinfer.kernels.quantized import FRAGMENT_GROUPS, QuantFormat, QuantizedMatrix

FORMATS: Final = (
    QuantFormat(8),
    QuantFormat(8, symmetric=False),
    QuantFormat(8, group_size=32),
    QuantFormat(8, group_size=32, symmetric=False),
    QuantFormat(8, group_size=5),
    QuantFormat(8, is_float=True),
    QuantFormat(8, group_size=32, is_float=True),
    QuantFormat(4),
    QuantFormat(4, symmetric=False),
    QuantFormat(4, group_size=32),
    QuantFormat(4, group_size=32, symmetric=False),
    QuantFormat(4, group_size=96),
    QuantFormat(4, group_size=5),
    QuantFormat(4, group_size=5, symmetric=False),
)
FRAGMENTS: Final = tuple(QuantFormat(4, size, in_fragments=True) for size in FRAGMENT_GROUPS)
TYPICAL: Final = (
    QuantFormat(8),
    QuantFormat(4, group_size=128),
    QuantFormat(4, group_size=128, in_fragments=True),
    QuantFormat(4, group_size=128, symmetric=False),
    QuantFormat(8, is_float=True),
)
BLOCKS_FP8: Final = QuantFormat(8, 128, is_float=True, group_rows=128, in_grid=True, scale_dtype="float32")
MXFP8: Final = QuantFormat(8, 32, is_float=True, scale_dtype="float8_e8m0fnu")
MXFP4: Final = QuantFormat(4, 32, is_float=True, scale_dtype="float8_e8m0fnu")
NVFP4: Final = QuantFormat(4, 16, is_float=True, scale_dtype="float8_e4m3fn", outer="times")
PUBLISHED: Final = (
    BLOCKS_FP8,
    replace(BLOCKS_FP8, scale_dtype="bfloat16"),
    replace(BLOCKS_FP8, scale_dtype="float8_e8m0fnu"),
    replace(BLOCKS_FP8, group_size=64, group_rows=48),
    replace(BLOCKS_FP8, group_size=None, group_rows=None),
    replace(BLOCKS_FP8, group_size=None, group_rows=1, scale_dtype="float16"),
    QuantFormat(8, is_float=True, scale_dtype="float32"),
    MXFP8,
    MXFP4,
    replace(MXFP4, in_grid=True),
    NVFP4,
    replace(NVFP4, outer="over", outer_rows=8),
)
"""As files store them: with scales of their own types, once a block, and of two levels."""
TYPICAL_PUBLISHED: Final = (BLOCKS_FP8, MXFP8, MXFP4, NVFP4)
DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32)
HALVES: Final = (torch.float16, torch.bfloat16)

_TYPICAL_SCALE: Final = 0.02  # of a weight's size in a transformer of a few thousand columns


@dataclass(frozen=True)
class Shape:
    """Of a product: x [tokens, columns], a matrix [rows, columns]."""

    tokens: int
    rows: int
    columns: int


SMALL: Final = (Shape(1, 7, 160), Shape(3, 33, 35), Shape(17, 130, 960))
"""Fast enough for an interpreter; nothing is a multiple of a tile, and a row's bytes are not of 16."""

SMALL_FRAGMENTS: Final = (Shape(1, 64, 256), Shape(16, 128, 1536), Shape(9, 192, 768), Shape(20, 64, 512))
"""As few, of whole fragments: with warps that share columns and without, with two and with four that share x."""

LARGE: Final = (Shape(1, 28672, 7168), Shape(16, 7168, 28672), Shape(33, 1000, 4352))
"""A feed-forward block of a model of width 7168, and what no tile divides; for a GPU."""


@dataclass(frozen=True)
class Mixture:
    """Of a product of experts: x [tokens, columns], ``chosen`` of the experts' matrices [rows, columns] for each."""

    experts: int
    chosen: int
    rows: int
    columns: int


QWEN3_30B_A3B: Final = (Mixture(128, 8, 1536, 2048), Mixture(128, 8, 2048, 768))
"""Gate and up in one, and down; of fragments."""
DEEPSEEK_V3: Final = (Mixture(256, 8, 4096, 7168), Mixture(256, 8, 7168, 2048))
GPT_OSS_120B: Final = (Mixture(128, 4, 5760, 2880), Mixture(128, 4, 2880, 2880))
MIXTRAL_8X7B: Final = (Mixture(8, 2, 28672, 4096), Mixture(8, 2, 4096, 14336))


def fits(format: QuantFormat, shape: Shape) -> bool:
    """Whether a matrix of the shape can be stored in the format."""
    try:
        format.check_shape(shape.rows, shape.columns)
    except ValueError:
        return False
    return True


LARGE_CASES: Final = tuple((format, shape) for format in TYPICAL for shape in LARGE if fits(format, shape))
"""Each typical format with the large shapes that it can store."""


def fits_experts(format: QuantFormat | None, mixture: Mixture) -> bool:
    """Whether each expert's matrix can be stored in the format; None is in full."""
    return format is None or fits(format, Shape(1, mixture.rows, mixture.columns))


def random_matrix(
    format: QuantFormat, rows: int, columns: int, dtype: torch.dtype, device: torch.device | str
) -> QuantizedMatrix:
    """Random codes and scales, made on the device; codes also in the unused half of an odd row's last byte."""
    matrix = QuantizedMatrix.empty(format, rows, columns, dtype, device)
    if matrix.codes.dtype == torch.float8_e4m3fn:
        matrix.codes.copy_(torch.randn(matrix.codes.shape, device=device).mul_(100).clamp_(-448, 448))
    else:
        first = -127 if matrix.codes.dtype == torch.int8 else 0
        matrix.codes.random_(first, 128 if matrix.codes.dtype == torch.int8 else 256)
    largest = 100 if format.is_float and format.bits == 8 else max(format.code_range)
    scales = torch.empty(matrix.scales.shape, device=device).uniform_(0.5, 1.5).mul_(2 * _TYPICAL_SCALE / largest)
    if matrix.outer_scales is not None:  # scales of the first level are about 100
        outer = matrix.outer_scales.uniform_(0.005, 0.015)
        scales.mul_(100), outer.copy_(outer if format.outer == "times" else 1 / outer)
    matrix.scales.copy_(scales)
    if matrix.zeros is not None:
        matrix.zeros.random_(0, 16 if format.bits == 4 else 256)
    return matrix


def random_input(shape: Shape, dtype: torch.dtype, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """x [tokens, columns] and a bias [rows]."""
    x = torch.randn(shape.tokens, shape.columns, dtype=dtype, device=device)
    return x, torch.randn(shape.rows, dtype=dtype, device=device)


def allowed_error(x: torch.Tensor, matrix: QuantizedMatrix, wanted: torch.Tensor, rounds: bool) -> torch.Tensor:
    """How far each element of a product of x [tokens, columns] may be from ``wanted`` [tokens, rows], in float64.

    One place of the result's dtype, sums as tensor cores take them, which cut places off, and, where the elements of
    the matrix were rounded first (``rounds``), half a place of each.
    """
    place = torch.finfo(wanted.dtype).eps
    magnitudes = x.double().abs() @ dequantize_ref(matrix, torch.float64).abs().T
    return place * wanted.double().abs() + magnitudes * (2**-18 + (place / 2 if rounds else 0)) + 1e-7


def quantized_linear_ref(x: torch.Tensor, matrix: QuantizedMatrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`quantized_linear` with elements and sums in float64, rounded once."""
    product = x.double() @ dequantize_ref(matrix, torch.float64).T
    return (product if bias is None else product + bias.double()).to(x.dtype)


def random_experts(
    format: QuantFormat | None, mixture: Mixture, dtype: torch.dtype, device: torch.device | str
) -> ExpertWeights:
    """Of experts in full [experts, rows, columns], or as `random_matrix` of all rows."""
    if format is not None:
        if format.outer is not None:
            format = replace(format, outer_rows=mixture.rows)
        return random_matrix(format, mixture.experts * mixture.rows, mixture.columns, dtype, device)
    shape = mixture.experts, mixture.rows, mixture.columns
    return torch.empty(shape, dtype=dtype, device=device).normal_(std=_TYPICAL_SCALE)


def random_choice(mixture: Mixture, tokens: int, device: torch.device | str) -> torch.Tensor:
    """Different experts for each token, [tokens, chosen]."""
    return torch.rand(tokens, mixture.experts, device=device).topk(mixture.chosen).indices


def grouped_allowed_error(
    x: torch.Tensor, weight: ExpertWeights, groups: Groups, wanted: torch.Tensor, rounds: bool = False
) -> torch.Tensor:
    """As `allowed_error` with ``wanted`` [pairs, rows]."""
    matrix = weight if isinstance(weight, torch.Tensor) else dequantize_ref(weight, torch.float64)
    values = matrix.double().abs().reshape(groups.num_experts, -1, x.shape[1])
    magnitudes = grouped_linear_ref(x.double().abs(), values, groups)
    place = torch.finfo(x.dtype).eps
    return place * wanted.double().abs() + magnitudes * (2**-18 + (place / 2 if rounds else 0)) + 1e-7
