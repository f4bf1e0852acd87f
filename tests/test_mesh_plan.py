"""The table of meshes against hand arithmetic, and how `zinfer plan` chooses among them."""

import io
import json
import random
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import pytest
from plan_support import SMALL_LLAMA, machine_with, outline_of, rates, write_config
from rich.console import Console
from typer.testing import CliRunner, Result

from zinfer.cli import app
from zinfer.config import resolve_settings
from zinfer.config.settings import Settings
from zinfer.model.outline import Outline, read_outline
from zinfer.offload.block import Tier
from zinfer.planning.job_estimator import JobEstimator
from zinfer.planning.job_plan import Job, JobPlan, SizedJob
from zinfer.planning.job_search import plan_job
from zinfer.planning.memory import Request
from zinfer.planning.mesh_plan import (
    MeshPlan,
    batch_planner,
    expert_meshes_of,
    fastest_mesh,
    job_planner,
    mesh_table,
    meshes_of,
    of_mesh,
    pipeline_meshes_of,
    plan_meshes,
)
from zinfer.planning.plan import BatchPlan, Case
from zinfer.planning.presets import PRESETS
from zinfer.planning.simulation import simulate
from zinfer.probe.rates import Rates
from zinfer.ranks.mesh import Mesh

FROM_HOST = resolve_settings({"zero_optimization": {"offload_param": {"device": "cpu"}}})
FROM_DISK = resolve_settings({"zero_optimization": {"offload_param": {"device": "nvme"}}})
REQUEST = Request(16, 8, 8)
LINK, TOGETHER, GATHER, REDUCE = 10e6, 15e6, 12e6, 1e12
KNOWN = {"gather_bytes_per_s": GATHER, "all_reduce_bytes_per_s": REDUCE, "links_together": ((2, TOGETHER),)}
SLOW: Rates = replace(rates(link_bytes_per_s=LINK), **KNOWN)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def outline(tmp_path_factory: pytest.TempPathFactory) -> Outline:
    return outline_of(write_config(tmp_path_factory.mktemp("small"), SMALL_LLAMA))


def planned(
    outline: Outline,
    settings: Settings = FROM_HOST,
    speeds: Rates = SLOW,
    *,
    host_bytes: int = 10**10,
    ranks: int = 2,
    nodes: int = 1,
) -> dict[Mesh, MeshPlan]:
    """The meshes of a batch of eight rows a rank."""
    case = Case(outline, machine_with(2_000_000_000, host_bytes, speeds), settings)
    request = replace(REQUEST, batch_size=8 * ranks)
    found = plan_meshes(case, meshes_of(ranks, nodes), nodes, batch_planner(request))
    assert [each.tokens_per_s for each in found] == sorted((each.tokens_per_s for each in found), reverse=True)
    return {each.mesh: each for each in found}


def batch_plan(found: MeshPlan) -> BatchPlan:
    assert isinstance(found.planned, BatchPlan)
    return found.planned


def layers_bytes(outline: Outline) -> int:
    return sum(outline.plain_blocks[index].nbytes for index in outline.layers)


DRAW = random.Random(0)
MIXED = [(DRAW.randint(16, 1500), min(int(DRAW.expovariate(1 / 60)) + 1, 400)) for _ in range(400)]
"""Tokens of prompts, and new ones."""


def four_ranks() -> Case:
    """Llama-3-70B in INT4 on four RTX 4090, each with a fourth of the weights."""
    settings = resolve_settings({"zinfer": {"parallel": {"zero": 4}, "quantization": {"bits": 4, "group_size": 128}}})
    case = Case(read_outline(Path("llama-3-70b"), settings.dtype, settings.quantization), PRESETS["rtx4090"], settings)
    return of_mesh(case, Mesh(zero=4))


