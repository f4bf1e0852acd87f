"""Quantized parameters as other tools store them, packed code by code after the tools' own description.

This module shares no code with the tested modules. Codes and zeros are unsigned integers, scales floats:
codes [rows, columns], zeros and scales [rows, groups].
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from zinfer.kernels.dequantize import dequantize_ref
from zinfer.kernels.quantized import QuantizedMatrix
from zinfer.weights.formats import Scheme, find_scheme

PARAMETER = "model.layers.0.mlp.up_proj.weight"
MODULE = PARAMETER.removesuffix(".weight")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Weights:
    """Random weights as codes. ``groups``: of each column, one after the other by default."""

    codes: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor
    groups: torch.Tensor | None = None

    @classmethod
    def random(
        cls,
        rows: int,
        columns: int,
        groups: int,
        bits: int,
        symmetric: bool,
        seed: int,
        dtype: torch.dtype = torch.float16,
    ) -> "Weights":
        generator = torch.Generator().manual_seed(seed)
        top = 2**bits
        codes = torch.randint(0, top, (rows, columns), generator=generator)
        zeros = torch.randint(0, top, (rows, groups), generator=generator)
        scales = (torch.rand(rows, groups, generator=generator) * 0.1 + 1e-3).to(dtype)
        return cls(codes, torch.full_like(zeros, top // 2) if symmetric else zeros, scales)

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """What they stand for (float64), the scales rounded to ``dtype`` first."""
        zeros, scales = (part.to(torch.float64)[:, self.group_index] for part in (self.zeros, self.scales.to(dtype)))
        return (self.codes.to(torch.float64) - zeros) * scales

    @property
    def group_index(self) -> torch.Tensor:
        """The group of each column, int32."""
        if self.groups is not None:
            return self.groups
        columns, groups = self.codes.shape[1], self.scales.shape[1]
        return torch.arange(columns, dtype=torch.int32) // (columns // groups)

    def scattered(self, seed: int) -> "Weights":
        """The same codes in groups that lie anywhere, as activation order leaves them."""
        order = torch.randperm(self.codes.shape[1], generator=torch.Generator().manual_seed(seed))
        return replace(self, groups=self.group_index[order])


def pack_words(codes: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Codes [n, count] as int32 words [n, ceil(count / codes a word)]; place j of a word, from its lowest bits, holds
    its code number order[j], by default j."""
    per_word = 32 // bits
    order = order or tuple(range(per_word))
    words = torch.zeros(codes.shape[0], -(-codes.shape[1] // per_word), dtype=torch.int64)
    for word in range(words.shape[1]):
        for place, number in enumerate(order):
            column = word * per_word + number
            if column < codes.shape[1]:
                words[:, word] |= codes[:, column].to(torch.int64) << bits * place
    return as_int32(words)


def as_int32(words: torch.Tensor) -> torch.Tensor:
    """Whole numbers modulo 2**32 as int32."""
    words = words % 2**32
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def gptq_parts(weights: Weights, bits: int, *, less_one: bool, index: bool = True) -> dict[str, torch.Tensor]:
    """GPTQModel 7.7: nn_modules/qlinear/__init__.py `pack_original`, and for the format gptq utils/model.py
    `convert_gptq_v2_to_v1_format_module`."""
    zeros = pack_words(weights.zeros.t(), bits)
    if less_one:
        zeros = as_int32(zeros.to(torch.int64) - {4: 0x11111111, 8: 0x01010101}[bits])
    parts = {
        "qweight": pack_words(weights.codes, bits).t().contiguous(),
        "qzeros": zeros,
        "scales": weights.scales.t().contiguous(),
    }
    return parts | ({"g_idx": weights.group_index} if index else {})


def awq_parts(weights: Weights) -> dict[str, torch.Tensor]:
    """AutoAWQ 0.2.9: awq/modules/linear/gemm.py `WQLinear_GEMM.from_linear`."""
    return {
        "qweight": pack_words(weights.codes.t(), 4, AWQ_ORDER),
        "qzeros": pack_words(weights.zeros.t(), 4, AWQ_ORDER),
        "scales": weights.scales.t().contiguous(),
    }


def packed_parts(weights: Weights, bits: int, *, symmetric: bool) -> dict[str, torch.Tensor]:
    """compressed-tensors 0.20: compressors/pack_quantized/base.py `PackedQuantizationCompressor.compress`, for scales
    per channel or group."""
    parts = {
        "weight_packed": pack_words(weights.codes, bits),
        "weight_scale": weights.scales,
        "weight_shape": torch.tensor(weights.codes.shape),
    }
    return parts if symmetric else parts | {"weight_zero_point": pack_words(weights.zeros.t(), bits).t().contiguous()}


def plain_parts(weights: Weights, bits: int, *, symmetric: bool) -> dict[str, torch.Tensor]:
    """compressed-tensors 0.20: compressors/naive_quantized/base.py `NaiveQuantizationCompressor.compress`."""
    middle = 2 ** (bits - 1)
    parts = {"weight": (weights.codes - middle).to(torch.int8), "weight_scale": weights.scales}
    return parts if symmetric else parts | {"weight_zero_point": (weights.zeros - middle).to(torch.int8)}


def scheme_of(method: str, **settings: object) -> Scheme:
    """The scheme of a config.json with this method and these settings."""
    scheme = find_scheme({"model_type": "llama", "quantization_config": {"quant_method": method, **settings}})
    assert scheme is not None
    return scheme


def packed_scheme(bits: int, *, format: str = "pack-quantized", **weights: object) -> Scheme:
    """The scheme of a compressed-tensors config with one group."""
    group = {"targets": ["Linear"], "weights": {"num_bits": bits, "type": "int", **weights}}
    return scheme_of("compressed-tensors", format=format, config_groups={"group_0": group}, ignore=["lm_head"])


def read(
    scheme: Scheme,
    parts: Mapping[str, torch.Tensor],
    dtype: torch.dtype = torch.float16,
    device: str = "cpu",
    *,
    arranged: bool = False,
) -> QuantizedMatrix:
    """A matrix out of the parts, its bytes poisoned before; the parts have the strides of tensors from a file.

    ``arranged``: in the order that products take.
    """
    names = {"model.embed_tokens.weight", "model.norm.weight", *(f"{MODULE}.{part}" for part in parts)}
    stored = scheme.stored(names)
    assert stored == {PARAMETER: {part: f"{MODULE}.{part}" for part in parts}}
    held = {part: Held(torch.empty(value.shape, dtype=value.dtype, device=device)) for part, value in parts.items()}
    for part, each in held.items():
        each.tensor.copy_(parts[part])
    made = scheme.matrix(PARAMETER, held)
    format = made.format.arranged(made.rows, made.columns) if arranged else made.format
    matrix = QuantizedMatrix.empty(format, made.rows, made.columns, dtype, device)
    for part in format.part_shapes(made.rows, made.columns):
        getattr(matrix, part).view(torch.uint8).fill_(0xA5)
    made.encoding.convert_into(matrix, {part: each.tensor for part, each in made.parts.items()})
    return matrix


@dataclass(frozen=True)
class Held:
    """A stored tensor in memory."""

    tensor: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def seen_as(self, dtype: torch.dtype, shape: tuple[int, ...]) -> "Held":
        return Held(self.tensor.view(dtype).view(shape))


def assert_reads(matrix: QuantizedMatrix, values: torch.Tensor) -> None:
    """The matrix holds just these values (float64): a product with a scale is rounded to float32 once, as they are."""
    assert torch.equal(dequantize_ref(matrix, torch.float32).cpu(), values.to(torch.float32))
