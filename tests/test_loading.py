"""What `init_inference` makes of a folder, a hub name or a module: the right weights, or an error that says what is
wrong with them."""

import copy
import gc
import json
import mmap
import os
import shutil
import struct
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from checkpoints import left_padded, random_prompts, tiny_checkpoint, tiny_model
from engines import config_for
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaModel, PreTrainedModel

import zinfer
from zinfer.errors import CheckpointError, ConfigError, ZinferError

Tensors = dict[str, torch.Tensor]
DISK: dict[str, object] = {"zero_optimization": {"offload_param": {"device": "nvme"}}}
HOST: dict[str, object] = {"zero_optimization": {"offload_param": {"device": "cpu"}}}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four llama layers in one file."""
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"), num_layers=4, shards=1)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("sharded"), num_layers=4, shards=3)


@pytest.fixture(scope="module")
def batch() -> Tensors:
    input_ids, attention_mask = left_padded(random_prompts(3, seed=8))
    return {"input_ids": input_ids, "attention_mask": attention_mask}


@contextmanager
def loaded(model: Any, config: Any = None, **kwargs: Any) -> Iterator[zinfer.InferenceEngine]:
    engine = zinfer.init_inference(model, config, device="cpu", **kwargs)
    try:
        yield engine
    finally:
        engine.destroy()


def refused(model: Any, config: Any = None, **kwargs: Any) -> None:
    """For use under `pytest.raises`; an engine that was made all the same is given back."""
    with loaded(model, config, **kwargs):
        pass


def changed(source: Path, target: Path, change: Callable[[Tensors], object], **config: object) -> Path:
    """A copy of a one-file checkpoint with other tensors, and other keys in its config.json."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    path = target / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return target


def keep(tensors: Tensors) -> None:
    """Change nothing."""


def renamed(old: str, new: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(old)]:
            tensors[new + name.removeprefix(old)] = tensors.pop(name)

    return change


def eager_logits(model: Path | PreTrainedModel, batch: Tensors, **kwargs: Any) -> torch.Tensor:
    loaded = model if isinstance(model, PreTrainedModel) else AutoModelForCausalLM.from_pretrained(model, **kwargs)
    with torch.no_grad():
        logits: torch.Tensor = loaded.eval()(**batch).logits
    return logits


def check_logits(folder: Path, expected: torch.Tensor, batch: Tensors, *configs: dict[str, object]) -> None:
    for config in configs or ({}, HOST, DISK):
        with loaded(folder, config) as engine:
            assert torch.equal(engine(**batch).logits, expected), config
            assert torch.equal(engine(**batch).logits, expected), config