def seconds_by_rank(estimator: JobEstimator) -> tuple[float, float]:
    """Of the mixed rows, each fourth one a rank's: the seconds of the rank with the most, and those of all in step."""
    ranks = []
    for rank in range(4):
        prompt_lens, new_tokens = zip(*MIXED[rank::4], strict=True)
        passes = simulate(prompt_lens, new_tokens, estimator.budget, order=estimator.order)
        ranks.append([estimator.time_of(size).seconds for size in passes])
    return max(map(sum, ranks)), sum(map(max, zip_longest(*ranks, fillvalue=0.0)))


def test_ranks_in_step_wait_for_the_largest_pass_of_all() -> None:
    case = four_ranks()
    batching = replace(case.settings.batching, tokens_per_pass=4096, max_sequences=64, kv_cache_memory=4 * 10**9)
    job = Job(len(MIXED), *map(list, zip(*MIXED, strict=True))).part(4)
    sized = SizedJob.of(case, batching, job, None)
    alone_s, together_s = seconds_by_rank(sized.estimator)
    assert together_s > 1.5 * alone_s
    sample = job.sample(40_000, num_ranks=4)
    assert sized.simulate(sample.rows, sample.simulations(None)).seconds == pytest.approx(together_s, rel=0.25)
    assert sized.estimator.of_texts(*zip(*MIXED[::4], strict=True)).seconds == pytest.approx(together_s, rel=0.25)


@pytest.mark.slow
def test_ranks_in_step_get_passes_of_which_none_waits_for_long() -> None:
    planned = plan_job(four_ranks(), Job(len(MIXED), *map(list, zip(*MIXED, strict=True))).part(4))
    alone_s, together_s = seconds_by_rank(planned.estimator)
    assert together_s < 1.25 * alone_s


def test_link_bound_meshes_take_the_seconds_of_their_bytes(outline: Outline) -> None:
    found = planned(outline)
    streamed, num_new = layers_bytes(outline), REQUEST.batch_size * REQUEST.new_tokens
    each = TOGETHER / 2  # of two links at once, less than one alone
    passes_s = {
        Mesh(replicas=2): streamed / each,
        Mesh(zero=2): max(streamed / 2 / each, streamed / GATHER),
        Mesh(tensor=2): streamed / (2 * each),
    }
    assert found.keys() == passes_s.keys()
    for mesh, seconds in passes_s.items():
        assert found[mesh].tokens_per_s == pytest.approx(num_new / (REQUEST.new_tokens * seconds), rel=0.01), mesh
    assert [found[mesh].bottleneck for mesh in passes_s] == ["link", "gathers", "link"]
    assert fastest_mesh(list(found.values())) == Mesh(zero=2), "tensor ranks are faster, but for those who ask"
    assert fastest_mesh(list(found.values()), may_round=True) == Mesh(tensor=2)
    fast = planned(outline, speeds=replace(SLOW, gather_bytes_per_s=1e12))
    assert fast[Mesh(zero=2)].tokens_per_s == pytest.approx(
        num_new / REQUEST.new_tokens * TOGETHER / streamed, rel=0.01
    )
    assert fast[Mesh(zero=2)].bottleneck == "link"


def test_memory_is_what_each_rank_keeps(outline: Outline) -> None:
    found = planned(outline)
    streamed, outer = layers_bytes(outline), outline.nbytes - layers_bytes(outline)
    for mesh, share in ((Mesh(replicas=2), 1), (Mesh(zero=2), 2), (Mesh(tensor=2), 2)):
        planned_for = batch_plan(found[mesh])
        plan, footprint = planned_for.plan, planned_for.footprint
        ring = plan.num_staging * plan.staging_bytes // mesh.tensor
        assert found[mesh].host_bytes == pytest.approx(streamed / share + ring, rel=0.01), mesh
        # Outer blocks and slots are whole on a ZeRO rank; a tensor rank has half of each.
        there = outer + plan.num_slots * plan.slot_bytes + footprint.kv_bytes + footprint.activation_bytes
        assert found[mesh].device_bytes == pytest.approx(there / mesh.tensor, rel=0.01), mesh


