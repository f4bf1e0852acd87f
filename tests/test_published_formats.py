"""Floats of 8 and 4 bits run as they are published: their values, their bytes, from every home."""

from pathlib import Path
from typing import Final

import pytest
import torch
from checkpoints import left_padded, random_prompts
from packed_cache_support import engine_of
from published_formats import write_published
from ranks_support import run_ranks
from safetensors.torch import load_file
from test_tensor_parallel import IDS, check_alike, computed, config, error_of
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import zinfer
from zinfer.weights.parameter import QuantizedParameter

CASES: Final = [("gpt_oss", "mxfp4")]


def published_bytes(folder: Path) -> int:
    """Of the parameters of a model: without static scales and buffers."""
    aside = ("input_scale", "input_global_scale", "k_scale", "e_score_correction_bias")
    stored = load_file(folder / "model.safetensors")
    return sum(value.nbytes for name, value in stored.items() if not name.endswith(aside))


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


@pytest.mark.parametrize(("family", "name"), [("gpt_oss", "mxfp4")])
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
    """Layers by rows and columns, from host memory and from the file; mixtures by number too."""
    for family, name in CASES:
        write_published(tmp_path / f"{family} {name}", family, name)
    inputs = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    folders = [tmp_path / f"{family} {name}" for family, name in CASES]
    one, two = ([(folder, config(size), inputs) for folder in folders] for size in (1, 2))
    by_number = {"zinfer": {"device": "cpu", "parallel": {"expert": 2}}}
    mixtures = [folder for folder in folders if not folder.name.startswith("llama")]
    one += [(folder, config(1), inputs) for folder in mixtures]
    two += [(folder, config(1) | {"tensor_parallel": {}} | by_number, inputs) for folder in mixtures]
    alone = computed(0, one)
    check_alike(run_ranks(2, computed, two), alone, [folder.name for folder in (*folders, *mixtures)])


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