def test_a_missing_shard(sharded: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(sharded, tmp_path / "model")
    gone = sorted(folder.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(CheckpointError, match=gone.name):
        refused(folder)


def test_an_index_that_names_absent_tensors(sharded: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(sharded, tmp_path / "model")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    shard = sorted(set(index["weight_map"].values()))[0]
    index["weight_map"]["model.layers.9.mlp.up_proj.weight"] = shard
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as caught:
        refused(folder)
    assert "model.layers.9.mlp.up_proj.weight" in str(caught.value)
    assert shard in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.2.self_attn.o_proj.weight",
        "model.layers.3.input_layernorm.weight",
        "model.norm.weight",
        "lm_head.weight",
    ],
)
def test_a_missing_weight(llama: Path, tmp_path: Path, name: str) -> None:
    folder = changed(llama, tmp_path / "model", lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError) as caught:
        refused(folder)
    assert name in str(caught.value)
    assert str(folder) in str(caught.value)
    assert "missing" in str(caught.value)


def test_a_whole_layer_missing_is_counted(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"9 weights are missing: model\.layers\.4\."):
        refused(changed(llama, tmp_path / "model", keep, num_hidden_layers=5))


@pytest.mark.parametrize(
    "name", ["model.layers.0.mlp.spare.weight", "model.layers.4.mlp.up_proj.weight", "classifier.weight"]
)
def test_an_extra_weight(llama: Path, tmp_path: Path, name: str) -> None:
    folder = changed(llama, tmp_path / "model", lambda tensors: tensors.update({name: torch.ones(3, 4)}))
    with pytest.raises(CheckpointError) as caught:
        refused(folder)
    assert name in str(caught.value)
    assert "model.safetensors" in str(caught.value)


def test_a_bias_that_the_model_has_no_place_for(llama: Path, tmp_path: Path) -> None:
    """attention_bias false in config.json and a bias in the file: computing without it would be silently wrong."""
    name = "model.layers.1.self_attn.q_proj.bias"
    folder = changed(llama, tmp_path / "model", lambda tensors: tensors.update({name: torch.ones(64)}))
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        refused(folder)


@pytest.mark.parametrize("shape", [(64, 64, 1), (64, 32), (32, 64), (4096,), ()])
def test_a_misshapen_weight(llama: Path, tmp_path: Path, shape: tuple[int, ...]) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    folder = changed(llama, tmp_path / "model", lambda tensors: tensors.update({name: torch.ones(shape)}))
    with pytest.raises(CheckpointError) as caught:
        refused(folder)
    for part in (name, str(list(shape)), "[64, 64]", "model.safetensors"):
        assert part in str(caught.value)


def test_a_transposed_weight(llama: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    folder = changed(llama, tmp_path / "model", lambda tensors: tensors.update({name: tensors[name].T}))
    with pytest.raises(CheckpointError, match=r"\[64, 128\].*\[128, 64\]"):
        refused(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.uint8, torch.bool, torch.int64])
def test_an_integer_weight(llama: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    folder = changed(llama, tmp_path / "model", lambda tensors: tensors.update({name: torch.ones(64, 64).to(dtype)}))
    with pytest.raises(CheckpointError) as caught:
        refused(folder)
    assert name in str(caught.value)
    assert str(dtype).removeprefix("torch.") in str(caught.value) or "I" in str(caught.value)


def test_not_a_model_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        refused(tmp_path)
    with pytest.raises(CheckpointError, match="nowhere"):
        refused(tmp_path / "nowhere")


def test_a_file_in_place_of_a_folder(llama: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        refused(llama / "model.safetensors")


@pytest.mark.parametrize("model_type", ["nonesuch", "vit", "t5", "clip"])
def test_an_architecture_without_a_causal_language_model(llama: Path, tmp_path: Path, model_type: str) -> None:
    folder = changed(llama, tmp_path / "model", keep, model_type=model_type, architectures=["Nonesuch"])
    with pytest.raises(CheckpointError, match=r"config\.json: .*transformers") as caught:
        refused(folder)
    assert len(str(caught.value)) < 1000, "not a list of all families"


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": "wide"},
        {"num_hidden_layers": -1},
        {"num_attention_heads": 0},
        {"hidden_act": "nonesuch"},
        {"rope_parameters": {"rope_type": "nonesuch"}},
        {"dtype": "int8"},
        {"dtype": "nonesuch"},
        {"vocab_size": None},
    ],
)
def test_a_config_that_transformers_cannot_build(llama: Path, tmp_path: Path, change: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        refused(changed(llama, tmp_path / "model", keep, **change))


@pytest.mark.parametrize("model", [None, 3, b"model", {"model": 1}], ids=repr)
def test_something_that_is_no_model(model: object) -> None:
    with pytest.raises((ZinferError, TypeError), match="model"):
        refused(model)


def test_a_module_that_is_not_transformers_own() -> None:
    with pytest.raises(ConfigError, match="Linear is not a transformers model"):
        refused(nn.Linear(3, 4))
    with pytest.raises(ConfigError, match="Sequential is not a transformers model"):
        refused(nn.Sequential(nn.Linear(3, 4)))


def test_a_transformers_model_without_a_head(llama: Path) -> None:
    """It cannot generate, but it is a transformers module: forward works or the error says why not."""
    model = LlamaModel(tiny_model("llama").config)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        expected = model.eval()(ids).last_hidden_state
    with loaded(model, HOST) as engine:
        assert torch.equal(engine(ids).last_hidden_state, expected)


def test_gpt2_without_its_prefix_and_with_masks(tmp_path: Path, batch: Tensors) -> None:
    folder = tiny_checkpoint("gpt2", tmp_path / "new", num_layers=3, shards=1)
    expected = eager_logits(folder, batch)

    def age(tensors: Tensors) -> None:
        renamed("transformer.", "")(tensors)
        for layer in range(3):
            tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 128, 128).tril()
            tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)

    old = changed(folder, tmp_path / "old", age)
    assert torch.equal(eager_logits(old, batch), expected)
    check_logits(old, expected, batch)


def test_gpt2_masks_of_bytes_and_booleans(tmp_path: Path, batch: Tensors) -> None:
    folder = tiny_checkpoint("gpt2", tmp_path / "new", num_layers=2, shards=1)

    def age(tensors: Tensors) -> None:
        tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 128, 128, dtype=torch.uint8).tril()
        tensors["transformer.h.1.attn.bias"] = torch.ones(1, 1, 128, 128, dtype=torch.bool).tril()

    check_logits(changed(folder, tmp_path / "old", age), eager_logits(folder, batch), batch, DISK)


def test_opt_without_its_prefix(tmp_path: Path, batch: Tensors) -> None:
    folder = tiny_checkpoint("opt", tmp_path / "new", num_layers=3, shards=1)
    expected = eager_logits(folder, batch)
    old = changed(folder, tmp_path / "old", renamed("model.", ""))
    assert "decoder.layers.0.fc1.weight" in load_file(old / "model.safetensors")
    check_logits(old, expected, batch)


