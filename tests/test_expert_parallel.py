"""Ranks that divide experts by number compute what one process does, and read, keep and multiply with their own."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers.integrations.moe as transformers_experts
from checkpoints import VOCAB_SIZE, tiny_checkpoint, tiny_mixtral
from family_models import CASES, Tensors, family_inputs, family_model
from jobs_support import letters_tokenizer, prompt_rows, write_rows
from ragged_models import make_loud
from ranks_job_support import Job
from ranks_support import run_ranks
from test_foreign_engine import METHODS, write_quantized_experts
from test_tensor_parallel import IDS, MOST_ERROR, Found, check_alike, computed, error_of, texts
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import zinfer
from zinfer.errors import ConfigError
from zinfer.inject import grouped_experts
from zinfer.model.build import build_meta_model
from zinfer.model.matching import match_weights
from zinfer.model.sharding.cut import Shard
from zinfer.model.sharding.sharding import Sharding
from zinfer.model.sharding.weights import CutTensor
from zinfer.offload.block import Extent, SlabTensor
from zinfer.offload.stats import RunStats
from zinfer.weights import Checkpoint, TensorEntry

FAMILIES = ("Mixtral", "Qwen3Moe", "GptOss", "DeepseekV2", "DeepseekV3")
INPUTS = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
Given = tuple[Path, dict[str, Any], Tensors]


def config(
    size: int,
    homes: str = "cpu",
    quantization: Mapping[str, Any] | None = None,
    nvme_path: Path | None = None,
    replicas: int = 1,
    **more: Any,
) -> dict[str, Any]:
    options: dict[str, Any] = {"device": "cpu", "parallel": {"expert": size, "replicas": replicas}}
    if quantization is not None:
        options["quantization"] = dict(quantization)
    offload = {"device": homes} | ({"nvme_path": str(nvme_path)} if nvme_path else {})
    return {"zero_optimization": {"offload_param": offload}, "zinfer": options, **more}


def mixture(folder: Path, model_type: str, **shape: Any) -> Path:
    """A checkpoint of a mixture with a router for each of two layers."""
    torch.manual_seed(0)
    common = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB_SIZE}
    keys = common | {"num_experts_per_tok": 2, "eos_token_id": None, "pad_token_id": 1} | shape
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **keys), dtype=torch.float32)
    make_loud(made)
    return saved(made, folder)


def mixtral(folder: Path, num_experts: int) -> Path:
    return mixture(folder, "mixtral", intermediate_size=96, num_key_value_heads=2, num_local_experts=num_experts)


def saved(model: PreTrainedModel, folder: Path) -> Path:
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return folder


def families(folder: Path) -> list[tuple[Path, Tensors]]:
    """The tested mixtures with four experts, and gpt-oss whose tokens all choose the first two."""
    names = [f"{each}ForCausalLM" for each in FAMILIES]
    found = []
    for family, class_name in CASES:
        if class_name in names:
            model = family_model(family.model_type, class_name)
            inputs = family_inputs(model)
            found.append((saved(model, folder / class_name), inputs))
            if class_name == "GptOssForCausalLM":
                for layer in model.model.layers:
                    layer.mlp.router.bias.data = torch.tensor([100.0, 100, 0, 0])
                found.append((saved(model, folder / "one-sided"), inputs))
    assert len(found) == len(names) + 1
    return found


def three(rank: int, jobs: list[Given]) -> tuple[list[Found], tuple[list[tuple[int, ...]], int]]:
    return computed(rank, jobs), texts(rank, *jobs[0][:2])


@pytest.mark.slow
def test_uneven_experts_and_attention_that_all_ranks_hold(tmp_path: Path) -> None:
    """Three ranks do not divide four heads; no plan divides OLMoE's either."""
    of_olmoe = {"num_key_value_heads": 4, "intermediate_size": 32, "num_experts": 8}
    of_qwen = {"num_key_value_heads": 2, "intermediate_size": 96, "moe_intermediate_size": 32, "num_experts": 3}
    folders = [
        mixtral(tmp_path / "mixtral", 5),
        mixture(tmp_path / "olmoe", "olmoe", **of_olmoe),
        mixture(tmp_path / "qwen2_moe", "qwen2_moe", shared_expert_intermediate_size=48, **of_qwen),
    ]
    alone = computed(0, [(path, config(1), INPUTS) for path in folders])
    several = run_ranks(3, three, [(path, config(3), INPUTS) for path in folders])
    check_alike([found for found, _ in several], alone, [path.name for path in folders])
    tokens, _ = texts(0, folders[0], config(1))
    assert all(found == tokens for _, (found, _) in several)
    attention_bytes = 2 * (2 * 64 + 2 * 32) * 64 * 4
    loaded_bytes = sum(found[0][2].loaded_bytes for found, _ in several) - alone[0][2].loaded_bytes
    assert 2 * attention_bytes < loaded_bytes < 2.2 * attention_bytes, "attention is loaded three times"


