"""A checkpoint that is given as a list of files, as a DeepSpeed checkpoint JSON has it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import loaded
from loading_support import DISK, HOST, Tensors, batch, eager_logits, llama, refused, sharded
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import zinfer
from zinfer.errors import CheckpointError, ConfigError

__all__ = ["batch", "llama", "sharded"]  # fixtures


def twin(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    with zinfer.OnDevice(dtype=dtype, device="meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    assert torch.get_default_dtype() is torch.float32
    assert {weight.dtype for weight in model.parameters()} == {dtype}
    return model


def listing(files: Any, **members: object) -> dict[str, Any]:
    return {"type": "ds_model", "checkpoints": files, "version": 1.0} | members


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors"))


def write(path: Path, members: object) -> Path:
    path.write_text(members if isinstance(members, str) else json.dumps(members))
    return path


@pytest.mark.sampled(3)
@pytest.mark.parametrize("config", [{}, HOST, DISK], ids=["free", "host", "disk"])
def test_a_json_file_of_files(
    sharded: Path, batch: Tensors, tmp_path: Path, config: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights lie where no config.json is; from there they stream."""
    for name in names(sharded):
        shutil.copy(sharded / name, tmp_path / name)
    expected = eager_logits(sharded, batch)
    absolute = write(tmp_path / "absolute.json", listing([str(tmp_path / name) for name in names(sharded)]))
    relative = write(tmp_path / "relative.json", listing(names(sharded), type="BLOOM"))
    inside = write(tmp_path / "inside.json", listing(names(sharded), base_dir=str(tmp_path)))
    for path, more in ((absolute, {}), (relative, {"base_dir": str(tmp_path)}), (inside, {"base_dir": "/nowhere"})):
        with loaded(twin(sharded), config, checkpoint=str(path), **more) as engine:
            assert torch.equal(engine(**batch).logits, expected)
            assert engine.stats().bytes_read_disk > 0
    monkeypatch.chdir(tmp_path)
    with loaded(twin(sharded), config | {"checkpoint": "relative.json"}) as engine:
        assert torch.equal(engine(**batch).logits, expected)


def test_an_object_in_place_of_the_file(sharded: Path, batch: Tensors) -> None:
    expected = eager_logits(sharded, batch)
    for members in (listing(names(sharded)), listing(str(sharded)), listing([sharded], version=0)):
        with loaded(twin(sharded), HOST, checkpoint=members, base_dir=sharded) as engine:
            assert torch.equal(engine(**batch).logits, expected)


def test_a_narrower_dtype(llama: Path, batch: Tensors) -> None:
    expected = eager_logits(llama, batch, dtype=torch.bfloat16)
    model = twin(llama, torch.bfloat16)
    with loaded(model, HOST, checkpoint=listing(names(llama)), base_dir=llama, dtype=torch.bfloat16) as engine:
        assert torch.equal(engine(**batch).logits, expected)


def test_files_of_torch_save(llama: Path, tmp_path: Path, batch: Tensors) -> None:
    tensors = load_file(llama / "model.safetensors")
    for number in range(2):
        torch.save(dict(list(tensors.items())[number::2]), tmp_path / f"part-{number}.pt")
    with loaded(twin(llama), HOST, checkpoint=listing(["part-0.pt", "part-1.pt"]), base_dir=tmp_path) as engine:
        assert torch.equal(engine(**batch).logits, eager_logits(llama, batch))


def test_files_of_another_format_are_refused_with_the_remedy(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "model.h5").touch()
    with pytest.raises(CheckpointError, match=r"list\.json names .*model\.h5.*convert .*save_pretrained"):
        refused(
            twin(llama), checkpoint=str(write(tmp_path / "list.json", listing(["model.h5"], base_dir=str(tmp_path))))
        )


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["absent.safetensors"], r"checkpoint names .*absent\.safetensors, which is not there: .*base_dir"),
        (["config.json"], r"config\.json, which is no \*\.safetensors"),
        (None, "weights are missing"),
    ],
)
def test_files_that_cannot_be_used(sharded: Path, files: list[str] | None, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        refused(twin(sharded), checkpoint=listing(files or names(sharded)[:1]), base_dir=sharded)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"list\.json: not JSON: .* line 1"),
        ("[]", r"list\.json: expected one JSON object"),
        ("{}", r"list\.json: type = null: expected an object like"),
        (listing([]), r"list\.json: checkpoints = \[\]: expected the names of files"),
        (listing([3]), r"list\.json: checkpoints = \[3\]: expected names of files"),
        (listing(["a"], pieces=3), r'list\.json: the list: expected an object like .*the member "pieces" is not known'),
        (listing(["a"], base_dir=3), r"list\.json: base_dir = 3: expected a path"),
        (
            listing(["a"], type="Megatron"),
            r"list\.json: the list is not available yet: weights .* split over GPUs; remove it or set it to the path",
        ),
        (listing({"tp": ["a"], "non_tp": ["b"]}, parallelization="tp"), "split over GPUs"),
    ],
)
def test_a_list_that_cannot_be_read(text: object, message: str, llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        refused(twin(llama), checkpoint=write(tmp_path / "list.json", text))


def test_a_list_is_not_written_as_a_store(llama: Path, tmp_path: Path) -> None:
    config = {"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}}}
    with pytest.raises(ConfigError, match=r"nvme_path: .*give the folder with config\.json"):
        refused(twin(llama), config, checkpoint=listing(names(llama)), base_dir=llama, dtype="int8")
