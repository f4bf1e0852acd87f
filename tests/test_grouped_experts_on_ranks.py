"""Groups of ranks divide experts by number, and the ranks of a group each expert's matrices; all of them the rest."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import tiny_mixtral
from family_models import Tensors
from jobs_support import letters_tokenizer, prompt_rows, write_rows
from ranks_job_support import Job
from ranks_support import run_ranks
from store_support import make_store, write_module
from test_expert_parallel import INPUTS, families, mixtral, mixture
from test_foreign_engine import write_quantized_experts
from test_tensor_parallel import Found, check_alike, computed, texts

from zinfer.errors import ConfigError
from zinfer.model.build import build_meta_model
from zinfer.model.matching import match_weights
from zinfer.model.sharding.cut import Cut, Shard
from zinfer.model.sharding.sharding import Sharding
from zinfer.model.sharding.weights import CutTensor
from zinfer.offload.block import Extent, SlabTensor
from zinfer.weights import Checkpoint

SIZES = {"expert": 2, "tensor": 2}
ALONE: dict[str, int] = {}
Given = tuple[Path, dict[str, Any], Tensors]


def config(parallel: dict[str, int], homes: str = "cpu", nvme_path: Path | None = None, **more: Any) -> dict[str, Any]:
    offload = {"device": homes} | ({"nvme_path": str(nvme_path)} if nvme_path else {})
    section = {"device": "cpu", "parallel": parallel} | more.pop("zinfer", {})
    return {"zero_optimization": {"offload_param": offload}, "zinfer": section, **more}


def all_of_it(rank: int, jobs: list[Given], folders: list[Path], parallel: dict[str, int]) -> tuple[list[Found], Any]:
    return computed(rank, jobs), [texts(rank, folder, config(parallel)) for folder in folders]


@pytest.mark.slow
@pytest.mark.parametrize("is_every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_four_ranks_compute_what_one_does(tmp_path: Path, is_every: bool) -> None:
    """Families, homes, codes made while loading and codes of checkpoints, with five experts on two groups."""
    cases = families(tmp_path / "families")
    cases = cases if is_every else [each for each in cases if each[0].name.startswith("GptOss")]
    five = mixtral(tmp_path / "five", 5)
    cases.append((shared_and_routed(tmp_path / "qwen2_moe"), INPUTS))
    int4 = {"zinfer": {"quantization": {"bits": 4, "group_size": 16}}}
    all_homes = ("cpu", "nvme", "none") if is_every else ("nvme",)
    stored = [tmp_path / name for name in (("store", "gptq", "compressed-tensors int8") if is_every else ("store",))]
    make_store(write_module(tiny_mixtral(), tmp_path / "module"), stored[0], bits=4, group_size=16)
    for path in stored[1:]:
        write_quantized_experts(path, path.name, tiny_mixtral(), 16)
    ways: list[tuple[Path, dict[str, Any], Tensors]] = [(folder, {}, inputs) for folder, inputs in cases]
    ways += [(five, {"homes": homes}, INPUTS) for homes in all_homes]
    injected = (True, False) if is_every else (True,)
    ways += [(five, {**int4, "replace_with_kernel_inject": each}, INPUTS) for each in injected]
    ways += [(five, {**int4, "homes": "nvme", "nvme_path": tmp_path / "nvme"}, INPUTS)]
    ways += [(folder, {}, INPUTS) for folder in stored]

    def jobs(parallel: dict[str, int]) -> list[Given]:
        return [(folder, config(parallel, **way), inputs) for folder, way, inputs in ways]

    served = [five, cases[-2][0]]
    alone, wanted = all_of_it(0, jobs(ALONE), served, ALONE)
    several = run_ranks(4, all_of_it, jobs(SIZES), served, SIZES)
    names = [f"{folder.name} {way}" for folder, way, _ in ways]
    check_alike([found for found, _ in several], alone, names)
    for _, found in several:
        for (tokens, streamed_bytes), (of_one, whole_bytes) in zip(found, wanted, strict=True):
            assert tokens == of_one
            assert streamed_bytes < 0.36 * whole_bytes
    for at, homes in enumerate(all_homes, len(cases)):
        check_bytes([found[at] for found, _ in several], alone[at], homes)
    for place, folder in enumerate(stored, len(ways) - len(stored)):
        loaded = [found[place][2].loaded_bytes for found, _ in several]
        assert max(loaded) < 0.3 * alone[place][2].loaded_bytes, folder.name
    kept = sorted(path.name[-17:] for path in (tmp_path / "nvme").iterdir() if "experts" in path.name)
    assert kept == [f"-2-experts-{rank}-of-4" for rank in range(4)]


def shared_and_routed(folder: Path) -> Path:
    """A Qwen2-MoE with a dense layer before one of six experts, of which one serves all tokens."""
    widths = {"intermediate_size": 96, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}
    return mixture(folder, "qwen2_moe", num_key_value_heads=2, num_experts=5, mlp_only_layers=[0], **widths)


def check_bytes(several: list[Found], alone: Found, homes: str) -> None:
    """A rank has half of each of its group's experts, and a quarter of the rest: a head of four, one of keys of two."""
    each_expert, keys, whole = 2 * 3 * 96 * 64 * 4, 2 * 2 * 32 * 64 * 4, (5 + 2 * 5) * 64 * 4

    def held(found: Found) -> int:
        return found[2].loaded_bytes + (found[2].streamed_bytes_per_pass if homes == "nvme" else 0)

    rest = held(alone) - 5 * each_expert - keys - whole
    slack_bytes = 256 * 9 * 3
    for found, count in zip(several, (3, 3, 2, 2), strict=True):
        assert abs(held(found) - count * each_expert / 2 - rest / 4 - keys / 2 - whole) <= slack_bytes, homes
        assert found[2].gathered_bytes == 0
        assert found[2].blocks_by_home == alone[2].blocks_by_home


