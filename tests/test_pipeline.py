"""Stages of a pipeline: each has a part of the layers, and all compute what one process computes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import random_prompts, tiny_checkpoint, tiny_mixtral, tiny_model
from engines import loaded
from ranks_support import run_ranks
from transformers import BertConfig, BertForMaskedLM

import zinfer
from zinfer.errors import ConfigError
from zinfer.model.stage import divide
from zinfer.offload.stats import RunStats
from zinfer.ranks.mesh import Mesh

NUM_LAYERS = 5
Job = tuple[Path, dict[str, Any]]
Computed = tuple[torch.Tensor, torch.Tensor, RunStats]


def config(homes: str, stages: int = 1, bits: int | None = None, **options: Any) -> dict[str, Any]:
    own: dict[str, Any] = {"device": "cpu", "parallel": {"pipeline": stages}, **options}
    if bits is not None:
        own["quantization"] = {"bits": bits}
    return {"zero_optimization": {"offload_param": {"device": homes}}, "zinfer": own}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("stages")
    mixtral = folder / "mixtral"
    tiny_mixtral().save_pretrained(mixtral)
    return {
        "untied": tiny_checkpoint("llama", folder / "untied", num_layers=NUM_LAYERS, tie=False),
        "tied": tiny_checkpoint("llama", folder / "tied", num_layers=NUM_LAYERS, tie=True),
        "gpt2": tiny_checkpoint("gpt2", folder / "gpt2", num_layers=NUM_LAYERS),
        "opt": tiny_checkpoint("opt", folder / "opt", num_layers=NUM_LAYERS),
        "mixtral": mixtral,
    }


@pytest.mark.parametrize(
    ("sizes", "count", "ends"),
    [([1] * 5, 2, (2, 5)), ([4, 1, 1, 1, 1], 2, (1, 5)), ([1, 2, 3], 3, (1, 2, 3)), ([1, 1, 1, 9], 2, (3, 4))],
)
def test_layers_are_divided_by_bytes(sizes: list[int], count: int, ends: tuple[int, ...]) -> None:
    assert divide(sizes, count) == list(zip((0, *ends), ends, strict=False))


def computed(rank: int, jobs: list[Job]) -> list[Computed]:
    """Logits of a padded batch, greedy tokens and stats of each job."""
    found = []
    ids = torch.tensor(random_prompts(2, min_tokens=7, max_tokens=7))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    for folder, settings in jobs:
        with loaded(folder, settings) as engine:
            logits = engine(input_ids=ids, attention_mask=mask).logits
            tokens = engine.generate(input_ids=ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
            found.append((logits.clone(), tokens, engine.stats()))
    return found


CASES = [
    ("untied", "cpu", None),
    ("tied", "nvme", None),
    ("gpt2", "none", None),
    ("opt", "cpu", None),
    ("mixtral", "cpu", 8),
]


def check_stages(folders: dict[str, Path], cases: list[tuple[str, str, int | None]], stages: int) -> None:
    several = run_ranks(stages, computed, [(folders[name], config(homes, stages, bits)) for name, homes, bits in cases])
    [alone] = run_ranks(1, computed, [(folders[name], config(homes, 1, bits)) for name, homes, bits in cases])
    for place, (case, (logits, tokens, whole)) in enumerate(zip(cases, alone, strict=True)):
        assert len(set(tokens.flatten().tolist())) > 8, "tokens that any model would give"
        found = [rank[place] for rank in several]
        for own_logits, own_tokens, _ in found:
            assert torch.allclose(own_logits, logits, atol=1e-5), case
            assert torch.equal(own_tokens, tokens), case
        check_bytes([stats for _, _, stats in found], whole, case)


def check_bytes(found: list[RunStats], whole: RunStats, case: object) -> None:
    """Each stage reads, keeps and streams its layers alone; together they have each byte once, but for tied heads."""
    page_bytes = 4096 * (NUM_LAYERS + 3)
    num_twice = 131 * 64 * 4 * ("tied" in str(case) or "gpt2" in str(case) or "opt" in str(case))
    assert sum(each.streamed_bytes_per_pass for each in found) == whole.streamed_bytes_per_pass, case
    loaded_bytes = sum(each.loaded_bytes for each in found)
    assert abs(loaded_bytes - whole.loaded_bytes) <= page_bytes + num_twice, case
    num_layers = [sum(each.blocks_by_home.values()) for each in found]
    assert max(num_layers) < sum(whole.blocks_by_home.values()), case
    most = (NUM_LAYERS + len(found) - 1) // len(found) / NUM_LAYERS  # of five layers on two stages, three on one
    for each in found:
        assert each.streamed_bytes_per_pass <= most * whole.streamed_bytes_per_pass + page_bytes, case
        assert each.loaded_bytes <= most * whole.loaded_bytes + page_bytes + num_twice, case


def test_stages_compute_the_logits_of_one_process(folders: dict[str, Path]) -> None:
    check_stages(folders, CASES, 2)


@pytest.mark.slow
def test_four_stages_compute_the_logits_of_one_process(folders: dict[str, Path]) -> None:
    check_stages(folders, [CASES[0], ("gpt2", "cpu", None)], 4)


def refused(rank: int, folders: dict[str, Path]) -> list[str]:
    """What is said about models and calls that stages cannot serve."""
    said = []
    for name in ("mixtral", "bert"):
        with pytest.raises(ConfigError) as error:
            zinfer.init_inference(folders[name], config("cpu", 3))
        said.append(str(error.value))
    with loaded(folders["tied"], config("cpu", 3)) as engine, pytest.raises(ConfigError) as error:
        engine(input_ids=torch.tensor([[2, 3, 4]]), output_hidden_states=True)
    said.append(str(error.value))
    return said


def test_what_stages_cannot_serve_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    BertForMaskedLM(BertConfig(vocab_size=40, **sizes)).save_pretrained(tmp_path)
    for said in run_ranks(3, refused, {**folders, "bert": tmp_path}):
        few, bert, hidden = said
        assert few == (
            "zinfer.parallel.pipeline is 3, but a MixtralForCausalLM of 2 layers has only that many stages; set it to "
            "2 at most, and replicas for the other ranks"
        )
        assert bert.startswith(
            "zinfer.parallel.pipeline: stages need a model that runs in ragged batches, which a Bert"
        )
        assert hidden.startswith("output_hidden_states: a stage (zinfer.parallel.pipeline) has only its own")
    mesh = Mesh.of({"pipeline": 2, "replicas": 2}, ["a"] * 4)
    assert [mesh.ranks_in_step(rank) for rank in range(4)] == [(0, 1), (0, 1), (2, 3), (2, 3)]


def of_modules(rank: int, folder: Path, homes: Path | None) -> tuple[torch.Tensor, list[str], int]:
    """Logits of a module in memory, or of a packed copy; the module's parameters after; bytes that stream."""
    ids = torch.tensor(random_prompts(1, min_tokens=7, max_tokens=7))
    stages = {"pipeline": 2}
    if homes is not None:
        offload = {"device": "nvme", "nvme_path": str(homes)}
        own = {"device": "cpu", "parallel": stages, "quantization": {"bits": 8}}
        given: dict[str, Any] = {"zero_optimization": {"offload_param": offload}, "zinfer": own}
        with loaded(folder, given) as engine:
            return engine(input_ids=ids).logits.clone(), [], engine.stats().disk_bytes_per_pass
    model = tiny_model("llama", num_layers=NUM_LAYERS, tie=True)
    names, numbers = list(model.state_dict(keep_vars=True)), model.config.num_hidden_layers
    with loaded(model, config("cpu", 2)) as engine:
        logits = engine(input_ids=ids).logits.clone()
        assert model.config.num_hidden_layers < numbers
    assert model.config.num_hidden_layers == numbers
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == list(range(numbers))
    assert names == list(model.state_dict(keep_vars=True)), "the module is whole again"
    return logits, names, 0


@pytest.mark.slow
def test_stages_of_modules_in_memory_and_of_packed_copies(folders: dict[str, Path], tmp_path: Path) -> None:
    ids = torch.tensor(random_prompts(1, min_tokens=7, max_tokens=7))
    model = tiny_model("llama", num_layers=NUM_LAYERS, tie=True)
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
    for logits, _, _ in run_ranks(2, of_modules, folders["tied"], None):
        assert torch.allclose(logits, wanted, atol=1e-5)
    with loaded(folders["tied"], config("none", 1, 8)) as engine:
        quantized = engine(input_ids=ids).logits.clone()
    first, second = run_ranks(2, of_modules, folders["tied"], tmp_path)
    assert torch.equal(first[0], second[0])
    assert min(first[2], second[2]) > 0, "each stage streams its layers from the copy"
    assert torch.allclose(first[0], quantized, atol=1e-5)
    assert not torch.allclose(first[0], wanted, atol=1e-3), "INT8 rounds"
    assert len(list(tmp_path.iterdir())) == 1, "one copy for both"
