"""Floats of 8 and 4 bits run as they are published: their values, their bytes, from every home."""

import math
import os
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
import torch
from checkpoints import left_padded, random_prompts
from packed_cache_support import engine_of
from published_formats import FORMATS, write_published
from ranks_support import run_ranks
from safetensors.torch import load_file
from test_tensor_parallel import IDS, check_alike, computed, config, error_of
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import zinfer
from zinfer.config import resolve_settings
from zinfer.errors import CheckpointError
from zinfer.evaluation.weight_error import measure_errors
from zinfer.inject.shared_product import joined_parameter
from zinfer.kernels.quantized import QuantFormat
from zinfer.model.build import build_meta_model
from zinfer.model.matching import match_weights
from zinfer.model.outline import read_outline
from zinfer.model.partition import partition_model
from zinfer.store.writing import write_store
from zinfer.weights import Checkpoint, TensorEntry
from zinfer.weights.header import DTYPES
from zinfer.weights.parameter import QuantizedParameter
from zinfer.weights.quantized import find_stored_scheme
from zinfer.weights.slab_matrix import SlabMatrix

REMEDY: Final = re.compile("download|remove|restore|incomplete|describes another|take the|use a checkpoint|in a copy")
NUM_CORRUPTIONS: Final = int(os.environ.get("ZINFER_CORRUPTIONS", "20"))

CASES: Final = [
    ("gpt_oss", "mxfp4"),
    *(("llama", name) for name in FORMATS if name not in ("mxfp4", "fp8 with fp4 experts")),
    *(("deepseek_v3", name) for name in ("modelopt nvfp4", "compressed mxfp4", "fp8 with fp4 experts")),
    *(("qwen3_moe", name) for name in ("modelopt fp8", "compressed nvfp4", "compressed fp8 by tensor")),
    *(("minimax_m2", name) for name in ("mxfp8", "fp8 with fp4 experts")),
    *(("glm4_moe", name) for name in ("compressed fp8 by channel", "compressed fp8 in blocks")),
    *(("mixtral", name) for name in ("compressed mxfp8", "modelopt nvfp4")),
]


def published_bytes(folder: Path) -> int:
    """Of the parameters of a model: without static scales and buffers."""
    aside = ("input_scale", "input_global_scale", "k_scale", "e_score_correction_bias")
    stored = load_file(folder / "model.safetensors")
    return sum(value.nbytes for name, value in stored.items() if not name.endswith(aside))


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_published_folder_runs_as_it_is(family: str, name: str, tmp_path: Path) -> None:
    """Resident, from host memory and from its own file, of which a pass moves just the bytes; injected or not."""
    full = write_published(tmp_path, family, name)
    before = sorted(path.name for path in tmp_path.iterdir())
    ids, mask = left_padded(random_prompts(4, seed=9))
    with torch.no_grad():
        wanted = {"logits": full(input_ids=ids, attention_mask=mask).logits}
    for home, inject in (("none", False), ("cpu", True), ("nvme", False), ("nvme", True)):
        with engine_of(tmp_path, None, home=home, replace_with_kernel_inject=inject) as engine:
            if home == "none":
                assert any(isinstance(each, QuantizedParameter) for each in engine.module.parameters())
            assert error_of({"logits": engine(input_ids=ids, attention_mask=mask).logits}, wanted) <= 1e-5, home
            stats = engine.stats()
            if home == "nvme":
                assert stats.streamed_bytes_per_pass + stats.loaded_bytes == published_bytes(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == before, "nothing is written"


@pytest.mark.parametrize(("family", "name"), [("gpt_oss", "mxfp4"), ("deepseek_v3", "modelopt nvfp4")])
def test_batches_have_the_tokens_of_the_values(family: str, name: str, tmp_path: Path) -> None:
    full = write_published(tmp_path, family, name)
    prompts = random_prompts(5, seed=4)
    wanted = []
    for prompt in prompts:
        ids = full.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
        wanted.append(tuple(ids[0, len(prompt) :].tolist()))
    offload = {"zero_optimization": {"offload_param": {"device": "nvme"}}}
    greedy = zinfer.SamplingParams(max_new_tokens=8, temperature=0.0)
    with zinfer.LLM(tmp_path, offload, device="cpu", kv_cache_memory="2MB") as llm:
        found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy)
    assert [tuple(each.token_ids) for each in found] == wanted


