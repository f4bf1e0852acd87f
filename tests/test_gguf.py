"""GGUF files run as they are published: config, names, tokenizer and every type of blocks out of the file itself."""

import json
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_support import FAMILIES, TYPES, encoded, write_gguf
from hypothesis import given
from hypothesis import strategies as st
from packed_cache_support import engine_of

from zinfer.errors import CheckpointError
from zinfer.model.outline import read_outline
from zinfer.requests.prompt_encoder import find_tokenizer
from zinfer.weights import resolve_folder
from zinfer.weights.block_parameter import SlabBlocks
from zinfer.weights.formats.gguf import BlockForm, decode
from zinfer.weights.gguf_config import FAMILIES as READ
from zinfer.weights.gguf_header import GGML_TYPES, read_gguf_header
from zinfer.weights.gguf_model import GgufModel, Recipe

IDS = torch.tensor([[5, 77, 120, 9, 33, 250, 14, 2, 8, 99]])


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def logits_of(path: Path, **options: Any) -> torch.Tensor:
    options = {"nvme_path": None, "dtype": "fp32", "home": "none"} | options
    with engine_of(str(path), **options) as engine:
        found: torch.Tensor = engine(IDS.to(options.get("device", "cpu"))).logits
        return found.cpu()


@given(
    type=st.sampled_from(sorted(GGML_TYPES.values(), key=lambda type: type.name)),
    rows=st.integers(1, 5),
    blocks=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
)
def test_blocks_of_any_bytes_stand_for_the_values_of_ggml(type: Any, rows: int, blocks: int, seed: int) -> None:
    octets = np.random.default_rng(seed).integers(0, 256, (rows, blocks * type.nbytes), dtype=np.uint8)
    stored = octets.view({"F32": np.float32, "F16": np.float16}.get(type.name, np.uint8))
    with np.errstate(all="ignore"):
        wanted = gguf.dequantize(stored, gguf.GGMLQuantizationType[type.name]).astype(np.float32)
    found = decode(type, torch.from_numpy(octets))
    assert np.array_equal(found.numpy(), wanted, equal_nan=True)


def test_sizes_of_blocks_are_those_of_ggml() -> None:
    for number, type in GGML_TYPES.items():
        kind = gguf.GGMLQuantizationType[type.name]
        assert (number, type.values, type.nbytes) == (kind.value, *gguf.GGML_QUANT_SIZES[kind])


