"""FP8 checkpoints, `fp8` and `fbgemm_fp8`: e4m3 floats with a scale for each block, row or tensor.

For a linear layer of ``rows`` outputs and ``columns`` inputs (transformers 5.23, integrations/finegrained_fp8.py:
`FP8Linear`, `_dequantize_fp8_weight`; integrations/fbgemm_fp8.py: `FbgemmFp8Linear`):

weight: float8_e4m3fn [rows, columns];
weight_scale_inv: [ceil(rows / block rows), ceil(columns / block columns)], of which the last blocks may be cut; or one
    scale, or [rows, 1]. fp32, bf16, fp16, or powers of two (e8m0). A value is weight * scale, in spite of the name.

Other writers name the scales weight_scale, scale or qscale_weight. Static scales of activations and of the KV cache are
not read: both stay in full precision.
"""

from collections.abc import Collection, Mapping, Sequence
from math import gcd, prod
from typing import Annotated, Any, Final, Literal

import torch
from pydantic import ConfigDict, Field, PositiveInt

from zinfer.errors import CheckpointError
from zinfer.kernels.quantized import QuantFormat, QuantizedMatrix
from zinfer.weights.formats.packing import fill_codes, fill_scales
from zinfer.weights.formats.scheme import (
    FLOATS,
    Axis,
    ForeignScheme,
    Layout,
    Nothing,
    PartGrid,
    Shapes,
    check_dtypes,
    matrix_shape,
)

_USUAL_BLOCK: Final = (128, 128)
_ONE: Final = ((), (1,), (1, 1))


class _E4m3(ForeignScheme):
    """Weights of e4m3 floats, and scales beside them."""

    model_config = ConfigDict(extra="forbid")  # an unknown member may change what the codes stand for

    set_aside_parts = ("input_scale", "activation_scale", "qscale_act", "input_scale_ub", "k_scale", "v_scale")

    quant_method: str
    modules_to_not_convert: Any = None

    @property
    def _block(self) -> tuple[int, int] | None:
        """Rows and columns of a block; None if there are no blocks."""
        return None

    @property
    def _scales_rows(self) -> bool:
        """Whether there may be a scale for each row."""
        return True

    @property
    def _scale_dtypes(self) -> Collection[torch.dtype]:
        return FLOATS

    def part_names(self, module: str) -> tuple[Sequence[str], Sequence[str]]:
        return ("weight",), tuple(self.marks)

    def layout(self, parameter: str, shapes: Shapes) -> Layout:
        rows, columns = matrix_shape(parameter, "weight", shapes)
        part, *more = (part for part in shapes if part != "weight")
        if more:
            module = parameter.removesuffix(".weight")
            raise CheckpointError(f"{module} has both {part} and {more[0]}: remove one of them")
        expected: list[tuple[int, ...]] = [*_ONE]
        group_size = None
        if self._block is not None:
            grid = (-(-rows // self._block[0]), -(-columns // self._block[1]))
            expected.insert(0, grid)
            if shapes[part] == grid and grid[1] > 1:
                group_size = gcd(self._block[1], columns)  # a cut last block has whole groups too
        if self._scales_rows:
            expected += [(rows, 1), (rows,)]
        format = QuantFormat(8, group_size, is_float=True)
        return format, rows, columns, {"weight": [(rows, columns)], part: expected}

    def grid(self, format: QuantFormat, rows: int, part: str, shape: tuple[int, ...]) -> PartGrid:
        if part == "weight":
            return PartGrid(shape, Axis(0), Axis(1))
        if prod(shape) == 1:
            return PartGrid(shape)
        if self._block is None or self._is_per_row(rows, shape):
            return PartGrid(shape, Axis(0))
        block_rows, block_columns = self._block
        return PartGrid(shape, Axis(0, block_rows), None if format.group_size is None else Axis(1, block_columns))

    def convert_into(self, target: QuantizedMatrix, parts: Mapping[str, torch.Tensor]) -> None:
        (part,) = (part for part in parts if part != "weight")
        check_dtypes(parts, {"weight": (torch.float8_e4m3fn,), part: self._scale_dtypes})
        scales = parts[part]
        if scales.dtype == torch.uint8:
            scales = scales.view(torch.float8_e8m0fnu)
        fill_scales(target, self._per_row(scales.float(), target), part)
        fill_codes(target, parts["weight"].view(torch.uint8))

    def _is_per_row(self, rows: int, shape: Sequence[int]) -> bool:
        return self._scales_rows and shape[0] == rows and prod(shape) == rows

    def _per_row(self, scales: torch.Tensor, target: QuantizedMatrix) -> torch.Tensor:
        """Return scales as the target has them, [rows or 1, groups], from those of blocks, rows or the tensor."""
        if scales.numel() == 1:
            return scales.reshape(1, 1)
        if self._block is None or self._is_per_row(target.rows, scales.shape):
            return scales.reshape(-1, 1)
        block_rows, block_columns = self._block
        size = target.format.group_size
        if size is not None:
            groups = target.format.num_groups(target.columns)
            scales = scales.repeat_interleave(block_columns // size, dim=1)[:, :groups]
        return scales.repeat_interleave(block_rows, dim=0)[: target.rows]


class Fp8(_E4m3):
    """Weights in blocks, as DeepSeek, Qwen, MiniMax and GLM publish them; without blocks, by tensor or by row."""

    marks = ("weight_scale_inv", "weight_scale", "scale", "qscale_weight")

    fmt: Literal["e4m3", "e4m3fn", "float8_e4m3fn"] = "e4m3"
    weight_block_size: Annotated[tuple[PositiveInt, PositiveInt], Field(strict=False)] | None = None
    activation_scheme: Literal["dynamic", "static"] = "dynamic"
    scale_fmt: Literal["float", "ue8m0"] = "float"
    expert_dtype: Literal["fp8"] = "fp8"
    modules_to_convert: Nothing = None
    ignored_layers: Any = None
    kv_cache_scheme: Any = None
    dequantize: Any = None

    @property
    def _block(self) -> tuple[int, int]:
        return self.weight_block_size or _USUAL_BLOCK

    @property
    def _scales_rows(self) -> bool:
        return self.weight_block_size is None

    @property
    def _scale_dtypes(self) -> Collection[torch.dtype]:
        return (*FLOATS, torch.float8_e8m0fnu, *((torch.uint8,) if self.scale_fmt == "ue8m0" else ()))

    def stored(self, names: Collection[str]) -> dict[str, dict[str, str]]:
        held = set(names)
        others = {name for name in held if name.endswith(".scale") and f"{name[: -len('scale')]}weight" not in held}
        return super().stored(held - others)


class FbgemmFp8(_E4m3):
    """Weights with a scale for each row; the bound of activations' scales (``activation_scale_ub``) is not read."""

    marks = ("weight_scale",)

    activation_scale_ub: Any = None
