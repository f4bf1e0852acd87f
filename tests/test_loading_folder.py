"""A folder or a hub name becomes the right weights, however its files are laid out."""

import copy
import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import tiny_checkpoint
from engines import config_for, loaded
from huggingface_hub import constants
from loading_support import (
    DISK,
    HOST,
    Tensors,
    batch,
    changed,
    check_logits,
    eager_logits,
    llama,
    refused,
    sharded,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from zinfer.errors import CheckpointError

__all__ = ["batch", "llama", "sharded"]  # fixtures


def with_odd_header(source: Path, target: Path, remainder: int) -> Path:
    """A copy whose one file is written by hand, its data starting at ``remainder`` modulo 8."""
    shutil.copytree(source, target)
    path = target / "model.safetensors"
    tensors = load_file(path)
    header: dict[str, object] = {}
    data = bytearray()
    for name, tensor in tensors.items():
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        dtype = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * ((remainder - len(text)) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    assert (path.stat().st_size - len(data)) % 8 == remainder
    return target


@pytest.mark.sampled(5)
@pytest.mark.parametrize("remainder", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_data_at_odd_offsets(
    llama: Path, tmp_path: Path, batch: Tensors, remainder: int, dtype: torch.dtype | None
) -> None:
    """The reference library refuses none of these files; reading elements in place would trap or go wrong."""
    folder = with_odd_header(llama, tmp_path / "odd", remainder)
    expected = eager_logits(llama, batch, dtype=dtype or torch.float32)
    for config in ({}, HOST, DISK):
        with loaded(folder, config, **({"dtype": dtype} if dtype else {})) as engine:
            assert torch.equal(engine(**batch).logits, expected)
            assert torch.equal(engine(**batch).logits, expected)


def test_bfloat16_at_odd_offsets_becomes_float32(tmp_path: Path, batch: Tensors) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "half", num_layers=2, shards=1, dtype=torch.bfloat16)
    expected = eager_logits(folder, batch, dtype=torch.float32)
    with loaded(with_odd_header(folder, tmp_path / "odd", 5), DISK, dtype="fp32") as engine:
        assert torch.equal(engine(**batch).logits, expected)


def test_a_layer_split_over_shards(llama: Path, tmp_path: Path, batch: Tensors) -> None:
    """Tensors dealt out in turn to three files: every layer has parts in each."""
    folder = shutil.copytree(llama, tmp_path / "split")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: f"model-0000{index % 3 + 1}-of-00003.safetensors" for index, name in enumerate(sorted(tensors))}
    for file in sorted(set(files.values())):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, folder / file)
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    check_logits(folder, eager_logits(llama, batch), batch)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_checkpoints_own_dtype_is_kept(tmp_path: Path, batch: Tensors, dtype: torch.dtype) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "model", num_layers=2, shards=1, dtype=dtype)
    expected = eager_logits(folder, batch, dtype=dtype)
    assert expected.dtype == dtype
    check_logits(folder, expected, batch)


def test_norms_stored_wider_than_the_rest(tmp_path: Path, batch: Tensors) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "model", num_layers=2, shards=1, dtype=torch.bfloat16)

    def widen(tensors: Tensors) -> None:
        for name in tensors:
            if "norm" in name:
                tensors[name] = tensors[name].float()

    mixed = changed(folder, tmp_path / "mixed", widen)
    check_logits(mixed, eager_logits(mixed, batch, dtype="auto"), batch)


def test_without_a_dtype_in_the_config_the_files_decide(tmp_path: Path, batch: Tensors) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "model", num_layers=2, shards=1, dtype=torch.bfloat16)
    expected = eager_logits(folder, batch, dtype=torch.bfloat16)
    config = json.loads((folder / "config.json").read_text())
    config.pop("dtype", None)
    (folder / "config.json").write_text(json.dumps(config))
    check_logits(folder, expected, batch, DISK)


def cached(source: Path, cache: Path, repo: str) -> Path:
    root = cache / f"models--{repo.replace('/', '--')}"
    snapshot = root / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    (root / "blobs").mkdir()
    for index, path in enumerate(sorted(source.iterdir())):
        blob = root / "blobs" / f"{index:040x}"
        shutil.copy(path, blob)
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("abc123")
    return root


def test_the_hub_cache_by_folder_snapshot_and_name(
    sharded: Path, tmp_path: Path, batch: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = cached(sharded, tmp_path, "org/tiny")
    expected = eager_logits(sharded, batch)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("socket.socket.connect", lambda *args: pytest.fail("the network was used"))
    for model in (root, root / "snapshots" / "abc123", str(root), "org/tiny"):
        with loaded(model, DISK) as engine:
            assert torch.equal(engine(**batch).logits, expected)
    with pytest.raises(CheckpointError, match="org/absent"):
        refused("org/absent")


def test_the_config_is_not_changed(llama: Path, tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "dtype": torch.float32,
        "train_batch_size": 1,
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/tmp"}},
        "zinfer": {"num_slots": 3, "device": "cpu"},
    }
    before = copy.deepcopy(config)
    with loaded(llama, config, max_tokens=50) as engine:
        engine.generate(input_ids=torch.tensor([[3, 4]]), max_new_tokens=2)
        assert engine.settings.num_slots == 3
        assert engine.settings.max_out_tokens == 50
    assert config == before
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zinfer": {"num_slots": 3}}))
    for given in (path, str(path)):
        with loaded(llama, given) as engine:
            assert engine.settings.num_slots == 3


def test_the_generation_config_of_the_folder_counts(llama: Path, tmp_path: Path) -> None:
    """Its end token stops the text, as with transformers' own `from_pretrained`."""
    ids = torch.tensor([[5, 17, 40]])
    free = AutoModelForCausalLM.from_pretrained(llama).generate(ids, max_new_tokens=20, do_sample=False)
    folder = shutil.copytree(llama, tmp_path / "model")
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": int(free[0, 8])}))
    expected = AutoModelForCausalLM.from_pretrained(folder).generate(ids, max_new_tokens=20, do_sample=False)
    assert expected.shape[1] < free.shape[1]
    with loaded(folder, DISK) as engine:
        assert torch.equal(engine.generate(ids, max_new_tokens=20, do_sample=False), expected)


def test_one_checkpoint_in_two_engines(sharded: Path, batch: Tensors) -> None:
    expected = eager_logits(sharded, batch)
    with (
        loaded(sharded, config_for(sharded, "disk", 2, "cpu")) as first,
        loaded(sharded, config_for(sharded, "mixed", 3, "cpu")) as second,
    ):
        for _ in range(2):
            assert torch.equal(first(**batch).logits, expected)
            assert torch.equal(second(**batch).logits, expected)
        first.destroy()
        assert torch.equal(second(**batch).logits, expected)