def test_every_architecture_that_is_read_is_tested() -> None:
    assert {architecture for architecture, _ in FAMILIES.values()} == READ.keys()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("home", ["none", "nvme"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_computes_the_logits_of_its_decoded_weights(family: str, home: str, tmp_path: Path) -> None:
    """Decoded while it is loaded, and in blocks that stream from the file."""
    model = write_gguf(tmp_path / "model.gguf", family, "Q5_K", types={"ffn_down": "Q6_K", "attn_v": "Q8_0"})
    found = logits_of(tmp_path / "model.gguf", home=home)
    torch.testing.assert_close(found, model(IDS).logits, rtol=0, atol=1e-5)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("home", ["none", "nvme"])
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
@pytest.mark.parametrize("type", TYPES)
def test_a_type_computes_the_logits_of_its_decoded_weights(type: str, family: str, home: str, tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "model.gguf", family, type)
    found = logits_of(tmp_path / "model.gguf", home=home)
    torch.testing.assert_close(found, model(IDS).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("home", ["cpu", "nvme"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss"])
def test_a_device_computes_the_logits_of_the_decoded_weights(
    family: str, home: str, device: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    wanted = write_gguf(path, family, "Q4_K", types={"exps": "MXFP4", "ffn_down": "Q6_K"})(IDS).logits
    torch.testing.assert_close(logits_of(path, home=home, device=device), wanted, rtol=0, atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma2"])
def test_logits_in_bfloat16_are_those_of_values_decoded_while_they_are_loaded(family: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, family, "Q4_K")
    found = [logits_of(path, dtype="bf16", home=home) for home in ("none", "cpu", "nvme")]
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], found[2], rtol=0, atol=0.02)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_blocks_stream_as_they_are_stored(family: str, tmp_path: Path) -> None:
    """From disk the bytes of the file are moved, and nothing else is written."""
    path, nvme_path = tmp_path / "model.gguf", tmp_path / "nvme"
    write_gguf(path, family, "Q4_K")
    tensors = read_gguf_header(path).tensors.values()
    layers = sum(tensor.nbytes for tensor in tensors if tensor.name.startswith("blk."))
    with engine_of(str(path), nvme_path, dtype="fp32", home="nvme") as engine:
        moved = engine.stats().disk_bytes_per_pass
    assert 0.99 * layers < moved < 1.1 * sum(tensor.nbytes for tensor in tensors)
    assert not nvme_path.exists() or not list(nvme_path.iterdir())


def slab_of(place: SlabBlocks, blocks: torch.Tensor) -> torch.Tensor:
    """A slab with the rows of blocks in their places."""
    slab = torch.zeros(place.nbytes, dtype=torch.uint8)
    for part, rows in zip(place.parts(), blocks.chunk(len(place.forms)), strict=True):
        part.view(slab).copy_(rows)
    return slab


@pytest.mark.parametrize("rows", [1, 64, 130])
@pytest.mark.parametrize("type", ["Q4_K", "MXFP4", "Q6_K"])
def test_a_parameter_in_blocks_computes_as_its_values(rows: int, type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By ranges of rows, also of heads whose halves are interleaved; and single rows, experts and all together."""
    monkeypatch.setattr("zinfer.weights.formats.gguf.SLICE_VALUES", 1000)
    kind = next(each for each in GGML_TYPES.values() if each.name == type)
    octets = encoded(
        np.random.default_rng(0).standard_normal((rows * 4, 256), np.float32), type, np.random.default_rng(0)
    )[0]
    blocks = torch.from_numpy(octets)
    for recipe, shape, pieces in (
        (Recipe.ROWS, (rows * 4, 256), 1),
        (Recipe.HALVES, (rows * 4, 256), 1),
        (Recipe.ROWS, (4, rows, 256), 4),
    ):
        own = rows * 4 // pieces
        form = BlockForm((own, 256), recipe, 4, (kind,), ((own, blocks.shape[1]),))
        place = SlabBlocks("weight", torch.float32, shape, forms=(form,) * pieces)
        parameter = place.parameter(slab_of(place, blocks))
        values = parameter.decoded()
        assert parameter.shape == values.shape == shape
        x = torch.randn(3, 256)
        if len(shape) == 3:
            assert torch.equal(parameter[2], values[2])
        else:
            torch.testing.assert_close(torch.nn.functional.linear(x, parameter), x @ values.T, rtol=1e-5, atol=1e-4)
            picked = torch.tensor([[0, rows], [1, 0]])
            assert torch.equal(torch.nn.functional.embedding(picked, parameter), values[picked])
        torch.testing.assert_close(parameter * 2, values * 2)


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_outline(path)
    return str(caught.value)


def refusal_of_header(path: Path) -> str | None:
    try:
        GgufModel.of([read_gguf_header(path)])
    except CheckpointError as error:
        return str(error)
    return None


def damaged(data: bytes, end: int, draw: random.Random) -> bytes:
    """Bytes of a header are others, gone or doubled, a number is a wild one, or the file ends early."""
    changed, kind, begin = bytearray(data), draw.randrange(6), draw.randrange(end)
    piece = slice(begin, min(end, begin + draw.randint(1, 64)))
    if kind == 0:
        for _ in range(draw.randint(1, 4)):
            changed[draw.randrange(end)] = draw.randrange(256)
    elif kind == 1:
        del changed[piece]
    elif kind == 2:
        changed[begin:begin] = changed[piece]
    elif kind == 3:
        del changed[draw.randrange(len(data)) :]
    else:
        wild = draw.choice((0, 1, 8, 9, 2**16, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1))
        changed[begin : begin + 8] = wild.to_bytes(8, "little")
    return bytes(changed)


def test_damaged_headers_end_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, "qwen3_moe", tokens="llama-bpe")
    data, header = path.read_bytes(), read_gguf_header(path)
    end = min(tensor.offset for tensor in header.tensors.values())
    refused = 0
    for seed in range(300):
        path.write_bytes(damaged(data, end, random.Random(seed)))
        message = refusal_of_header(path)
        assert message is None or (message.startswith(f"{path}: ") and "\n" not in message)
        refused += message is not None
    assert refused > 200


def test_a_file_of_version_2_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    wanted = write_gguf(path, "qwen2")(IDS).logits
    data = path.read_bytes()
    path.write_bytes(data[:4] + struct.pack("<I", 2) + data[8:])
    torch.testing.assert_close(logits_of(path), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: b"GGML" + data[4:], "it begins with b'GGML' and not with b'GGUF'"),
        (lambda data: data[:4] + struct.pack("<I", 1) + data[8:], "version 1 of GGUF, and 2 and 3 are read"),
        (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], "a GGUF file in big-endian order: take the one in"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer, not the weights"),
        (lambda data: data[:-100], "the file is cut short: download it again"),
        (
            lambda data: data.replace(b"general.architecture", b"general.architectur_"),
            "general.architecture is missing",
        ),
        (lambda data: data.replace(b"llama.block_count", b"llama.block_coun_"), "the key llama.block_count is missing"),
        (lambda data: data.replace(b"blk.1.attn_norm", b"blk.1.atta_norm"), "'blk.1.atta_norm.weight' has no place in"),
        (
            lambda data: data.replace(b"llama-bpe", b"martian-b"),
            "pre is 'martian-b', a split of text that is not known",
        ),
    ],
)
def test_a_file_that_is_not_read_is_named_with_a_remedy(change: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", tokens="llama-bpe")
    path.write_bytes(change(path.read_bytes()))
    message = refusal(path)
    assert message.startswith(f"{path}: ")
    assert words in message


def test_other_types_and_architectures_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 66), np.uint8), raw_dtype=gguf.GGMLQuantizationType.IQ2_XXS)
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    words = "tensor 'token_embd.weight': its type IQ2_XXS is not read: take the model's file in one that is read (F32,"
    assert words in refusal(path)
    write_gguf(path, "llama")
    path.write_bytes(path.read_bytes().replace(b"llama", b"mamba"))
    assert "general.architecture is 'mamba': llama, qwen2, qwen3," in refusal(path)


def test_a_model_in_several_files(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    wanted = write_gguf(path, "qwen2", tokens="llama-bpe", split_max_tensors=6)(IDS).logits
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) > 2
    torch.testing.assert_close(logits_of(parts[0]), wanted, rtol=0, atol=1e-5)
    assert resolve_folder(tmp_path) == resolve_folder(parts[1]) == resolve_folder(parts[0])
    parts[1].unlink()
    assert f"missing part {parts[1].name}: download it into {tmp_path}" in refusal(parts[0])


def test_a_folder_with_several_models_asks_for_one(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf", "mmproj-a.gguf"):
        (tmp_path / name).touch()
    assert refusal(tmp_path) == f"{tmp_path}: 2 GGUF files: a.gguf, b.gguf: give the path of one of them"


def test_a_folder_with_its_own_config_and_tokenizer_is_taken_as_it_is(tmp_path: Path) -> None:
    wanted = write_gguf(tmp_path / "model.gguf", "qwen2", tokens="llama-bpe")(IDS).logits
    own = tmp_path / "own"
    shutil.copytree(resolve_folder(tmp_path), own, symlinks=True)
    assert resolve_folder(own) == own
    torch.testing.assert_close(logits_of(own), wanted, rtol=0, atol=1e-5)
    (own / "tokenizer.json").unlink()
    (own / "tokenizer_config.json").unlink()
    assert resolve_folder(own) != own


def test_the_folder_is_made_again_when_the_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, "qwen2")
    first = resolve_folder(path)
    assert resolve_folder(path) == first
    assert {each.name for each in first.iterdir()} == {"model.gguf", "config.json", "generation_config.json"}
    path.unlink()
    write_gguf(path, "qwen3")
    assert json.loads((resolve_folder(path) / "config.json").read_text())["model_type"] == "qwen3"


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "model.gguf", "qwen2")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "set XDG_CACHE_HOME to a folder that can be written to" in refusal(tmp_path / "model.gguf")


def test_the_tokenizer_and_the_ends_of_texts_come_from_the_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "llama", tokens="llama-bpe")
    folder = resolve_folder(tmp_path / "model.gguf")
    tokenizer = find_tokenizer(folder)
    text = "the man in the rain,\n  12345 Ünïcode"
    tokens = tokenizer.encode(text)
    assert tokens[0] == tokenizer.bos_token_id == 0
    assert tokenizer.decode(tokens[1:]) == text
    assert 263 in tokens  # th + e
    turns = [{"role": "user", "content": "hello"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) == (
        "<|user|>hello<|end|><|bot|>"
    )
    assert tokenizer.encode("<|user|>a", add_special_tokens=False)[0] == 3
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [2, 3]


@pytest.mark.parametrize(
    ("family", "kind", "begin"),
    [
        ("llama", "sentencepiece", [1]),
        ("gemma2", "sentencepiece", [1]),
        ("phi3", "sentencepiece", [1]),
        ("deepseek_v3", "deepseek-v3", [0]),
        ("gpt_oss", "gpt-4o", [0]),
        ("glm4_moe", "glm4", [0]),
        ("qwen2", "qwen2", [0]),
    ],
)
def test_a_tokenizer_gives_the_text_back(family: str, kind: str, begin: list[int], tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", family, tokens=kind)
    tokenizer = find_tokenizer(resolve_folder(tmp_path / "model.gguf"))
    for text in ("hello hello  lo é", "the 12345 中文字 ab's\n\n x"):
        tokens = tokenizer.encode(text)
        assert tokens[: len(begin)] == begin
        assert tokenizer.decode(tokens, skip_special_tokens=True) == text


def test_quantized_again_its_values_are_rounded_like_any_others(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = write_gguf(path, "qwen3_moe", "Q6_K")
    model.save_pretrained(tmp_path / "decoded")
    section = {"bits": 8, "group_size": 64}
    found = logits_of(path, section=section, home="cpu")
    torch.testing.assert_close(found, logits_of(tmp_path / "decoded", section=section, home="cpu"), rtol=0, atol=1e-4)


def test_a_plan_reads_headers_alone(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, "qwen3_moe", "Q4_K", tokens="llama-bpe")
    whole = read_outline(path)
    end = min(tensor.offset for tensor in read_gguf_header(path).tensors.values())
    with path.open("r+b") as file:
        file.seek(end)
        file.write(b"\0" * (path.stat().st_size - end))
    again = read_outline(path)
    assert again.nbytes == whole.nbytes
    assert again.spec == whole.spec