@pytest.mark.slow
def test_two_ranks_divide_published_matrices(tmp_path: Path) -> None:
    """Layers by rows and columns, mixtures by number too; and slabs that stream from the file by ranges."""
    divided = [case for case in CASES if case[0] not in ("minimax_m2", "glm4_moe")]
    for family, name in divided:
        write_published(tmp_path / f"{family} {name}", family, name)
    inputs = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    folders = [tmp_path / f"{family} {name}" for family, name in divided]
    one, two = ([(folder, config(size), inputs) for folder in folders] for size in (1, 2))
    by_number = {"zinfer": {"device": "cpu", "parallel": {"expert": 2}}}
    mixtures = [folder for folder in folders if not folder.name.startswith("llama")]
    one += [(folder, config(1), inputs) for folder in mixtures]
    two += [(folder, config(1) | {"tensor_parallel": {}} | by_number, inputs) for folder in mixtures]
    shared = [(folder, config(1, "nvme"), inputs) for folder in folders]  # slabs of the file, a range of each a rank
    alone = computed(0, one + shared)
    check_alike(run_ranks(2, computed, two + shared), alone, [each[0].name for each in one + shared])


def test_what_transformers_makes_of_mxfp4_is_read(tmp_path: Path) -> None:
    write_published(tmp_path, "gpt_oss", "mxfp4")
    stored = load_file(tmp_path / "model.safetensors")
    with engine_of(tmp_path, None, home="none") as engine:
        for leaf in ("gate_up_proj", "down_proj"):
            name = f"model.layers.1.mlp.experts.{leaf}"
            blocks, scales = stored[f"{name}_blocks"], stored[f"{name}_scales"]
            wanted = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            held = engine.module.get_parameter(name)
            assert isinstance(held, QuantizedParameter)
            assert torch.equal(held.dequantized(), wanted)
            assert torch.equal(held[1].dequantized(), wanted[1]), "one expert's"


