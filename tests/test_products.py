"""Ranks that divide layers, or a pipeline's stages, and share the bytes of their part with ranks of other rows."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import random_prompts, tiny_checkpoint, tiny_mixtral
from engines import loaded
from jobs_support import letters_model, prompt_rows, read_rows, write_rows
from ranks_support import Failed, Ranks, run_ranks
from test_foreign_engine import write_quantized

from zinfer.errors import RankError
from zinfer.jobs.job import run_job
from zinfer.jobs.summary import JobSummary
from zinfer.offload.block import Block, Extent, SlabLayout, SlabTensor
from zinfer.offload.partition import Partition
from zinfer.offload.stats import RunStats
from zinfer.ranks.mesh import Mesh

NUM_LAYERS = 4
MOST_ERROR = 1e-5
SHARES = (0, 1)
Computed = tuple[torch.Tensor, torch.Tensor, RunStats]
INT4 = {"bits": 4, "group_size": 16}
DIVISIONS: dict[str, list[tuple[str, str, dict[str, Any] | None]]] = {
    "tensor": [("gpt2", "nvme", None), ("mixtral", "cpu", INT4), ("ordered", "cpu", None)],
    "expert": [("mixtral", "nvme", None)],
    "pipeline": [("llama", "cpu", None)],
}
"""Models, homes and quantization by the mode that divides them."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("products")
    tiny_mixtral().save_pretrained(folder / "mixtral")
    write_quantized(folder / "ordered", "gptq in activation order", None, 16)
    return {
        "llama": tiny_checkpoint("llama", folder / "llama", num_layers=NUM_LAYERS, tie=False),
        "gpt2": tiny_checkpoint("gpt2", folder / "gpt2", num_layers=NUM_LAYERS),
        "mixtral": folder / "mixtral",
        "ordered": folder / "ordered",
    }


def config(homes: str, parallel: dict[str, int], quantization: dict[str, Any] | None = None) -> dict[str, Any]:
    own: dict[str, Any] = {"device": "cpu", "parallel": parallel}
    if quantization is not None:
        own["quantization"] = quantization
    return {"zero_optimization": {"offload_param": {"device": homes}}, "zinfer": own}


@dataclass(frozen=True)
class Job:
    """A model, its configuration, and the number of a group of ranks in step, which chooses the inputs."""

    folder: Path
    config: dict[str, Any]
    share: int | None

    @classmethod
    def of(cls, folders: dict[str, Path], mode: str, share: int | None, **parallel: int) -> "list[Job]":
        cases = DIVISIONS[mode]
        return [cls(folders[model], config(homes, parallel, codes), share) for model, homes, codes in cases]


