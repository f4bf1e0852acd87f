"""A rank's part of a matrix of codes stands for the values that the whole one has there, in every layout."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_support import (
    MODULE,
    PARAMETER,
    Weights,
    awq_parts,
    gptq_parts,
    packed_parts,
    packed_scheme,
    plain_parts,
    scheme_of,
)
from safetensors.torch import save_file

from zinfer.errors import CheckpointError
from zinfer.kernels.dequantize import dequantize_ref
from zinfer.kernels.quantize import quantize_into
from zinfer.kernels.quantized import QuantFormat, QuantizedMatrix
from zinfer.model.sharding.cut import Cut
from zinfer.model.sharding.matrices import CutMatrix, cut_matrix
from zinfer.model.sharding.weights import CutTensor
from zinfer.weights import Checkpoint
from zinfer.weights.formats import Scheme
from zinfer.weights.native import Manifest, StoredParameter, StoreScheme
from zinfer.weights.quantized import StoredMatrix

ROWS, COLUMNS, GROUP = 48, 96, 32
GROUPED, UNEVEN = (Weights.random(ROWS, COLUMNS, 3, 4, symmetric, 1) for symmetric in (True, False))
WIDE, CHANNELS = Weights.random(ROWS, COLUMNS, 3, 8, False, 2), Weights.random(ROWS, COLUMNS, 1, 8, True, 3)
FLOATS = (torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(4)) * 100).to(torch.float8_e4m3fn)
Case = tuple[Scheme, dict[str, torch.Tensor]]


def floats(strategy: str, scales: tuple[int, ...], **more: object) -> Case:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, **more}
    groups: dict[str, Any] = {"group_0": {"targets": ["Linear"], "weights": weights}}
    scheme = scheme_of("compressed-tensors", format="float-quantized", config_groups=groups)
    spread = torch.rand(scales, generator=torch.Generator().manual_seed(5)) + 0.1
    return scheme, {"weight": FLOATS, "weight_scale": spread}


CASES: dict[str, Case] = {
    "gptq": (scheme_of("gptq", bits=4, group_size=GROUP), gptq_parts(GROUPED, 4, less_one=True)),
    "gptq without index": (
        scheme_of("gptq", bits=8, group_size=GROUP, sym=False),
        gptq_parts(WIDE, 8, less_one=True, index=False),
    ),
    "gptq rows": (scheme_of("gptq", bits=8, group_size=-1), gptq_parts(CHANNELS, 8, less_one=True)),
    "awq": (scheme_of("awq", bits=4, group_size=GROUP), awq_parts(UNEVEN)),
    "packed": (packed_scheme(4, group_size=GROUP), packed_parts(GROUPED, 4, symmetric=True)),
    "packed zeros": (
        packed_scheme(4, group_size=GROUP, symmetric=False),
        packed_parts(UNEVEN, 4, symmetric=False),
    ),
    "bytes": (packed_scheme(8, format="int-quantized", strategy="channel"), plain_parts(CHANNELS, 8, symmetric=True)),
    "bytes with zeros": (
        packed_scheme(8, format="int-quantized", group_size=GROUP, symmetric=False),
        plain_parts(WIDE, 8, symmetric=False),
    ),
    "floats of one scale": floats("tensor", (1,)),
    "blocks of floats": floats("block", (6, 3), block_structure=[8, GROUP]),
}
BLOCKS = {
    "weight_block_size": [8, 16],  # of [44, 72] the last blocks are cut in rows and columns
    "scale_fmt": "ue8m0",
}
CASES |= {
    f"fp8 {name}": (
        scheme_of("fp8", **section),
        {"weight": FLOATS[:44, :72], "weight_scale_inv": (torch.rand(scales) + 0.1).to(dtype)},
    )
    for name, section, scales, dtype in (
        ("cut blocks", BLOCKS, (6, 5), torch.float8_e8m0fnu),
        ("of one scale", {}, (), torch.float32),
        ("rows", {}, (44, 1), torch.bfloat16),
        ("wide blocks", {"weight_block_size": [8, 128]}, (6, 1), torch.float32),
    )
}
CUTS = (Cut(0, ((8, 16),)), Cut(0, ((0, 8), (24, 48))), Cut(1, ((32, 96),)), Cut(1, ((0, 32), (64, 96))))


def values(matrix: StoredMatrix, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """What a matrix stands for, read from the tensors that it names."""
    parts = {}
    for part, entry in matrix.parts:
        held = tensors[entry.name]
        parts[part] = entry.cut.of(held.view(entry.whole.shape)) if isinstance(entry, CutTensor) else held
    target = QuantizedMatrix.empty(matrix.format, matrix.rows, matrix.columns, torch.float32, "cpu")
    matrix.convert_into(target, parts)
    return dequantize_ref(target, torch.float32)


@pytest.mark.parametrize("name", CASES)
def test_a_part_has_the_values_of_the_whole(tmp_path: Path, name: str) -> None:
    scheme, parts = CASES[name]
    tensors = {f"{MODULE}.{part}": value.contiguous() for part, value in parts.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    entries = Checkpoint.listed([tmp_path / "model.safetensors"], "files").tensors
    whole = StoredMatrix.of(PARAMETER, scheme, {part: entries[f"{MODULE}.{part}"] for part in parts})
    expected, (rows, columns) = values(whole, tensors), whole.shape
    for each in CUTS:
        cut = replace(each, ranges=tuple((begin, min(end, whole.shape[each.dim])) for begin, end in each.ranges))
        own = cut_matrix(whole, cut, (rows, columns), transposed=False)
        assert torch.equal(values(own, tensors), cut.of(expected)), cut
        turned = cut_matrix(whole, Cut(1 - cut.dim, cut.ranges), (columns, rows), transposed=True)
        assert torch.equal(values(turned, tensors), cut.of(expected)), cut


NATIVE = {
    "groups with zeros": (QuantFormat(4, 32, symmetric=False), CUTS),
    "rows of scaled columns": (QuantFormat(8, scales_columns=True), CUTS),
    "rows in turn": (QuantFormat(4, None, group_rows=8), CUTS),
    "fragments": (QuantFormat(4, 64, in_fragments=True), (Cut(0, ((64, 192),)), Cut(1, ((256, 512),)))),
}


@pytest.mark.parametrize("name", NATIVE)
def test_a_part_of_a_store_has_the_values_of_the_whole(tmp_path: Path, name: str) -> None:
    format, cuts = NATIVE[name]
    rows, columns = (256, 512) if format.in_fragments else (ROWS, COLUMNS)
    matrix = QuantizedMatrix.empty(format, rows, columns, torch.float32, torch.device("cpu"))
    if matrix.column_scales is not None:
        matrix.column_scales.copy_(torch.rand(columns, generator=torch.Generator().manual_seed(7)) + 0.5)
    quantize_into(matrix, torch.randn(rows, columns, generator=torch.Generator().manual_seed(6)))
    parts = {part: getattr(matrix, part) for part in format.part_shapes(rows, columns)}
    tensors = {f"{PARAMETER}.{part}": value for part, value in parts.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    entries = Checkpoint.listed([tmp_path / "model.safetensors"], "files").tensors
    stored = {PARAMETER: StoredParameter(format=format, columns=columns)}
    scheme = StoreScheme(tmp_path, Manifest.model_construct(parameters=stored))
    whole = StoredMatrix.of(PARAMETER, scheme, {part: entries[f"{PARAMETER}.{part}"] for part in parts})
    expected = dequantize_ref(matrix, torch.float32)
    assert torch.equal(values(whole, tensors), expected)
    for cut in cuts:
        own = cut_matrix(whole, cut, (rows, columns), transposed=False)
        assert torch.equal(values(own, tensors), cut.of(expected)), cut


ORDERED: dict[str, Case] = {
    "gptq": (
        scheme_of("gptq", bits=4, group_size=GROUP, desc_act=True),
        gptq_parts(GROUPED.scattered(8), 4, less_one=True),
    ),
    "gptq of 8 bits with zeros": (
        scheme_of("gptq", bits=8, group_size=GROUP, sym=False, desc_act=True),
        gptq_parts(WIDE.scattered(9), 8, less_one=True),
    ),
    "packed": (
        packed_scheme(4, strategy="group", group_size=GROUP, actorder="group"),
        packed_parts(GROUPED, 4, symmetric=True) | {"weight_g_idx": GROUPED.scattered(7).group_index.clone()},
    ),
}


def filled(matrix: StoredMatrix, tensors: dict[str, torch.Tensor]) -> QuantizedMatrix:
    """A matrix with columns in the order of groups, and the order."""
    parts = {}
    for part, entry in matrix.parts:
        held = tensors[entry.name]
        parts[part] = entry.cut.of(held.view(entry.whole.shape)) if isinstance(entry, CutTensor) else held
    target = QuantizedMatrix.empty(matrix.format, matrix.rows, matrix.columns, torch.float32, "cpu")
    matrix.convert_into(target, parts)
    return target


@pytest.mark.parametrize("name", ORDERED)
def test_groups_in_activation_order_pick_their_columns(tmp_path: Path, name: str) -> None:
    """Of another tool's checkpoint, whose parts are read whole, and of a store made of it, which is cut."""
    scheme, parts = ORDERED[name]
    tensors = {f"{MODULE}.{part}": value.contiguous() for part, value in parts.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    entries = Checkpoint.listed([tmp_path / "model.safetensors"], "files").tensors
    whole = StoredMatrix.of(PARAMETER, scheme, {part: entries[f"{MODULE}.{part}"] for part in parts})
    expected, in_store = values(whole, tensors), filled(whole, tensors)
    of_store = {f"{PARAMETER}.{part}": getattr(in_store, part) for part in whole.format.part_shapes(ROWS, COLUMNS)}
    save_file(of_store, tmp_path / "store.safetensors")
    places = Checkpoint.listed([tmp_path / "store.safetensors"], "files").tensors
    stored = {PARAMETER: StoredParameter(format=whole.format, columns=COLUMNS)}
    native = StoreScheme(tmp_path, Manifest.model_construct(parameters=stored))
    names = whole.format.part_shapes(ROWS, COLUMNS)
    kept = StoredMatrix.of(PARAMETER, native, {part: places[f"{PARAMETER}.{part}"] for part in names})
    for matrix, held in ((whole, tensors), (kept, of_store)):
        seen = []
        for ends in ((0, 32), (32, 96)):
            own = filled(cut_matrix(matrix, Cut(1, (ends,)), (ROWS, COLUMNS), transposed=False), held)
            assert own.format.picks_columns
            assert own.column_order is not None
            picked = own.column_order.tolist()
            assert picked != [*range(*ends)], "groups are scattered"
            found = dequantize_ref(replace(own, column_order=None), torch.float32)
            assert torch.equal(found, expected[:, picked]), ends
            seen += picked
        assert sorted(seen) == [*range(COLUMNS)]
        rows = cut_matrix(matrix, Cut(0, ((8, 24),)), (ROWS, COLUMNS), transposed=False)
        assert torch.equal(values(rows, held), expected[8:24])


def test_groups_that_are_not_where_they_should_be_are_seen_in_a_part(tmp_path: Path) -> None:
    scheme, parts = CASES["gptq"]
    tensors = {f"{MODULE}.{part}": value.clone().contiguous() for part, value in parts.items()}
    tensors[f"{MODULE}.g_idx"][70] = 1
    save_file(tensors, tmp_path / "model.safetensors")
    entries = Checkpoint.listed([tmp_path / "model.safetensors"], "files").tensors
    whole = StoredMatrix.of(PARAMETER, scheme, {part: entries[f"{MODULE}.{part}"] for part in parts})
    values(CutMatrix.make(whole, Cut(1, ((0, 64),))), tensors)
    with pytest.raises(CheckpointError, match="g_idx puts column 38 into group 0 instead of 1"):
        values(CutMatrix.make(whole, Cut(1, ((32, 96),))), tensors)
