"""GGUF files run as they are published: config, names, tokenizer and every type of blocks out of the file itself."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_support import FAMILIES, TYPES, write_gguf
from hypothesis import given
from hypothesis import strategies as st
from packed_cache_support import engine_of, only

from zinfer.weights.formats.gguf import decode
from zinfer.weights.gguf_header import GGML_TYPES

IDS = torch.tensor([[5, 77, 120, 9, 33, 250, 14, 2, 8, 99]])


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def logits_of(path: Path, **options: Any) -> torch.Tensor:
    with engine_of(str(path), options.pop("nvme_path", None), dtype="fp32", **{"home": "none"} | options) as engine:
        found: torch.Tensor = engine(IDS).logits
        return found


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


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_computes_the_logits_of_its_decoded_weights(family: str, tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "model.gguf", family, "Q5_K", types={"ffn_down": "Q6_K", "attn_v": "Q8_0"})
    torch.testing.assert_close(logits_of(tmp_path / "model.gguf"), model(IDS).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
@pytest.mark.parametrize("type", TYPES)
def test_a_type_computes_the_logits_of_its_decoded_weights(type: str, family: str, tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "model.gguf", family, type)
    torch.testing.assert_close(logits_of(tmp_path / "model.gguf"), model(IDS).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma2"])
def test_logits_are_alike_from_every_home(family: str, tmp_path: Path) -> None:
    path, nvme_path = tmp_path / "model.gguf", tmp_path / "nvme"
    wanted = write_gguf(path, family, "Q4_K")(IDS).logits
    for options in ({"home": "cpu"}, {"home": "nvme", "nvme_path": nvme_path}):
        torch.testing.assert_close(logits_of(path, **options), wanted, rtol=0, atol=1e-5)
    assert only(nvme_path).name.startswith("model-")