def test_llama_with_rotary_frequencies(llama: Path, tmp_path: Path, batch: Tensors) -> None:
    """They are computed; the file's (wrong on purpose) must not be used."""

    def age(tensors: Tensors) -> None:
        for layer in range(4):
            tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.full((8,), 7.0)

    check_logits(changed(llama, tmp_path / "old", age), eager_logits(llama, batch), batch)


def test_a_base_model_alone_lacks_its_head(llama: Path, tmp_path: Path) -> None:
    def strip(tensors: Tensors) -> None:
        del tensors["lm_head.weight"]
        renamed("model.", "")(tensors)

    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        refused(changed(llama, tmp_path / "base", strip, architectures=["LlamaModel"]))


def test_a_base_model_with_a_tied_head_is_whole(tmp_path: Path, batch: Tensors) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "whole", num_layers=2, shards=1, tie=True)
    base = changed(folder, tmp_path / "base", renamed("model.", ""))
    check_logits(base, eager_logits(folder, batch), batch)


def test_a_tied_file_that_holds_the_head_only(tmp_path: Path, batch: Tensors) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "tied", num_layers=2, shards=1, tie=True)
    other = changed(folder, tmp_path / "head", renamed("model.embed_tokens.weight", "lm_head.weight"))
    check_logits(other, eager_logits(folder, batch), batch)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_a_tied_file_that_holds_both_alike(tmp_path: Path, batch: Tensors, family: str) -> None:
    folder = tiny_checkpoint(family, tmp_path / "tied", num_layers=2, shards=1, tie=True)

    def double(tensors: Tensors) -> None:
        [name] = [name for name in tensors if name.endswith(("embed_tokens.weight", "wte.weight"))]
        tensors["lm_head.weight"] = tensors[name].clone()

    check_logits(changed(folder, tmp_path / "both", double), eager_logits(folder, batch), batch)


def test_a_tied_file_that_holds_both_and_they_differ(tmp_path: Path, batch: Tensors) -> None:
    """Each its own, as transformers has it."""
    folder = tiny_checkpoint("llama", tmp_path / "tied", num_layers=2, shards=1, tie=True)
    head = torch.randn(131, 64, generator=torch.Generator().manual_seed(4))
    both = changed(folder, tmp_path / "both", lambda tensors: tensors.update({"lm_head.weight": head}))
    untied = changed(both, tmp_path / "untied", keep, tie_word_embeddings=False)
    expected = eager_logits(untied, batch)
    assert torch.equal(eager_logits(both, batch), expected)
    assert not torch.equal(eager_logits(folder, batch), expected)
    check_logits(both, expected, batch)


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


