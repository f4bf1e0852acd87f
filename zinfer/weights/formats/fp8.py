"""FP8 checkpoints, `fp8`, `mxfp8` and `fbgemm_fp8`: e4m3 floats with a scale for each block, row or tensor.

For a linear layer of ``rows`` outputs and ``columns`` inputs (transformers 5.23, integrations/finegrained_fp8.py:
`FP8Linear`, `_dequantize_fp8_weight`; integrations/fbgemm_fp8.py: `FbgemmFp8Linear`):

weight: float8_e4m3fn [rows, columns];
weight_scale_inv: [ceil(rows / block rows), ceil(columns / block columns)], of which the last blocks may be cut; or one
    scale, or [rows, 1]. fp32, bf16, fp16, or powers of two (e8m0). A value is weight * scale, in spite of the name.

``mxfp8`` has blocks of 1 row and 32 columns. With ``expert_dtype`` fp4 (DeepSeek-V4) matrices of experts are E2M1: int8
[rows, columns / 2], the even column in the low half, with a power of two for 32 columns.

Other writers name the scales weight_scale, scale or qscale_weight. Static scales of activations and of the KV cache are
not read: both stay in full precision.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import torch
from pydantic import ConfigDict, Field, PositiveInt

from zinfer.config.quantization_rules import Quantization
from zinfer.errors import CheckpointError
from zinfer.weights.formats.scheme import (
    FLOATS,
    MX_COLUMNS,
    WIDE,
    Layout,
    Nothing,
    PublishedScheme,
    Shapes,
    e2m1_in_groups,
    e4m3_in_blocks,
    matrix_shape,
    planned_as,
)

_USUAL_BLOCK: Final = (128, 128)
_ONE: Final[tuple[tuple[int, ...], ...]] = ((), (1,), (1, 1))


class _E4m3(PublishedScheme):
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

    @property
    def planned(self) -> Quantization:
        return Quantization((planned_as(e4m3_in_blocks(WIDE, WIDE, self._block or (1, None)), "float32"),))

    def part_names(self, module: str) -> tuple[Sequence[str], Sequence[str]]:
        return ("weight",), tuple(self.marks)

    def places(self, parameter: str, parts: Collection[str]) -> Mapping[str, str]:
        part, *more = (part for part in parts if part != "weight")
        if more:
            module = parameter.removesuffix(".weight")
            raise CheckpointError(f"{module} has both {part} and {more[0]}: remove one of them")
        return {"codes": "weight", "scales": part}

    def dtypes(self, parameter: str, parts: Collection[str]) -> Mapping[str, Collection[torch.dtype]]:
        if self._is_e2m1(parameter):
            return {"codes": (torch.int8, torch.uint8), "scales": (torch.uint8, torch.float8_e8m0fnu)}
        return {"codes": (torch.float8_e4m3fn,), "scales": self._scale_dtypes}

    def _is_e2m1(self, parameter: str) -> bool:
        return False

    def layout(self, parameter: str, shapes: Shapes) -> Layout:
        rows, columns = matrix_shape(parameter, "weight", shapes)
        part = self.places(parameter, shapes)["scales"]
        if self._is_e2m1(parameter):
            groups = (rows, -(-2 * columns // MX_COLUMNS))
            return e2m1_in_groups(MX_COLUMNS), rows, 2 * columns, {"weight": [(rows, columns)], part: [groups]}
        found, expected = shapes[part], list(_ONE)
        if self._block is not None:
            expected.insert(0, (-(-rows // self._block[0]), -(-columns // self._block[1])))
        if self._scales_rows:
            expected += [(rows, 1), (rows,)]
        format = e4m3_in_blocks(rows, columns, self._block or (1, None))
        if found in _ONE:
            format = e4m3_in_blocks(rows, columns, (None, None))
        elif self._scales_rows and found in ((rows, 1), (rows,)):
            format = e4m3_in_blocks(rows, columns, (1, None))
        return format, rows, columns, {"weight": [(rows, columns)], part: expected}


class Fp8(_E4m3):
    """Weights in blocks, as DeepSeek, Qwen, MiniMax and GLM publish them; without blocks, by tensor or by row."""

    marks = ("weight_scale_inv", "weight_scale", "scale", "qscale_weight")

    fmt: Literal["e4m3", "e4m3fn", "float8_e4m3fn"] = "e4m3"
    weight_block_size: Annotated[tuple[PositiveInt, PositiveInt], Field(strict=False)] | None = None
    activation_scheme: Literal["dynamic", "static"] = "dynamic"
    scale_fmt: Literal["float", "ue8m0"] = "float"
    expert_dtype: Literal["fp8", "fp4"] = "fp8"
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
    def planned(self) -> Quantization:
        scale_dtype = "float8_e8m0fnu" if self.scale_fmt == "ue8m0" else "float32"
        rules = [planned_as(e4m3_in_blocks(WIDE, WIDE, self._block), scale_dtype)]
        if self.expert_dtype == "fp4":
            rules.insert(0, planned_as(e2m1_in_groups(MX_COLUMNS), "float8_e8m0fnu", ".experts."))
        return Quantization(tuple(rules))

    def _is_e2m1(self, parameter: str) -> bool:
        return self.expert_dtype == "fp4" and ".experts." in parameter

    @property
    def _scale_dtypes(self) -> Collection[torch.dtype]:
        return (*FLOATS, torch.float8_e8m0fnu, *((torch.uint8,) if self.scale_fmt == "ue8m0" else ()))

    def stored(self, names: Collection[str]) -> dict[str, dict[str, str]]:
        held = set(names)
        others = {name for name in held if name.endswith(".scale") and f"{name[: -len('scale')]}weight" not in held}
        return super().stored(held - others)


class Mxfp8(Fp8):
    """Weights with a power of two for 32 columns of a row, as the OCP's microscaling formats have it."""

    weight_block_size: Annotated[tuple[Literal[1], Literal[32]], Field(strict=False)] | None = None
    scale_fmt: Literal["ue8m0"] = "ue8m0"

    @property
    def _block(self) -> tuple[int, int]:
        return 1, MX_COLUMNS

    @property
    def _scales_rows(self) -> bool:
        return False


class FbgemmFp8(_E4m3):
    """Weights with a scale for each row; the bound of activations' scales (``activation_scale_ub``) is not read."""

    marks = ("weight_scale",)

    activation_scale_ub: Any = None
