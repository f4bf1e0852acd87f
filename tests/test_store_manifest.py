"""A store's manifest and the scheme that reads it: what is written comes back, faults are named with their remedy."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import tiny_checkpoint
from foreign_support import Held
from store_support import document, make_store
from test_store_files import FORMATS

import zinfer
from zinfer.errors import CheckpointError
from zinfer.kernels.quantize import quantize
from zinfer.kernels.quantized import QuantFormat, QuantizedMatrix
from zinfer.model.outline import read_outline
from zinfer.weights import Checkpoint
from zinfer.weights.native import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    Identity,
    Manifest,
    StoredBlock,
    StoredParameter,
    StoreScheme,
    read_manifest,
)

Document = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("model"), num_layers=2)


@pytest.fixture
def store(model: Path, tmp_path: Path) -> Path:
    make_store(model, tmp_path / "store", bits=4, group_size=32, symmetric=False)
    return tmp_path / "store"


def change(store: Path, edit: Callable[[Document], object]) -> None:
    members = document(store)
    edit(members)
    (store / MANIFEST_NAME).write_text(json.dumps(members))


def test_a_manifest_comes_back_as_it_was_written(tmp_path: Path) -> None:
    formats = [format for _, format in FORMATS.values()] + [QuantFormat(8, group_rows=None), QuantFormat(4, 32)]
    identity = Identity({"name": "a", "fingerprint": "b"}, {"dtype": "float16", "rules": [{"bits": 4}]})
    parameters = {
        f"w{number}": StoredParameter(format=format, columns=33 + number) for number, format in enumerate(formats)
    }
    (tmp_path / "block").write_bytes(b"12345")
    blocks = {"block": StoredBlock(name="model.layers.0", num_bytes=5, checksum="0123")}
    manifest = Manifest(
        format_version=FORMAT_VERSION, identity=identity, parameters=parameters, blocks=blocks, finished=True
    )
    manifest.write(tmp_path)
    assert read_manifest(tmp_path) == manifest


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("columns", [96, 33])
def test_the_scheme_gives_matrices_back(tmp_path: Path, name: str, columns: int) -> None:
    format = FORMATS[name][1]
    format = format if columns == 96 else QuantFormat(format.bits, None, format.symmetric, format.is_float)
    matrix = quantize(torch.randn(12, columns, generator=torch.Generator().manual_seed(1)), format)
    tensors = {"codes": matrix.codes, "scales": matrix.scales}
    if matrix.zeros is not None:
        tensors["zeros"] = matrix.zeros
    parameters = {"p.weight": StoredParameter(format=format, columns=columns)}
    scheme = StoreScheme(
        tmp_path, Manifest(format_version=FORMAT_VERSION, identity=Identity({}, {}), parameters=parameters)
    )
    names = {part: f"p.weight.{part}" for part in tensors}
    assert scheme.stored([*names.values(), "other"]) == {"p.weight": names}
    held = {part: Held(tensor) for part, tensor in tensors.items()}
    made = scheme.matrix("p.weight", held)
    assert (made.format, made.rows, made.columns) == (format, 12, columns)
    assert made.encoding.is_native
    target = QuantizedMatrix.empty(format, 12, columns, torch.float32, "cpu")
    made.encoding.convert_into(target, tensors)
    assert torch.equal(target.codes.view(torch.uint8), matrix.codes.view(torch.uint8))
    assert torch.equal(target.scales, matrix.scales)
    assert matrix.zeros is None or torch.equal(target.zeros, matrix.zeros)
    with pytest.raises(CheckpointError, match=r"1 tensors that no file holds, p\.weight\.codes the first"):
        scheme.stored([name for name in names.values() if not name.endswith("codes")])
    with pytest.raises(CheckpointError, match=r"p\.weight\.scales has shape \[11, \d\].*wants \[12, \d\].*copy"):
        scheme.matrix("p.weight", held | {"scales": Held(matrix.scales[:11])})


def test_checksums_go_by_the_files_of_the_opened_checkpoint(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(store.parent)
    scheme = StoreScheme.open(Path("store"))
    checkpoint = Checkpoint.open("store")
    assert scheme.checksums.keys() == set(checkpoint.files)
    assert len(set(scheme.checksums.values())) == 5
    for parts in scheme.stored(checkpoint.tensors).values():
        entries = [checkpoint.tensors[name] for name in parts.values()]
        assert len({entry.file for entry in entries}) == 1
        assert [entry.offset for entry in entries] == sorted(entry.offset for entry in entries)


WEIGHT = "model.layers.0.mlp.up_proj.weight"


def first_block(d: Document) -> Document:
    block: Document = next(iter(d["blocks"].values()))
    return block


def first_format(d: Document) -> Document:
    format: Document = d["parameters"][WEIGHT]["format"]
    return format


FAULTS: dict[str, tuple[Callable[[Document], object], str]] = {
    "another version": (lambda d: d.update(format_version=5), r"format_version is 5, this zinfer reads 4; write the"),
    "the former version": (
        lambda d: d.update(format_version=2, formats=[]),
        r"format_version is 2, this zinfer reads 4; write the store again with zinfer quantize",
    ),
    "no version": (lambda d: d.pop("format_version"), r"format_version is missing, this zinfer reads 4"),
    "no identity": (lambda d: d.pop("identity"), r"json: identity: Field required: the manifest is damaged; copy the"),
    "a source that is no text": (
        lambda d: d["identity"]["source"].update(fingerprint=1),
        r"identity\.source\.fingerprint: Input should be a valid string",
    ),
    "no settings": (lambda d: d["identity"].update(settings=[]), r"identity\.settings: Input should be an object"),
    "bits 3": (lambda d: first_format(d).update(bits=3), r"up_proj\.weight\.format\.bits: Input should be 4 or 8"),
    "an unknown format": (lambda d: first_format(d).update(sparse=1), r"format\.sparse: Unexpected keyword argument"),
    "a size that is no number": (lambda d: first_format(d).update(group_size=1.5), r"group_size: .* valid integer"),
    "a flag that is none": (lambda d: first_format(d).update(symmetric=1), r"symmetric: .* valid boolean"),
    "fragments that are none": (
        lambda d: first_format(d).update(in_fragments=True),
        r"format: Value error, fragments hold 4 bits, symmetric",
    ),
    "no parameters": (lambda d: d.pop("parameters"), r"parameters: Field required"),
    "a parameter without columns": (
        lambda d: d["parameters"][WEIGHT].pop("columns"),
        r"up_proj\.weight\.columns: Field required",
    ),
    "a block without a checksum": (lambda d: first_block(d).pop("checksum"), r"blocks\.block-.*\.checksum: Field req"),
    "a block without a size": (lambda d: first_block(d).update(num_bytes="9"), r"num_bytes: .* valid integer"),
    "a file elsewhere": (
        lambda d: d["blocks"].update({"../x": first_block(d)}),
        r"blocks\.\.\./x.*: Value error, it names '\.\./x', not a file",
    ),
    "a file that is not there": (
        lambda d: d["blocks"].update(x=first_block(d)),
        r"store/x: no such file, but zinfer_store\.json names it for the block .*; copy the whole",
    ),
    "not finished": (lambda d: d.update(finished=False), r"store: a store that is not finished; run the same zinfer"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FAULTS)
def test_a_damaged_manifest_is_refused(store: Path, name: str) -> None:
    edit, message = FAULTS[name]
    read_manifest(store)
    change(store, edit)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_manifest(store)
    assert str(store) in str(caught.value)


def test_fragments_that_a_matrix_has_no_room_for_are_refused(store: Path) -> None:
    parameter = "model.layers.0.self_attn.q_proj.weight"
    change(
        store,
        lambda d: d["parameters"][parameter]["format"].update(in_fragments=True, symmetric=True, group_size=64),
    )
    with pytest.raises(
        CheckpointError, match=r"q_proj\.weight: fragments of 64 .* do not divide 64 rows and 64 columns"
    ):
        StoreScheme.open(store).matrix(
            parameter, {"codes": Held(torch.empty(64, 32)), "scales": Held(torch.empty(64, 1))}
        )


def test_what_is_no_json_is_refused_with_its_line(store: Path) -> None:
    text = (store / MANIFEST_NAME).read_text()
    (store / MANIFEST_NAME).write_text(text[: len(text) // 2])
    with pytest.raises(
        CheckpointError, match=r"zinfer_store\.json: Invalid JSON.* line \d+ column \d+: .*damaged; copy the whole"
    ):
        read_manifest(store)


def test_a_file_that_lost_its_end_is_refused(store: Path) -> None:
    name, block = list(document(store)["blocks"].items())[2]
    with (store / name).open("r+b") as file:
        file.truncate(block["num_bytes"] - 1)
    message = rf"{name}: {block['num_bytes'] - 1} bytes long, but .* says {block['num_bytes']} for the block model\.lay"
    with pytest.raises(CheckpointError, match=message):
        read_manifest(store)


def test_a_store_that_is_half_written_says_how_to_go_on(store: Path, model: Path, tmp_path: Path) -> None:
    Checkpoint.open(store)
    (store / "config.json").unlink()
    for read in (Checkpoint.open, read_outline, zinfer.init_inference):
        with pytest.raises(CheckpointError, match=r"store: a store that is not finished.*run the same zinfer quantize"):
            read(store)
    (store / MANIFEST_NAME).unlink()
    with pytest.raises(CheckpointError, match=r"zinfer_store\.json: no such file, but a store has one; copy the whole"):
        read_manifest(store)