@pytest.mark.parametrize("is_every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_homes_codes_and_bytes(tmp_path: Path, is_every: bool) -> None:
    """Of five experts one rank has three. Codes of whole experts are one process's; INT8 has scales of a row."""
    folder = mixtral(tmp_path / "mixtral", 5)
    only_experts = {"include": ["experts"]}
    quantized: list[Mapping[str, Any] | None] = [
        {"bits": 4, "group_size": 16},
        {"bits": 8, **only_experts},
        {"bits": 8, "format": "fp8", **only_experts},
    ]
    cases = [*(("cpu", each) for each in quantized), *((homes, None) for homes in ("cpu", "nvme", "none"))]
    cases += [("nvme", quantized[0]), ("none", quantized[1])]
    injected = [None, *quantized[:2]]
    if not is_every:
        cases, injected = [("cpu", None), ("nvme", None), ("nvme", quantized[0])], injected[:1]

    def jobs(size: int) -> list[Given]:
        kept = [tmp_path / "nvme" if each and homes == "nvme" else None for homes, each in cases]
        settings = [config(size, homes, each, path) for (homes, each), path in zip(cases, kept, strict=True)]
        settings += [config(size, "cpu", each, replace_with_kernel_inject=True) for each in injected]
        return [(folder, each, INPUTS) for each in (*settings, config(size, "cpu", {"bits": 8}))]

    alone, several = computed(0, jobs(1)), run_ranks(2, computed, jobs(2))
    check_alike(several, alone, [*map(str, cases), *(f"injected {each}" for each in injected)])
    for at, (homes, codes) in enumerate(cases):
        if codes is None:
            check_bytes([ranks[at] for ranks in several], alone[at], homes)
    (full, _, _), (codes_of_one, _, _) = alone[cases.index(("cpu", None))], alone[-1]
    for ranks in several:
        error = error_of(ranks[-1][0], full)
        assert 0 < error < 1.5 * error_of(codes_of_one, full), "attention has scales of a rank's columns"
    names = [path.name for path in (tmp_path / "nvme").iterdir()]
    assert sum(name.endswith(("-experts-0-of-2", "-experts-1-of-2")) for name in names) == 2, names


def check_bytes(several: list[Found], alone: Found, homes: str) -> None:
    """A rank has its experts, half of the other matrices, and norms and routers."""
    each_expert = 2 * 3 * 96 * 64 * 4

    def held(stats: RunStats) -> int:
        return stats.loaded_bytes + (stats.streamed_bytes_per_pass if homes == "nvme" else 0)

    rest = held(alone[2]) - 5 * each_expert
    slack_bytes = (2 * 2 + 1) * 64 * 4 + 2 * 5 * 64 * 4 + 256 * 9 * 3
    for (_, _, own), count in zip(several, (3, 2), strict=True):
        assert abs(held(own) - count * each_expert - rest / 2) <= slack_bytes, homes
        if homes == "nvme":
            read_bytes = own.bytes_read_disk / (own.passes + 1)  # once more while loading
            assert count * each_expert < read_bytes < count * each_expert + rest, "of columns whole rows are read"
        assert own.gathered_bytes == 0
        assert own.blocks_by_home == alone[2].blocks_by_home


@contextmanager
def counting(counts: list[int]) -> Iterator[None]:
    """Count the lines of every grouped product: transformers' own, and the fused one."""
    plain, fused = transformers_experts._grouped_mm, grouped_experts.grouped_linear

    def count_plain(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        assert int(offs[-1]) == len(x)
        counts.append(len(x))
        return plain(x, weight, offs)

    def count_fused(x: torch.Tensor, weight: Any, groups: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        counts.append(groups.num_pairs)
        return fused(x, weight, groups, bias)

    with (
        patch.object(transformers_experts, "_grouped_mm", count_plain),
        patch.object(grouped_experts, "grouped_linear", count_fused),
    ):
        yield


def multiplied(rank: int, folders: list[Path], size: int) -> list[tuple[list[int], list[list[int]]]]:
    """The lines of each product of a pass, and how often the routers chose each expert."""
    found = []
    for folder in folders:
        for is_injected in (False, True):
            chosen: list[list[int]] = []
            engine = zinfer.init_inference(folder, config(size, replace_with_kernel_inject=is_injected))

            def note(module: nn.Module, args: object, output: Any, chosen: list[list[int]] = chosen) -> None:
                chosen.append(torch.bincount(output[2].flatten(), minlength=4).tolist())

            for module in engine.module.modules():
                if type(module).__name__.lower().endswith("router"):
                    module.register_forward_hook(note)
            counts: list[int] = []
            with counting(counts):
                engine(**INPUTS)
            engine.destroy()
            found.append((counts, chosen))
    return found


def served(rank: int, folders: list[Path], size: int) -> list[tuple[list[tuple[int, ...]], int]]:
    return [texts(rank, folder, config(size)) for folder in folders]


def in_memory(rank: int, folder: Path, size: int) -> tuple[torch.Tensor, int]:
    """Logits of a module with its weights, and of how many experts it is given back."""
    module = AutoModelForCausalLM.from_pretrained(folder).eval()
    engine = zinfer.init_inference(module, ep_size=size, moe={"moe_experts": [5], "type": "standard"}, device="cpu")
    try:
        return engine(IDS).logits.clone(), len(module.model.layers[1].mlp.experts.down_proj)
    finally:
        engine.destroy()


def refused(rank: int, folder: Path, few: Path) -> list[str]:
    """What is said of other experts, and of other sizes than that of the group."""
    found = []
    given: list[dict[str, Any]] = [{"ep_size": 4, "moe": {"moe_experts": 8}}, {"ep_size": 3}]
    given.append({"ep_size": 4})
    for settings in given:
        with pytest.raises(ConfigError) as error:
            zinfer.init_inference(few if settings == given[-1] else folder, settings, device="cpu")
        found.append(str(error.value))
    return found


@dataclass(frozen=True)
class Twice:
    """The same on one process and on each of two ranks."""

    cases: list[tuple[Path, Tensors]]
    five: Path
    alone: "Several"
    ranks: "list[Several]"


@dataclass(frozen=True)
class Several:
    """What one rank computes of several kinds, one engine after the other."""

    found: list[Found]
    served: list[tuple[list[tuple[int, ...]], int]]
    counted: list[tuple[list[int], list[list[int]]]]
    in_memory: tuple[torch.Tensor, int]


def several(rank: int, cases: list[tuple[Path, Tensors]], five: Path, size: int) -> Several:
    folders = [folder for folder, _ in cases]
    jobs = [(folder, config(size), inputs) for folder, inputs in cases]
    counted = [folder for folder in folders if folder.name[:3] in ("Mix", "Gpt")]
    return Several(
        computed(rank, jobs),
        served(rank, folders, size),
        multiplied(rank, counted, size),
        in_memory(rank, five, size),
    )


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> Twice:
    cases, five = families(tmp_path_factory.mktemp("families")), mixtral(tmp_path_factory.mktemp("five"), 5)
    return Twice(cases, five, several(0, cases, five, 1), run_ranks(2, several, cases, five, 2))


@pytest.mark.slow
def test_families_on_two_ranks(twice: Twice) -> None:
    """Attention is divided too; gpt-oss once more with all pairs on the first rank."""
    names = [path.name for path, _ in twice.cases]
    check_alike([each.found for each in twice.ranks], twice.alone.found, names)


@pytest.mark.slow
def test_batches_are_continued_by_divided_experts(twice: Twice) -> None:
    for each in twice.ranks:
        for (tokens, streamed_bytes), (wanted, whole_bytes) in zip(each.served, twice.alone.served, strict=True):
            assert tokens == wanted
            assert streamed_bytes < 0.6 * whole_bytes


def test_a_rank_multiplies_its_own_pairs_alone(twice: Twice) -> None:
    """By transformers' products and by fused ones."""
    for rank, each in enumerate(twice.ranks):
        assert len(each.counted) == 4
        for (counts, chosen), (of_all, wanted) in zip(each.counted, twice.alone.counted, strict=True):
            assert chosen == wanted
            own = [sum(layer[2 * rank : 2 * rank + 2]) for layer in chosen]
            assert len(own) >= 2
            assert all(0 < number < IDS.numel() * 2 for number in own)
            assert counts == [number for number in own for _ in range(2)], "two products a layer"
            assert of_all == [IDS.numel() * 2] * len(counts)


def test_a_module_in_memory_is_divided(twice: Twice) -> None:
    logits, _ = twice.alone.in_memory
    for rank, each in enumerate(twice.ranks):
        found, num_experts = each.in_memory
        assert error_of({"logits": found}, {"logits": logits}) <= MOST_ERROR
        assert num_experts == (3, 2)[rank]


def four(rank: int, jobs: list[Given], folder: Path, few: Path) -> tuple[list[Found], list[str]]:
    return computed(rank, jobs), refused(rank, folder, few)


@pytest.mark.slow
def test_an_expert_a_rank_and_replicas_of_two(tmp_path: Path) -> None:
    cases = families(tmp_path)
    folder, few = mixtral(tmp_path / "mixtral", 4), mixtral(tmp_path / "few", 3)
    jobs = [(path, config(4), inputs) for path, inputs in cases]
    alone = computed(0, [(path, config(1), inputs) for path, inputs in (*cases, (folder, INPUTS))])
    found = run_ranks(4, four, [*jobs, (folder, config(2, replicas=2), INPUTS)], folder, few)
    check_alike([each for each, _ in found], alone, [*(path.name for path, _ in cases), "replicas"])
    for first, second in zip(found[:2], found[2:], strict=True):
        loaded_bytes = first[0][-1][2].loaded_bytes
        assert loaded_bytes == second[0][-1][2].loaded_bytes < 0.52 * alone[-1][2].loaded_bytes
    for _, (number, size, many) in found:
        assert number.startswith(
            "moe.moe_experts is 8, but a MixtralForCausalLM has 4 experts in each mixture; correct"
        )
        assert size.startswith(
            'zinfer.parallel = {"expert": 3} (ep_size) needs 3 ranks, and there are 4; start 3 ranks'
        )
        assert many.startswith("zinfer.parallel.expert (ep_size) = 4 is more than the 3 experts of model.layers.0.mlp")


@pytest.mark.slow
def test_a_job_of_replicas_writes_the_rows_of_one_process(tmp_path: Path) -> None:
    tokenizer = letters_tokenizer()
    tokenizer.save_pretrained(mixtral(tmp_path / "model", 4))
    write_rows(tmp_path / "in.jsonl", prompt_rows(12))
    (tmp_path / "ds.json").write_text(json.dumps(config(1)))
    one, several = (Job(tmp_path, name, "--batch-size", "4") for name in ("one.jsonl", "several.jsonl"))
    one.run(1)
    (tmp_path / "ds.json").write_text(json.dumps(config(2, replicas=2)))
    several.run(4)
    assert len(one.rows()) == 12
    assert several.rows() == one.rows()


@pytest.mark.slow
def test_codes_of_a_checkpoint_are_divided_by_experts(tmp_path: Path) -> None:
    """Of each method whose columns are in order; attention is in full precision."""
    methods = [method for method in METHODS if "order" not in method]
    for method in methods:
        write_quantized_experts(tmp_path / method, method, tiny_mixtral(), 32)
    alone = computed(0, [(tmp_path / method, config(1), INPUTS) for method in methods])
    several = run_ranks(2, computed, [(tmp_path / method, config(2), INPUTS) for method in methods])
    check_alike(several, alone, methods)
    for at in range(len(methods)):
        assert all(ranks[at][2].loaded_bytes < 0.52 * alone[at][2].loaded_bytes for ranks in several)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_bytes_of_other_experts_are_in_no_extent(tmp_path: Path, size: int) -> None:
    """Neither where a checkpoint holds experts one by one, nor where it holds them stacked."""
    gpt_oss = {"head_dim": 16, "num_key_value_heads": 2, "intermediate_size": 96, "num_local_experts": 5}
    for folder in (mixtral(tmp_path / "mixtral", 5), mixture(tmp_path / "gpt_oss", "gpt_oss", **gpt_oss)):
        checkpoint = Checkpoint.open(folder)
        held = {name: entry for name, entry in checkpoint.tensors.items() if ".experts." in name}
        read = dict.fromkeys(range(5), 0)
        for rank in range(size):
            own, found = range(*Shard(rank, size).bounds(5)), read_of_experts(checkpoint, Shard(rank, size, size))
            for extent in found:
                entry = next(each for each in held.values() if each.offset <= extent.offset < each.offset + each.nbytes)
                first, last = experts_in(entry, extent.offset - entry.offset, extent.nbytes)
                assert own.start <= first <= last < own.stop, entry.name
                assert extent.rows == 1, "without gaps"
                for number in range(first, last + 1):
                    read[number] += extent.nbytes // (last + 1 - first)
        assert sum(read.values()) == sum(each.nbytes for each in held.values())
        assert len(set(read.values())) == 1, "each once"


def read_of_experts(checkpoint: Checkpoint, shard: Shard) -> list[Extent]:
    """What one rank reads of a checkpoint's experts."""
    tree = build_meta_model(checkpoint, None)
    sharding = Sharding.of(tree, shard)
    weights = sharding.cut_weights(match_weights(tree, checkpoint))
    found = []
    for name, weight in weights.items():
        if ".experts." in name:
            assert isinstance(weight, CutTensor)
            found += [*weight.extents(SlabTensor(name, weight.dtype, weight.shape))]
    return found


def experts_in(entry: TensorEntry, begin: int, nbytes: int) -> tuple[int, int]:
    """The first and last number of the experts in bytes of a tensor: one expert's, or all of them."""
    alone = re.search(r"\.experts\.(\d+)\.", entry.name)
    if alone:
        return int(alone[1]), int(alone[1])
    each = entry.nbytes // entry.shape[0]
    return begin // each, (begin + nbytes - 1) // each


def test_experts_that_cannot_be_divided_are_refused(tmp_path: Path) -> None:
    few = AutoModelForCausalLM.from_pretrained(mixtral(tmp_path / "mixtral", 5))
    said = (
        r"zinfer.parallel.expert \(ep_size\) = 8 is more than the 5 experts of model.layers.0.mlp.experts; divide them"
    )
    with pytest.raises(ConfigError, match=said):
        Sharding.of(few, Shard(0, 8, 8))
    dense = AutoModelForCausalLM.from_pretrained(tiny_checkpoint("llama", tmp_path / "llama"))
    with pytest.raises(ConfigError, match=r"\(ep_size\) = 2: a LlamaForCausalLM has no experts to divide among ranks"):
        Sharding.of(dense, Shard(0, 2, 2))
    granite = AutoConfig.for_model("granitemoe", hidden_size=64, num_hidden_layers=1, num_local_experts=4)
    unknown = AutoModelForCausalLM.from_config(granite)
    with pytest.raises(ConfigError, match=r"how the experts of a GraniteMoeForCausalLM are divided is not known"):
        Sharding.of(unknown, Shard(0, 2, 2))
