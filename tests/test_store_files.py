"""What a store's files hold: the codes that quantizing gives, aligned, without holes, read by the reference library."""

import json
from pathlib import Path

import pytest
import torch
import xxhash
from checkpoints import HIDDEN_SIZE, tiny_checkpoint, tiny_mixtral
from foreign_support import Weights, gptq_parts
from jobs_support import CHAT_TEMPLATE, letters_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from store_support import blocks_of, contents, document, make_store, write_module
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
)
from transformers.pytorch_utils import Conv1D

from zinfer.kernels.quantize import full_range, least_error_range, quantize
from zinfer.kernels.quantized import QuantFormat
from zinfer.nvme.aligned import ALIGNMENT_BYTES
from zinfer.weights import Checkpoint, read_header

FORMATS = {
    "int8": ({"bits": 8}, QuantFormat(8)),
    "int8 asymmetric": ({"bits": 8, "group_size": 16, "symmetric": False}, QuantFormat(8, 16, symmetric=False)),
    "int4": ({"bits": 4, "group_size": 32}, QuantFormat(4, 32)),
    "int4 asymmetric, clipped": (
        {"bits": 4, "symmetric": False, "search": "clip"},
        QuantFormat(4, symmetric=False),
    ),
    "fp8": ({"bits": 8, "format": "fp8"}, QuantFormat(8, is_float=True)),
}