def computed(rank: int, jobs: list[Job]) -> list[Computed]:
    """Logits, greedy tokens and stats of each job, with inputs and a number of calls that differ by share."""
    found = []
    for job in jobs:
        share = Mesh(**job.config["zinfer"]["parallel"]).share_of(rank) if job.share is None else job.share
        ids = torch.tensor(random_prompts(2, min_tokens=7, max_tokens=7, seed=share + 1))
        with loaded(job.folder, job.config) as engine:
            logits = [engine(input_ids=ids).logits for _ in range(1 + share)][-1]
            mask = torch.ones_like(ids)
            tokens = engine.generate(input_ids=ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
            found.append((logits.clone(), tokens, engine.stats()))
    return found


def parting(rank: int, folder: Path) -> str:
    """Rank 0 reads a layer, which the one that divides layers with it does not."""
    try:
        with loaded(folder, config("cpu", {"zero": 2, "tensor": 2})) as engine:
            if rank == 0:
                engine.layers[1].state_dict()
            engine(input_ids=torch.tensor([[3, 4, 5]]))
        return "computed"
    except RankError as error:
        return str(error)


def first_together(rank: int, jobs: list[Job], folder: Path) -> tuple[list[Computed], str]:
    return computed(rank, jobs), parting(rank, folder)


@pytest.mark.slow
def test_a_shared_part_computes_the_bits_of_an_unshared_one(folders: dict[str, Path]) -> None:
    """Of four ranks, each two divide a model, and each two hold the same part. At last their calls differ."""
    products = [job for mode in DIVISIONS for job in Job.of(folders, mode, None, zero=2, **{mode: 2})]
    found = run_ranks(4, first_together, products, folders["llama"])
    several, said = [each for each, _ in found], [each for _, each in found]
    assert "was given other arguments" in said[0], said
    assert all("must make the same calls in the same order" in each for each in said), said
    several_jobs = [(mode, share) for mode in DIVISIONS for share in SHARES]
    divided = run_ranks(2, computed, [job for each in several_jobs for job in Job.of(folders, *each, **{each[0]: 2})])
    alone = computed(0, [job for each in several_jobs for job in Job.of(folders, *each)])
    begin = begin_apart = 0
    for mode, cases in DIVISIONS.items():
        mesh = Mesh(**{mode: 2, "zero": 2})
        for share in SHARES:
            members = [rank for rank in range(4) if mesh.share_of(rank) == share]
            for place, case in enumerate(cases):
                logits, tokens, _ = alone[begin_apart + place]
                for rank, parts in zip(members, divided, strict=True):
                    told = f"{mode}, {case}, rank {rank}"
                    own_logits, own_tokens, stats = several[rank][begin + place]
                    part_logits, part_tokens, part = parts[begin_apart + place]
                    assert torch.equal(own_logits, part_logits), told
                    assert torch.equal(own_tokens, part_tokens), told
                    assert float((own_logits - logits).abs().max() / logits.abs().max()) <= MOST_ERROR, told
                    assert torch.equal(own_tokens, tokens), told
                    check_bytes(stats, part, case[1] == "cpu", told)
            begin_apart += len(cases)
        begin += len(cases)


def check_bytes(own: RunStats, part: RunStats, is_on_host: bool, told: str) -> None:
    """A rank reads, keeps and streams half of its part, and gathers the other half in every pass."""
    page_bytes = 4096 * (NUM_LAYERS + 3)
    assert abs(own.loaded_bytes - part.loaded_bytes / 2) <= page_bytes, told
    assert abs(own.streamed_bytes_per_pass - part.streamed_bytes_per_pass / 2) <= 256 * (NUM_LAYERS + 3), told
    assert abs(own.disk_bytes_per_pass - part.disk_bytes_per_pass / 2) <= page_bytes, told
    if is_on_host:
        assert own.host_bytes <= part.host_bytes / 2 + page_bytes, told
    assert own.gathered_bytes >= own.passes * (part.streamed_bytes_per_pass // 2) > 0, told


def filled(extents: Sequence[Extent], file: torch.Tensor, nbytes: int) -> torch.Tensor:
    """The bytes that extents put into a slab, run by run."""
    slab = torch.zeros(nbytes, dtype=torch.uint8)
    for extent in extents:
        run, slab_run = extent.nbytes // extent.rows, extent.slab_nbytes // extent.rows
        for row in range(extent.rows):
            begin, place = extent.offset + row * extent.pitch, extent.slab_offset + row * extent.slab_pitch
            values = file[begin : begin + run].view(extent.dtype).to(extent.slab_dtype)
            slab[place : place + slab_run] = values.view(torch.uint8)
    return slab


@pytest.mark.parametrize("seed", range(40))
def test_ranges_of_columns_fill_the_slab(seed: int) -> None:
    """Of few long runs and of many short ones, cast or not."""
    draw = random.Random(seed)
    rows, columns, all_columns = draw.randint(1, 40), draw.randint(1, 300), 320
    dtype, slab_dtype = draw.choice([(torch.float32, torch.float32), (torch.float16, torch.float32)])
    size, slab_size = dtype.itemsize, slab_dtype.itemsize
    place = draw.randint(0, all_columns - columns)
    file = torch.randn(rows * all_columns).to(dtype).view(torch.uint8)
    tensor = SlabTensor("columns", slab_dtype, (rows, columns))
    extent = Extent(Path("file"), place * size, rows * columns * size, dtype, 0, slab_dtype)
    if rows > 1:
        extent = Extent(
            *(Path("file"), place * size, rows * columns * size, dtype, 0, slab_dtype),
            *(rows, all_columns * size, columns * slab_size),
        )
    block = Block(0, "block", SlabLayout((tensor,)), (extent,))
    whole = filled(block.extents, file, block.nbytes)
    size = draw.randint(2, 5)
    parts = [Partition(rank, size).share_of(block) for rank in range(size)]
    found = [filled(each.extents, file, each.layout.tensors[0].nbytes) for each in parts]
    assert torch.equal(torch.cat(found), whole)
    assert all(len(each.extents) <= 3 for each in parts)


def job(rank: int, folder: Path, output: str, parallel: object) -> JobSummary:
    given = config("cpu", {}) | {"zinfer": {"parallel": parallel}}
    files = (folder / "model", folder / "in.jsonl", folder / output)
    return run_job(*files, config=given, device="cpu", batch_size=4)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "mode",
    ["tensor", pytest.param("pipeline", marks=pytest.mark.slow), pytest.param("replicas", marks=pytest.mark.slow)],
)
def test_a_job_of_a_product_writes_the_rows_of_one_process(tmp_path: Path, mode: str) -> None:
    letters_model(tmp_path / "model", num_layers=NUM_LAYERS)
    write_rows(tmp_path / "in.jsonl", prompt_rows(16))
    alone = job(0, tmp_path, "alone.jsonl", "auto")
    found = run_ranks(4, job, tmp_path, "product.jsonl", {mode: 2, "zero": 2})
    wanted, rows = ({row["id"]: row for row in read_rows(tmp_path / f"{name}.jsonl")} for name in ("alone", "product"))
    assert len(rows) == len(wanted) == 16
    assert rows == wanted
    assert alone.stats is not None
    for stats in (found[0].stats, *found[0].other_ranks):
        assert stats is not None
        assert stats.passes > 0, "all ranks compute"
        assert stats.gathered_bytes > 0
        share = 2 if mode == "replicas" else 4
        assert stats.host_bytes == pytest.approx(alone.stats.host_bytes / share, rel=0.15)


def lasting(rank: int, folder: Path, parallel: dict[str, int], begun: Path) -> str:
    """Calls until another rank fails; returns what it says."""
    with loaded(folder, config("cpu", parallel)) as engine:
        while True:
            try:
                engine(input_ids=torch.tensor([[3, 4, 5, 6]]))
                (begun / str(rank)).touch()
            except RankError as error:
                return str(error)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["tensor", "pipeline"])
def test_a_killed_rank_ends_all_of_a_product(folders: dict[str, Path], tmp_path: Path, mode: str) -> None:
    with Ranks(4, lasting, folders["llama"], {mode: 2, "zero": 2}, tmp_path) as ranks:
        ranks.wait_until(lambda: all((tmp_path / str(rank)).exists() for rank in range(4)))
        ranks.kill(3)
        *others, lost = ranks.results()
    assert lost is None
    assert not any(isinstance(each, Failed) for each in others), others
    assert all("rank 3" in each for each in others), others