def meta_twin(folder: Path) -> PreTrainedModel:
    """As torch makes it: computed buffers are on the meta device too."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return model


def empty_twin(folder: Path) -> PreTrainedModel:
    """As accelerate makes it: computed buffers (rotary frequencies) are real."""
    with init_empty_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return model


def test_a_meta_module_without_a_checkpoint(llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"meta device.*checkpoint="):
        refused(meta_twin(llama))


@pytest.mark.parametrize("config", [{}, HOST, DISK], ids=["free", "host", "disk"])
@pytest.mark.parametrize("twin", [meta_twin, empty_twin])
def test_a_meta_module_with_its_checkpoint(
    llama: Path, batch: Tensors, config: dict[str, object], twin: Callable[[Path], PreTrainedModel]
) -> None:
    expected = eager_logits(llama, batch)
    with loaded(twin(llama), config, checkpoint=str(llama)) as engine:
        assert torch.equal(engine(**batch).logits, expected)
    model = twin(llama)
    with loaded(model, config | {"checkpoint": str(llama)}) as engine:
        assert engine.module is model
        assert not engine.module.training
        assert torch.equal(engine(**batch).logits, expected)


def test_a_meta_module_with_anothers_checkpoint(llama: Path, tmp_path: Path) -> None:
    other = tiny_checkpoint("gpt2", tmp_path / "gpt2", num_layers=2, shards=1)
    with pytest.raises(CheckpointError, match=r"weights are missing|no place"):
        refused(meta_twin(llama), checkpoint=str(other))


def test_a_module_half_on_the_meta_device(llama: Path) -> None:
    model = tiny_model("llama", num_layers=2)
    model.model.layers[1].mlp.up_proj.to("meta")
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is on the meta device"):
        refused(model)


def test_the_named_checkpoint_goes_before_weights_in_memory(llama: Path, batch: Tensors) -> None:
    """As in DeepSpeed: the module is the tree, the checkpoint its weights."""
    model = tiny_model("llama", num_layers=4, seed=9)
    with loaded(model, HOST, checkpoint=str(llama)) as engine:
        assert torch.equal(engine(**batch).logits, eager_logits(llama, batch))


def test_a_folder_and_another_checkpoint_contradict_each_other(llama: Path, sharded: Path) -> None:
    with pytest.raises(ConfigError, match="checkpoint"):
        refused(llama, checkpoint=str(sharded))


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
@pytest.mark.parametrize("config", [{}, HOST], ids=["free", "host"])
def test_a_module_in_memory_is_taken_over(batch: Tensors, family: str, config: dict[str, object]) -> None:
    model = tiny_model(family, num_layers=3)
    expected = eager_logits(model, batch)
    before = list(model.parameters())
    with loaded(model, config) as engine:
        assert engine.module is model
        assert torch.equal(engine(**batch).logits, expected)
        assert torch.equal(engine(**batch).logits, expected)
        layer = next(module for module in model.modules() if isinstance(module, nn.ModuleList))[0]
        if config is HOST:
            assert all(parameter.is_meta for parameter in layer.parameters())
            assert engine.stats().blocks_by_home["HOST"] > 0
        assert not {id(parameter) for parameter in model.parameters()} & {id(parameter) for parameter in before}


@pytest.mark.parametrize("config", [{}, HOST], ids=["free", "host"])
def test_the_memory_of_a_module_is_let_go(batch: Tensors, config: dict[str, object]) -> None:
    """Each parameter lies over a mapping of its own, which dies with the last tensor that uses it."""
    model = tiny_model("llama", num_layers=3)
    mappings = []
    for parameter in model.parameters():
        mapping = mmap.mmap(-1, parameter.nbytes)
        values = torch.frombuffer(mapping, dtype=parameter.dtype).view(parameter.shape)
        parameter.data = values.copy_(parameter.data)
        mappings.append(weakref.ref(mapping))
        del mapping, values
    expected = eager_logits(model, batch)
    assert all(mapping() is not None for mapping in mappings)
    del parameter
    with loaded(model, config) as engine:
        gc.collect()
        assert [mapping() for mapping in mappings] == [None] * len(mappings)
        assert torch.equal(engine(**batch).logits, expected)


def test_a_module_in_memory_has_no_home_on_disk() -> None:
    """nvme is asked for and cannot be had: placing the weights elsewhere without a word is not what was asked."""
    with pytest.raises(ZinferError, match=r"(?s)nvme.*(memory|checkpoint)"):
        refused(tiny_model("llama", num_layers=2), DISK)


def test_a_refused_module_keeps_its_weights(batch: Tensors) -> None:
    model = tiny_model("llama", num_layers=3)
    expected = eager_logits(model, batch)
    with pytest.raises(ZinferError):
        refused(model, max_device_memory=1)
    with pytest.raises(ZinferError):
        refused(model, max_device_memory=400_000, max_host_memory=1)
    assert torch.equal(eager_logits(model, batch), expected)


def test_a_dtype_casts_a_module_in_memory_as_transformers_casts_a_folder(tmp_path: Path, batch: Tensors) -> None:
    """Rotary frequencies stay in fp32, which `module.to` would cast as well."""
    saved = tiny_checkpoint("llama", tmp_path / "saved", num_layers=3)
    expected = eager_logits(AutoModelForCausalLM.from_pretrained(saved, dtype=torch.bfloat16), batch)
    for config in ({}, HOST):
        with loaded(tiny_model("llama", num_layers=3), config, dtype="bf16") as engine:
            assert torch.equal(engine(**batch).logits, expected)


def test_a_module_in_training_mode_drops_nothing_out(batch: Tensors) -> None:
    model = tiny_model("gpt2", num_layers=2)
    expected = eager_logits(model, batch)
    model.train()
    with loaded(model) as engine:
        assert torch.equal(engine(**batch).logits, expected)


def test_a_tied_module_in_memory(batch: Tensors) -> None:
    model = tiny_model("llama", num_layers=2, tie=True)
    expected = eager_logits(model, batch)
    for config in (HOST, HOST | {"zinfer": {"max_device_memory": 2 * 148_480}}):
        model = tiny_model("llama", num_layers=2, tie=True)
        with loaded(model, config) as engine:
            assert torch.equal(engine(**batch).logits, expected)


def test_a_module_with_its_own_generation_settings_keeps_them() -> None:
    ids = torch.tensor([[5, 17, 40]])
    model = tiny_model("llama", num_layers=2)
    model.generation_config.max_new_tokens = 7
    model.generation_config.eos_token_id = None
    expected = model.generate(ids, do_sample=False)
    assert expected.shape == (1, 10)
    with loaded(model, HOST) as engine:
        assert torch.equal(engine.generate(ids, do_sample=False), expected)


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