def expected_tensors(folder: Path, format: QuantFormat, device: str, *, clip: bool) -> dict[str, torch.Tensor]:
    """What the store of a model holds: transformers' own parameters, its layers' matrices quantized one by one."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(device)
    bounds = least_error_range if clip else full_range
    expected: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():  # tied ones once
        module = model.get_submodule(name.rpartition(".")[0])
        is_matrix = isinstance(module, nn.Linear | Conv1D) and parameter.dim() == 2 and not name.startswith("lm_head")
        if not is_matrix:
            expected[name] = parameter.detach().cpu()
            continue
        matrix = quantize(parameter.t() if isinstance(module, Conv1D) else parameter, format, bounds=bounds)
        expected |= {f"{name}.codes": matrix.codes.cpu(), f"{name}.scales": matrix.scales.detach().cpu()}
        if matrix.zeros is not None:
            expected[f"{name}.zeros"] = matrix.zeros.cpu()
    return expected


def stored_tensors(store: Path) -> dict[str, torch.Tensor]:
    """All tensors, as the reference library reads them."""
    found: dict[str, torch.Tensor] = {}
    for block in blocks_of(store):
        found |= load_file(store / block["file"])
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("family", ["llama", "opt", "gpt2"])
def test_a_store_holds_the_codes_of_every_matrix(tmp_path: Path, family: str, name: str, device: str) -> None:
    section, format = FORMATS[name]
    folder = tiny_checkpoint(family, tmp_path / "model", num_layers=3, dtype=torch.bfloat16, tie=True)
    summary = make_store(folder, tmp_path / "store", device, **section)
    found = stored_tensors(tmp_path / "store")
    assert_same(found, expected_tensors(folder, format, device, clip=section.get("search") == "clip"))
    assert summary.packed_bytes == sum(tensor.nbytes for tensor in found.values())
    assert summary.source_bytes == sum(entry.nbytes for entry in Checkpoint.open(folder).tensors.values())
    assert summary.read_bytes >= summary.source_bytes


def test_files_are_aligned_and_without_holes_in_the_slabs_order(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "model", num_layers=3)
    make_store(folder, tmp_path / "store", bits=4, group_size=32, symmetric=False)
    blocks = blocks_of(tmp_path / "store")
    assert [block["file"] for block in blocks] == [f"block-{n:05}-of-00006.safetensors" for n in range(1, 7)]
    source = Checkpoint.open(folder)
    for block in blocks:
        path = tmp_path / "store" / block["file"]
        header = read_header(path)
        begin = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        assert begin % ALIGNMENT_BYTES == 0
        assert path.stat().st_size == block["num_bytes"]
        assert xxhash.xxh3_128(path.read_bytes()[begin:]).hexdigest() == block["checksum"]
        end = begin
        for entry in header.tensors.values():
            assert entry.offset == end
            end += entry.nbytes
        assert end == block["num_bytes"]
        parts = [name for name in header.tensors if name.endswith((".codes", ".scales", ".zeros"))]
        assert parts == [
            f"{part.removesuffix('.codes')}.{kind}" for part in parts[::3] for kind in ("codes", "scales", "zeros")
        ]
        names = [name.removesuffix(".codes") for name in header.tensors if not name.endswith((".scales", ".zeros"))]
        places = [(str(source.tensors[name].file), source.tensors[name].offset) for name in names]
        assert places == sorted(places)
        with safe_open(path, framework="pt") as file:
            assert set(file.keys()) == set(header.tensors)


def test_what_lies_beside_the_weights_makes_it_a_models_folder(tmp_path: Path) -> None:
    folder = letters_model(tmp_path / "model", chat_template=CHAT_TEMPLATE)
    config = json.loads((folder / "config.json").read_text())
    config.pop("dtype")
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    (folder / "README.md").write_text("a model")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "short.jinja").write_text("{{ messages }}")
    make_store(folder, tmp_path / "store", bits=8)
    stored = json.loads((tmp_path / "store" / "config.json").read_text())
    method = {"quant_method": "zinfer", "format_version": 4}
    assert stored == config | {"dtype": "float32", "quantization_config": method}
    copied = {name for name in contents(folder) if not name.endswith((".safetensors", "config.json", "index.json"))}
    copied |= {"tokenizer_config.json", "generation_config.json"}
    names = contents(tmp_path / "store").keys()
    for name in copied - {"README.md"}:
        assert (tmp_path / "store" / name).read_bytes() == (folder / name).read_bytes(), name
    blocks = {block["file"] for block in blocks_of(tmp_path / "store")}
    made = {"config.json", "model.safetensors.index.json", "zinfer_store.json"}
    assert names == copied - {"README.md"} | blocks | made
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "store")
    assert tokenizer.decode(tokenizer("abc").input_ids) == "abc"
    assert set(Checkpoint.open(tmp_path / "store").tensors) == set(stored_tensors(tmp_path / "store"))


def test_a_file_that_the_config_names_is_not_named_in_the_store(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "model", num_layers=2, shards=1)
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": "other.safetensors"}))
    make_store(folder, tmp_path / "store")
    assert len(Checkpoint.open(tmp_path / "store").files) == 5


def test_what_stays_in_full_is_cast_to_the_dtype_of_products(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "model", num_layers=2, dtype=torch.float32)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    make_store(folder, tmp_path / "store", bits=8)
    found = stored_tensors(tmp_path / "store")
    assert {tensor.dtype for tensor in found.values()} == {torch.int8, torch.bfloat16}
    full = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weight = full.model.layers[0].mlp.up_proj.weight
    scales = quantize(weight, QuantFormat(8), torch.bfloat16).scales
    assert torch.equal(found["model.layers.0.mlp.up_proj.weight.scales"], scales.detach())
    embedding = full.model.embed_tokens.weight.to(torch.bfloat16)
    assert torch.equal(found["model.embed_tokens.weight"], embedding)


def test_experts_lie_one_below_the_other(tmp_path: Path) -> None:
    model = tiny_mixtral()
    folder = write_module(model, tmp_path / "model")
    make_store(folder, tmp_path / "store", bits=8)
    found = stored_tensors(tmp_path / "store")
    experts = model.model.layers[1].mlp.experts.down_proj.detach()
    matrix = quantize(experts.reshape(-1, experts.shape[-1]), QuantFormat(8))
    assert torch.equal(found["model.layers.1.mlp.experts.down_proj.codes"], matrix.codes)
    assert torch.equal(found["model.layers.1.mlp.experts.down_proj.scales"], matrix.scales)


def test_buffers_that_a_checkpoint_holds_are_in_the_store_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = DeepseekV3Config(
        hidden_size=HIDDEN_SIZE,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=131,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
    )
    model = DeepseekV3ForCausalLM(config)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    model.get_buffer(name).copy_(torch.randn(4))
    folder = write_module(model, tmp_path / "model")
    make_store(folder, tmp_path / "store", bits=8)
    last = blocks_of(tmp_path / "store")[-1]
    assert last["name"] == "buffers"
    assert torch.equal(load_file(tmp_path / "store" / last["file"])[name], model.get_buffer(name))


def test_matrices_that_are_quantized_already_keep_their_codes(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path / "model", num_layers=2, shards=1, tie=False)
    tensors = load_file(folder / "model.safetensors")
    weights = Weights.random(2 * HIDDEN_SIZE, HIDDEN_SIZE, 2, 4, symmetric=True, seed=0, dtype=torch.float32)
    for number in range(2):
        module = f"model.layers.{number}.mlp.up_proj"
        del tensors[f"{module}.weight"]
        parts = gptq_parts(weights, 4, less_one=True)
        tensors |= {f"{module}.{part}": tensor.contiguous().clone() for part, tensor in parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    foreign = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": foreign}))
    make_store(folder, tmp_path / "store", bits=8)
    manifest = document(tmp_path / "store")
    formats = {name: stored["format"] for name, stored in manifest["parameters"].items()}
    assert formats["model.layers.1.mlp.up_proj.weight"]["bits"] == 4
    assert formats["model.layers.1.mlp.up_proj.weight"]["group_size"] == 32
    assert formats["model.layers.1.mlp.down_proj.weight"]["bits"] == 8
    found = stored_tensors(tmp_path / "store")
    codes = found["model.layers.1.mlp.up_proj.weight.codes"]
    assert torch.equal(torch.stack((codes & 15, codes >> 4), -1).flatten(1).long(), weights.codes)
    assert torch.equal(found["model.layers.1.mlp.up_proj.weight.scales"], weights.scales)