def test_replicas_share_the_memory_and_the_disk_of_their_host(outline: Outline) -> None:
    from_disk = planned(outline, FROM_DISK, replace(SLOW, disk_bytes_per_s=1e6))
    passes = {mesh: batch_plan(each).prediction.decode for mesh, each in from_disk.items()}
    read = sum(extent.nbytes for index in outline.layers for extent in outline.plain_blocks[index].extents)
    assert passes[Mesh(replicas=2)].disk_s == pytest.approx(2 * read / 1e6), "both read all of it from one disk"
    assert passes[Mesh(zero=2)].disk_s == passes[Mesh(tensor=2)].disk_s == pytest.approx(read / 1e6)
    assert from_disk[Mesh(zero=2)].tokens_per_s == pytest.approx(2 * from_disk[Mesh(replicas=2)].tokens_per_s, rel=0.02)
    tight = planned(outline, host_bytes=int(1.5 * layers_bytes(outline)))
    assert batch_plan(tight[Mesh(replicas=2)]).plan.num_blocks(Tier.DISK) > 0, "two copies are more than the host holds"
    assert batch_plan(tight[Mesh(zero=2)]).plan.num_blocks(Tier.DISK) == 0


def test_hosts_are_joined_by_replicas_only() -> None:
    assert set(meshes_of(4, 2)) == {
        Mesh(replicas=2, zero=2),
        Mesh(replicas=2, tensor=2),
        Mesh(replicas=4),
    }
    assert len(set(meshes_of(8))) == 10
    assert all(mesh.size == 8 for mesh in meshes_of(8))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Outline:
    small = {name: value for name, value in SMALL_LLAMA.items() if name not in ("model_type", "architectures")}
    shape = {"model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2}
    return outline_of(write_config(tmp_path_factory.mktemp("mixture"), {**small, **shape, "num_hidden_layers": 4}))


def test_ranks_that_divide_experts_take_the_seconds_of_the_fullest(mixture: Outline) -> None:
    """Six experts divide evenly among two and three ranks; of four, two have two; of two pairs each half of three."""
    case = Case(mixture, machine_with(2_000_000_000, 10**10, replace(SLOW, links_together=())), FROM_HOST)
    tensors = [each for index in mixture.layers for each in mixture.plain_blocks[index].layout.tensors]
    of_experts = sum(each.nbytes for each in tensors if ".experts." in each.name)
    outer = mixture.nbytes - layers_bytes(mixture)
    assert of_experts > 0.8 * layers_bytes(mixture)
    for mesh, most in ((Mesh(expert=2), 3), (Mesh(expert=4), 2), (Mesh(expert=2, tensor=2), 1.5)):
        ranks = mesh.size
        assert mesh in expert_meshes_of(case, ranks)
        request = replace(REQUEST, batch_size=8)
        (found,) = plan_meshes(case, [mesh], 1, batch_planner(request))
        share = (of_experts * most / 6 + (mixture.nbytes - of_experts) / ranks) / mixture.nbytes
        passes_s = layers_bytes(mixture) * share / LINK
        num_new = request.batch_size * request.new_tokens
        assert found.tokens_per_s == pytest.approx(num_new / (request.new_tokens * passes_s), rel=0.01), mesh
        plan = batch_plan(found).plan
        assert found.host_bytes == pytest.approx(
            share * (layers_bytes(mixture) + plan.num_staging * plan.staging_bytes), rel=0.01
        )
        footprint = batch_plan(found).footprint
        there = outer + plan.num_slots * plan.slot_bytes + footprint.kv_bytes + footprint.activation_bytes
        assert found.device_bytes == pytest.approx(share * there, rel=0.01)
    assert fastest_mesh([found]) is None, "for those who ask"


def test_experts_are_listed_for_mixtures_that_can_be_divided(outline: Outline, mixture: Outline) -> None:
    machine = machine_with(2_000_000_000, 10**10, SLOW)
    case = Case(mixture, machine, FROM_HOST)
    assert [*expert_meshes_of(Case(outline, machine, FROM_HOST), 4)] == []
    assert [*expert_meshes_of(case, 4, 2)] == [Mesh(replicas=2, expert=2)]
    of_eight = [{"replicas": 4}, {"replicas": 2, "zero": 2}, {"zero": 4}]
    wanted = [Mesh(expert=2, **each) for each in of_eight] + [Mesh(replicas=2, expert=4), Mesh(zero=2, expert=4)]
    in_pairs = Mesh(expert=2, tensor=2)
    wanted += [replace(in_pairs, replicas=2), replace(in_pairs, zero=2), Mesh(expert=4, tensor=2)]
    assert {*expert_meshes_of(case, 8)} == {*wanted, Mesh(expert=2, tensor=4)}, "six experts"
    console = Console(width=80, record=True, file=io.StringIO())
    meshes = [*meshes_of(4), *expert_meshes_of(case, 4)]
    slow = machine_with(2_000_000_000, 10**10, replace(SLOW, device_bytes_per_s=1e6))
    resident = Case(mixture, slow, resolve_settings({}))
    console.print(mesh_table(plan_meshes(resident, meshes, 1, batch_planner(REQUEST))))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert any("expert" in line for line in lines)
    assert sum(line.startswith("│") for line in lines) == len(meshes) == 10, "a line each"
    assert any("device memory" in line for line in lines)


@pytest.mark.parametrize(("mesh", "num_layers"), [(Mesh(pipeline=2), 7), (Mesh(pipeline=4, replicas=2), 4)])
def test_stages_take_the_seconds_of_the_fullest(outline: Outline, mesh: Mesh, num_layers: int) -> None:
    """Each part of the rows gets a token once all stages have computed its pass, and a part is in each stage."""
    case = Case(outline, machine_with(2_000_000_000, 10**10, replace(SLOW, links_together=())), FROM_HOST)
    assert mesh in pipeline_meshes_of(case, mesh.size)
    request = replace(REQUEST, batch_size=8 * mesh.size)
    (found,) = plan_meshes(case, [mesh], 1, batch_planner(request))
    layer_bytes = layers_bytes(outline) // 14
    pass_s = num_layers * layer_bytes / LINK
    assert found.tokens_per_s == pytest.approx(mesh.replicas * 8 / pass_s, rel=0.01)
    alone, rows = batch_plan(found), request.batch_size // mesh.replicas
    assert alone.prediction.seconds == pytest.approx(mesh.pipeline * request.new_tokens * pass_s, rel=0.01)
    plan, spec = alone.plan, alone.case.outline.spec
    assert plan.num_blocks(Tier.HOST) == spec.kv.num_layers == num_layers
    assert found.host_bytes == pytest.approx(num_layers * layer_bytes + plan.num_staging * plan.staging_bytes, rel=0.01)
    longest = request.prompt_len + request.new_tokens
    kv_bytes = rows * longest * outline.spec.kv.token_bytes(outline.dtype) * num_layers / 14
    assert alone.footprint.kv_bytes == pytest.approx(kv_bytes, rel=0.1), "of all rows"
    assert fastest_mesh([found]) is None, "for those who ask"
    assert len(outline.tree.model.layers) == 14, "the outline is left as it was"


@pytest.mark.slow
def test_a_job_keeps_a_part_of_its_rows_in_each_stage(outline: Outline) -> None:
    case = Case(outline, machine_with(2_000_000_000, 10**10, SLOW), FROM_HOST)
    job = Job(64, [16], [8])
    alone, staged = plan_meshes(case, [Mesh(), Mesh(pipeline=2)], 1, job_planner(job))
    if alone.mesh != Mesh():
        alone, staged = staged, alone
    assert isinstance(staged.planned, JobPlan)
    assert staged.planned.budget.num_sets == 2
    assert not staged.planned.budget.lends
    streamed = layers_bytes(outline) / 2 / (TOGETHER / 2)
    num_passes = staged.planned.simulated.num_passes
    assert num_passes == 2 * 8, "32 rows at once in each of two passes"
    assert staged.planned.seconds == pytest.approx(num_passes * streamed, rel=0.02)
    assert staged.tokens_per_s == pytest.approx(64 * 8 / staged.planned.seconds, rel=0.01)


def test_two_hosts_are_twice_as_fast_as_one(outline: Outline) -> None:
    one, two = planned(outline), planned(outline, ranks=4, nodes=2)
    for mesh in (Mesh(zero=2), Mesh(tensor=2)):
        apart = two[replace(mesh, replicas=2)]
        assert apart.host_bytes == one[mesh].host_bytes
        assert apart.tokens_per_s == pytest.approx(2 * one[mesh].tokens_per_s, rel=0.02)


def test_unknown_rates_are_said_and_the_table_is_narrow(outline: Outline) -> None:
    found = planned(outline, speeds=rates())
    assert found.keys() == {Mesh(replicas=2), Mesh(zero=2)}, "nothing is known of sums"
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(mesh_table([*planned(outline, ranks=4).values()]))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80


def zinfer_plan(*options: str) -> Result:
    words = ["plan", "--machine", "h200", "--batch-size", "16", "--prompt-len", "64", "--new-tokens", "8", *options]
    return CliRunner().invoke(app, words, env={"COLUMNS": "80"})


def test_the_command_lists_and_chooses(tmp_path: Path) -> None:
    folder = str(write_config(tmp_path, SMALL_LLAMA))
    result = zinfer_plan("--model", folder, "--ranks", "4", "--nodes", "2", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["ranks"] == 4
    assert found["nodes"] == 2
    assert found["deepspeed_mp_size"] == 1
    assert len(found["meshes"]) == 7
    chosen = next(each for each in found["meshes"] if not {"tensor", "pipeline"} & each["parallel"].keys())
    assert chosen["parallel"] == found["parallel"]
    assert chosen["tokens_per_s"] == found["tokens_per_s_of_all_ranks"]
    stated = json.loads(
        zinfer_plan("--model", folder, "--ranks", "4", "--parallel", "replicas=1,zero=4", "--json").stdout
    )
    assert stated["parallel"] == {"zero": 4}
    assert [each["parallel"] for each in stated["meshes"]] == [{"zero": 4}], "what is stated is not compared"
    assert stated["request"]["batch_size"] == 4
    assert "DeepSpeed's mp_size: 1" in zinfer_plan("--model", folder, "--ranks", "4").stdout
    shape = "--batch-size", "64", "--prompt-len", "512", "--new-tokens", "32"
    text = zinfer_plan("--model", "llama-3-70b", "--ranks", "4", "--nodes", "2", *shape).stdout
    assert 'is chosen if stated, {"zinfer": {"parallel": {' in text
    fast = tmp_path / "fast.json"
    fast.write_text('{"zinfer": {"optimize": "speed"}}')
    found = json.loads(zinfer_plan("--model", folder, "--ranks", "4", "--config", str(fast), "--json").stdout)
    assert found["parallel"] == found["meshes"][0]["parallel"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--ranks", "3", "--nodes", "2"), "--ranks 3 do not divide among --nodes 2"),
        (("--ranks", "16", "--parallel", "pipeline=16"), "a LlamaForCausalLM of 14 layers has only that many stages"),
        (("--ranks", "2", "--parallel", "expert=2"), "zinfer.parallel.expert (ep_size) = 2: a LlamaForCausalLM has no"),
        (("--ranks", "7", "--parallel", "tensor=7"), "tensor_parallel.tp_size = 7 does not divide"),
        (("--ranks", "2", "--parallel", "zero"), "--parallel = 'zero': expected sizes of modes, such as replicas=2"),
        (("--ranks", "2", "--parallel", "zero=3"), 'zinfer.parallel = {"zero": 3} needs 3 ranks, and there are 2'),
        (("--ranks", "2", "--parallel", "zeros=2"), "unknown key parallel.zeros; did you mean parallel.zero?"),
    ],
)
def test_bad_ranks_are_refused(options: tuple[str, ...], said: str, tmp_path: Path) -> None:
    result = zinfer_plan("--model", str(write_config(tmp_path, SMALL_LLAMA)), *options)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())