@pytest.mark.slow
def test_a_job_on_four_ranks_writes_the_rows_of_one(tmp_path: Path) -> None:
    tokenizer = letters_tokenizer()
    tokenizer.save_pretrained(mixtral(tmp_path / "model", 4))
    write_rows(tmp_path / "in.jsonl", prompt_rows(12))
    (tmp_path / "ds.json").write_text(json.dumps(config(ALONE)))
    one, several = (Job(tmp_path, name, "--batch-size", "4") for name in ("one.jsonl", "several.jsonl"))
    one.run(1)
    (tmp_path / "ds.json").write_text(json.dumps(config(SIZES)))
    several.run(4)
    assert len(one.rows()) == 12
    assert several.rows() == one.rows()


@pytest.mark.slow
def test_parts_are_shared_by_two_groups(tmp_path: Path) -> None:
    jobs = [(mixtral(tmp_path / "model", 5), homes) for homes in ("cpu", "nvme")]
    alone = computed(0, [(folder, config(ALONE, homes), INPUTS) for folder, homes in jobs])
    sizes = {"zero": 2, **SIZES}
    several = run_ranks(8, computed, [(folder, config(sizes, homes), INPUTS) for folder, homes in jobs])
    check_alike(several, alone, [homes for _, homes in jobs])
    assert sum(found[0][2].loaded_bytes for found in several) < 1.1 * alone[0][2].loaded_bytes


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("experts", "tensor"), [(2, 2), (3, 2), (2, 3)])
def test_each_byte_of_experts_is_read_once(tmp_path: Path, experts: int, tensor: int) -> None:
    """Both where a checkpoint holds experts one by one, and where it holds them stacked, with their biases."""
    heads = {"num_attention_heads": 12, "num_key_value_heads": 12}
    one_by_one = {"intermediate_size": 96, "num_local_experts": 5}
    stacked = {**one_by_one, "head_dim": 16}
    for kind, shape in (("mixtral", one_by_one), ("gpt_oss", stacked)):
        checkpoint = Checkpoint.open(mixture(tmp_path / kind, kind, **shape, **heads, hidden_size=48))
        held = {name: entry for name, entry in checkpoint.tensors.items() if ".experts." in name}
        (file,) = {entry.file for entry in held.values()}
        read = np.zeros(file.stat().st_size, np.int64)
        for rank in range(experts * tensor):
            for extent in read_of_experts(checkpoint, Shard(rank, experts * tensor, experts)):
                for row in range(extent.rows):
                    begin = extent.offset + row * extent.pitch
                    read[begin : begin + extent.nbytes // extent.rows] += 1
        for name, entry in held.items():
            assert set(read[entry.offset : entry.offset + entry.nbytes]) == {1}, name
        assert read.sum() == sum(entry.nbytes for entry in held.values()), "nothing else"


def read_of_experts(checkpoint: Checkpoint, shard: Shard) -> list[Extent]:
    tree = build_meta_model(checkpoint, None)
    sharding = Sharding.of(tree, shard)
    found = []
    for name, weight in sharding.cut_weights(match_weights(tree, checkpoint)).items():
        if ".experts." in name:
            assert isinstance(weight, CutTensor)
            found += [*weight.extents(SlabTensor(name, weight.dtype, weight.shape))]
    return found


@pytest.mark.parametrize("dim", [1, 2])
def test_a_cut_within_a_range_of_slices(dim: int) -> None:
    """Its values are those of the cut of the slices, also read in parts of one slice and of all."""
    whole = torch.arange(5 * 6 * 8).view(5, 6, 8)
    cut = Cut(dim, ((1, 3), (4, 6)), within=(1, 4))
    wanted = Cut(dim, cut.ranges).of(whole[1:4])
    assert torch.equal(cut.of(whole), wanted)
    assert cut.shape((5, 6, 8)) == wanted.shape
    for pieces in ([(0, 240)], [(48 * number, 48 * (number + 1)) for number in range(5)]):
        found, flat = torch.full((wanted.numel(),), -1), whole.flatten()
        for begin, end in pieces:
            for runs in cut.runs((5, 6, 8), begin, end):
                for number in range(runs.count):
                    source, place = begin + runs.begin + number * runs.pitch, runs.place + number * runs.place_pitch
                    found[place : place + runs.numel] = flat[source : source + runs.numel]
        assert torch.equal(found.view(wanted.shape), wanted)


def test_places_of_four_ranks() -> None:
    """The rank's place gives its group, by which it has experts, and its place in it, by which it has their rows."""
    several = [Shard(rank, 4, 2) for rank in range(4)]
    assert [(each.by_number.rank, each.within.rank) for each in several] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [str(each) for each in several[:1]] == ["0 of 4, by experts in 2 groups"]


def test_heads_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    tree = build_meta_model(Checkpoint.open(mixtral(tmp_path, 6)), None)
    said = "zinfer.parallel.expert x tensor = 6 does not divide 4 attention heads and 2 of keys and values; "
    with pytest.raises(ConfigError, match=f"^{said}sizes that do are 1, 2, 4$"):
        Sharding.of(tree, Shard(0, 6, 3))