def damaged(tensors: dict[str, TensorEntry], draw: random.Random) -> dict[str, TensorEntry]:
    """One tensor is gone, or has another name, dtype or shape."""
    name = draw.choice([name for name in tensors if "layers.1." in name])
    entry, left = tensors[name], {each: entry for each, entry in tensors.items() if each != name}
    kind = draw.randrange(4)
    if kind == 0:
        return left
    if kind == 1:
        other = name[: draw.randrange(len(name))] + draw.choice(("scale", "weight_scale", "x", "_blocks", ".weight"))
        return left | {other: replace(entry, name=other)}
    shape, dtype = list(entry.shape), entry.dtype
    if kind == 2:
        dtype = draw.choice([each for each in DTYPES.values() if each != dtype])
    elif shape and draw.random() < 0.7:
        at = draw.randrange(len(shape))
        shape[at] = max(0, draw.choice((shape[at] - 1, shape[at] + 1, shape[at] * 2, shape[at] // 2, 0)))
    else:
        shape = draw.choice(([], [1], [*shape, 1], [1, *shape], shape[::-1], shape[1:]))
    made = replace(entry, dtype=dtype, shape=tuple(shape), nbytes=math.prod(shape) * dtype.itemsize)
    return left | {name: made}


@pytest.mark.parametrize("name", FORMATS)
def test_damaged_tensors_end_in_a_sentence(name: str, tmp_path: Path) -> None:
    family = "gpt_oss" if name == "mxfp4" else "qwen3_moe"
    write_published(tmp_path, family, name)
    checkpoint = Checkpoint.open(tmp_path)
    tree, scheme = build_meta_model(checkpoint), find_stored_scheme(checkpoint)
    refused = []
    for number in range(NUM_CORRUPTIONS):
        tensors = damaged(dict(checkpoint.tensors), random.Random(number))
        try:
            partition_model(tree, match_weights(tree, replace(checkpoint, tensors=tensors), scheme))
        except CheckpointError as error:
            refused.append(str(error))
    assert len(refused) > NUM_CORRUPTIONS / 4, "others are of static scales, which are not read"
    assert not [each for each in refused if "\n" in each or not REMEDY.search(each)]


PLANNED: Final = [("gpt_oss", "mxfp4"), *(("llama", name) for name in FORMATS if name not in ("mxfp4", "modelopt fp8"))]


@pytest.mark.parametrize(("family", "name"), PLANNED)
def test_config_json_alone_is_planned_with_the_published_bytes(family: str, name: str, tmp_path: Path) -> None:
    """But for what lies between the parts of a slab, and the dtype of scales, which only files tell."""
    write_published(tmp_path, family, name)
    whole = read_outline(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    alone = read_outline(tmp_path)
    for one, other in zip(alone.plain_blocks, whole.plain_blocks, strict=True):
        forms = [
            {tensor.name: tensor.format for tensor in each.layout.tensors if isinstance(tensor, SlabMatrix)}
            for each in (one, other)
        ]
        assert forms[0].keys() == forms[1].keys()
        assert one.nbytes == pytest.approx(other.nbytes, rel=0.02)


@pytest.mark.parametrize(
    ("family", "name"), [("gpt_oss", "mxfp4"), ("qwen3_moe", "compressed nvfp4"), ("llama", "mxfp8")]
)
def test_a_published_folder_is_quantized_to_a_store(family: str, name: str, tmp_path: Path) -> None:
    """To INT8, whose error is that of the published values; the same while loading."""
    full = write_published(tmp_path / "model", family, name)
    section = {"bits": 8, "group_size": 32}
    settings = resolve_settings({"zinfer": {"device": "cpu", "quantization": section}})
    write_store(tmp_path / "model", tmp_path / "store", settings)
    errors = list(measure_errors(Checkpoint.open(tmp_path / "model"), Checkpoint.open(tmp_path / "store")))
    assert errors
    assert all(each.format == QuantFormat(8, 32) and 0 < each.relative_error < 0.01 for each in errors)
    with torch.no_grad():
        wanted = {"logits": full(IDS).logits}
    found = []
    for model, quantization in (("store", None), ("model", section)):
        with engine_of(tmp_path / model, None, quantization, home="cpu") as engine:
            found.append(engine(IDS).logits)
            assert 1e-5 < error_of({"logits": found[-1]}, wanted) < 0.1
    assert torch.equal(*found)
    kept = tmp_path / "kept"
    to_fp8 = {"zinfer": {"device": "cpu", "quantization": {"bits": 8, "format": "fp8"}}}
    write_store(tmp_path / "model", kept, resolve_settings(to_fp8))
    errors = list(measure_errors(Checkpoint.open(tmp_path / "model"), Checkpoint.open(kept)))
    if name != "mxfp8":
        assert errors
        assert all(each.format == QuantFormat(8, is_float=True) and each.relative_error < 0.05 for each in errors)
        return
    assert not errors, "what is in e4m3 stays as it is published"
    with engine_of(kept, None, home="nvme") as engine:
        assert error_of({"logits": engine(IDS).logits}, wanted) <= 1e-5


@pytest.mark.parametrize("name", ["compressed fp8 in blocks", "compressed mxfp4"])
def test_layers_with_one_input_lie_side_by_side(name: str, tmp_path: Path) -> None:
    """Their codes, and the grids of their scales, whose parts have any size."""
    full = write_published(tmp_path, "llama", name)
    with torch.no_grad():
        wanted = {"logits": full(IDS).logits}
    with engine_of(tmp_path, None, home="none", replace_with_kernel_inject=True) as engine:
        kinds = [kind for kind in engine.injected.values() if "in one product" in kind]
        assert len(kinds) == 2 * full.config.num_hidden_layers, "queries, keys and values; gate and up"
        assert error_of({"logits": engine(IDS).logits}, wanted) <= 1e-5
        attention = engine.module.model.layers[1].self_attn
        one = joined_parameter([getattr(attention, leaf).weight for leaf in ("q_proj", "k_proj", "v_proj")])
        assert isinstance(one, QuantizedParameter)
        each = [getattr(attention, leaf).weight.dequantized() for leaf in ("q_proj", "k_proj", "v_proj")]
        assert torch.equal(one.dequantized(), torch.cat(each))
