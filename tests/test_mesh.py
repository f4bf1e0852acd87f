"""Ranks in a mesh of modes: replicas with a whole model each, and the ZeRO ranks that share one."""

import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import random_prompts, tiny_checkpoint
from jobs_support import letters_model, prompt_rows, read_rows, write_rows
from probe_support import made_up_device, made_up_findings
from ranks_support import Failed, Ranks, run_ranks
from typer.testing import CliRunner

import zinfer
from zinfer.cli import app
from zinfer.config import resolve_settings
from zinfer.errors import ConfigError, RankError
from zinfer.jobs.job import run_job
from zinfer.jobs.summary import JobSummary
from zinfer.offload.stats import RunStats
from zinfer.probe.card import read_card
from zinfer.probe.findings import Findings, record
from zinfer.probe.measure import LinkRates
from zinfer.probe.ranks import RankRates
from zinfer.ranks.mesh import MODES, Mesh

NUM_LAYERS = 4
CPU_HOMES = {"zero_optimization": {"offload_param": {"device": "cpu"}}}


def config(parallel: object, homes: str = "cpu") -> dict[str, Any]:
    return {
        "zero_optimization": {"offload_param": {"device": homes}},
        "zinfer": {"device": "cpu", "parallel": parallel},
    }


def test_coordinates_vary_fastest_in_the_last_mode() -> None:
    mesh = Mesh(replicas=2, zero=3, tensor=2)
    assert mesh.size == 12
    places = [tuple(mesh.coordinates(rank)[mode] for mode in MODES) for rank in range(mesh.size)]
    assert places == sorted(places)
    assert places[7] == (1, 0, 0, 0, 1)
    assert mesh.ranks_along("tensor", 7) == (6, 7)
    assert mesh.ranks_along("zero", 7) == (7, 9, 11)
    assert mesh.ranks_along("replicas", 7) == (1, 7)
    assert mesh.ranks_along("pipeline", 7) == (7,)
    for mode in MODES:
        groups = list(mesh.groups_in([mode]))
        assert sorted(rank for members in groups for rank in members) == list(range(12)), "each rank in one sub-group"
        assert all(mesh.ranks_along(mode, rank) == members for members in groups for rank in members)


@pytest.mark.parametrize(
    ("stated", "hosts", "wanted"),
    [
        ({"zero": None, "replicas": None}, ["a"], Mesh()),
        ({}, ["a"] * 4, Mesh(zero=4)),
        ({}, ["a", "a", "b", "b"], Mesh(replicas=2, zero=2)),
        ({}, ["a", "b", "c"], Mesh(replicas=3)),
        ({}, ["a", "b", "a", "b"], Mesh(zero=4)),
        ({}, ["a", "a", "b"], Mesh(zero=3)),
        ({"zero": 2, "replicas": None}, ["a", "b"], Mesh(zero=2)),
        ({"zero": 2, "replicas": 2}, ["a"] * 4, Mesh(replicas=2, zero=2)),
        ({"expert": 4}, ["a"] * 4, Mesh(expert=4)),
        ({"expert": 2, "tensor": None}, ["a"] * 4, Mesh(replicas=2, expert=2)),
        ({"expert": 1, "tensor": 2}, ["a"] * 4, Mesh(replicas=2, tensor=2)),
        ({"expert": 1}, ["a", "a", "b", "b"], Mesh(replicas=2, zero=2)),
        ({"expert": 2, "replicas": 2}, ["a"] * 4, Mesh(replicas=2, expert=2)),
        ({"expert": 2, "zero": 2}, ["a"] * 4, Mesh(zero=2, expert=2)),
        ({"expert": 2, "tensor": 2}, ["a"] * 8, Mesh(replicas=2, expert=2, tensor=2)),
        ({"pipeline": 2, "zero": 2, "tensor": 2}, ["a"] * 8, Mesh(pipeline=2, zero=2, tensor=2)),
        ({"zero": 2}, ["a"] * 4, Mesh(replicas=2, zero=2)),
        ({"zero": 1}, ["a"] * 4, Mesh(replicas=4)),
        ({"pipeline": 2, "tensor": 1}, ["a"] * 4, Mesh(replicas=2, pipeline=2)),
        ({"pipeline": 2, "zero": 2, "replicas": 2}, ["a"] * 8, Mesh(replicas=2, pipeline=2, zero=2)),
    ],
)
def test_a_mesh_follows_the_configuration_or_the_hosts(
    stated: dict[str, int | None], hosts: list[str], wanted: Mesh
) -> None:
    assert Mesh.of(stated, hosts) == wanted


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        ({"zero": 0}, "zinfer.parallel.zero = 0: expected a whole number of at least 1"),
        ({"zeros": 2}, "unknown key zinfer.parallel.zeros; did you mean zinfer.parallel.zero?"),
        ({"tensor": 0}, "zinfer.parallel.tensor = 0: expected a whole number of at least 1"),
        ({"pipeline": 0}, "zinfer.parallel.pipeline = 0: expected a whole number of at least 1"),
        ({"expert": 0}, "zinfer.parallel.expert = 0: expected a whole number of at least 1"),
        (4, "zinfer.parallel = 4: expected an object"),
    ],
)
def test_bad_sizes_are_refused(parallel: object, said: str) -> None:
    with pytest.raises(ConfigError, match="^" + said.replace(".", r"\.").replace("?", r"\?")):
        resolve_settings({"zinfer": {"parallel": parallel}})


def test_a_mesh_of_other_ranks_is_refused(tmp_path: Path) -> None:
    said = (
        r'zinfer\.parallel = \{"replicas": 2, "zero": 2\} needs 4 ranks, and there are 3; start 4 ranks \(--ranks 4, '
        r'or torchrun\), choose sizes whose product is 3, or remove the key \("auto"\)'
    )
    with pytest.raises(ConfigError, match=said):
        Mesh.of({"replicas": 2, "zero": 2}, ["a"] * 3)
    with pytest.raises(ConfigError, match=r'parallel = \{"zero": 2\} needs 2 ranks, and there is 1; start 2 ranks'):
        zinfer.init_inference(tiny_checkpoint("llama", tmp_path), config({"zero": 2}))
    assert resolve_settings({"zinfer": {"parallel": "auto"}}) == resolve_settings({})


def computed(rank: int, folder: Path, meshes: list[object], num_calls: int) -> list[tuple[torch.Tensor, RunStats]]:
    """Logits and stats under each mesh, after numbers of calls that differ by rank."""
    found = []
    for place, parallel in enumerate(meshes):
        engine = zinfer.init_inference(folder, config(parallel, ("cpu", "nvme")[place % 2]))
        try:
            ids = torch.tensor(random_prompts(1, min_tokens=7, max_tokens=7, seed=rank + 1))
            with torch.no_grad():
                logits = [engine(input_ids=ids).logits for _ in range(num_calls or 1 + rank)][-1]
            found.append((logits.clone(), engine.stats()))
        finally:
            engine.destroy()
    return found


@pytest.mark.slow
def test_replicas_compute_the_bits_of_one_process_and_share_no_bytes(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path, num_layers=NUM_LAYERS, tie=False)
    meshes: list[object] = [{"replicas": 2, "zero": 2}, {"replicas": 4}]
    several = run_ranks(4, computed, folder, meshes, 0)
    page_bytes = 4096 * (NUM_LAYERS + 3)
    for rank, found in enumerate(several):
        alone = computed(rank, folder, ["auto", "auto"], 1)
        for place, (logits, stats) in enumerate(found):
            wanted, whole = alone[place % 2]
            shares = (2, 1)[place]
            assert torch.equal(logits, wanted), f"rank {rank}, {meshes[place]}"
            assert abs(stats.loaded_bytes - whole.loaded_bytes / shares) <= page_bytes, "homed bytes of this rank"
            streamed = sum(each[place][1].streamed_bytes_per_pass for each in several)
            assert streamed == 4 // shares * whole.streamed_bytes_per_pass, "each replica streams the model once"
            assert (stats.gathered_bytes > 0) == (shares > 1)


def job(rank: int, folder: Path, output: str, parallel: object, **options: object) -> JobSummary:
    given = CPU_HOMES | {"zinfer": {"parallel": parallel, **options}}
    files = (folder / "model", folder / "in.jsonl", folder / output)
    return run_job(*files, config=given, device="cpu", batch_size=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mesh")
    letters_model(folder / "model", num_layers=NUM_LAYERS)
    write_rows(folder / "in.jsonl", prompt_rows(36))
    return folder


def test_a_job_of_replicas_writes_each_row_once(folder: Path) -> None:
    alone = job(0, folder, "alone.jsonl", "auto")
    wanted = {row["id"]: row for row in read_rows(folder / "alone.jsonl")}
    assert len({row["text"] for row in wanted.values()}) > 8
    found = run_ranks(4, job, folder, "mesh.jsonl", {"replicas": 2, "zero": 2})
    rows = read_rows(folder / "mesh.jsonl")
    assert len(rows) == len(wanted) == 36
    assert {row["id"]: row for row in rows} == wanted
    first = found[0]
    assert all(each.num_done == 36 for each in found)
    ranks = [first.stats, *first.other_ranks]
    assert alone.stats is not None
    assert len(ranks) == 4
    for stats in ranks:
        assert stats is not None
        assert stats.loaded_bytes == pytest.approx(alone.stats.loaded_bytes / 2, rel=0.15)
        assert stats.host_bytes < alone.stats.host_bytes
        assert stats.gathered_bytes > 0
    assert sum(stats.passes > 0 for stats in ranks if stats) == 4, "all ranks compute"


@pytest.mark.slow
def test_a_lost_replica_ends_the_job(folder: Path) -> None:
    (folder / "many").mkdir()
    write_rows(folder / "many" / "in.jsonl", prompt_rows(1500))
    (folder / "many" / "model").symlink_to(folder / "model")
    output = folder / "many" / "lost.jsonl"
    with Ranks(3, job, folder / "many", "lost.jsonl", {"replicas": 3}) as ranks:
        ranks.wait_until(lambda: output.exists() and output.stat().st_size > 0)
        begin_s = time.monotonic()
        ranks.kill(2, signal.SIGKILL)
        first, second, lost = ranks.results()
    assert time.monotonic() - begin_s < 30, "no gather tells of the loss, so passes have to"
    assert lost is None
    assert [first.kind, second.kind] == ["OtherRankFailed"] * 2
    assert f"rank 2 on {socket.gethostname()} ended without a word" in first.text
    rows = read_rows(output)
    assert 0 < len(rows) < 1500
    assert len({row["id"] for row in rows}) == len(rows)


def test_the_command_refuses_before_it_starts_ranks(folder: Path) -> None:
    (folder / "ds.json").write_text(json.dumps({"zinfer": {"parallel": {"zero": 2, "replicas": 2}}}))
    files = {"--model": "model", "--input": "in.jsonl", "--output": "refused.jsonl", "--config": "ds.json"}
    words = [word for option, name in files.items() for word in (option, str(folder / name))]
    for command, words_for in (("run", words), ("bench", [*words[:2], *words[-2:], "--rows", "4"])):
        found = CliRunner().invoke(app, [command, *words_for, "--device", "cpu", "--ranks", "3"])
        assert found.exit_code == 2, found.output
        said = " ".join(found.stderr.split())
        assert 'zinfer.parallel = {"replicas": 2, "zero": 2} needs 4 ranks, and there are 3' in said
    assert not (folder / "refused.jsonl").exists()


def measured(gather_bytes_per_s: float) -> Findings:
    """This machine, with a slow link and these gathers of two ranks."""
    card = read_card("cpu")
    link = LinkRates("host copies", 1 << 20, 1e6, None, None)
    ranks = RankRates(2, 1, "gloo", 1 << 20, 2e6, gather_bytes_per_s, 1e6, (None, None), ())
    device = made_up_device(link=link, pcie=None)
    return made_up_findings(card=card, devices=(device,), together=(), ranks=(ranks,))


def measured_job(rank: int, folder: Path, cache: Path, parallels: list[object]) -> list[JobSummary]:
    os.environ["XDG_CACHE_HOME"] = str(cache)
    # So little cache that it is lent to no weights, which all stream.
    options = {"kv_cache_memory": "400KB"}
    return [job(rank, folder, f"{cache.name}-{place}.jsonl", each, **options) for place, each in enumerate(parallels)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gather_bytes_per_s", "chosen"), [(1e3, "replicas 2"), pytest.param(1e12, "zero 2", marks=pytest.mark.slow)]
)
def test_a_job_chooses_by_what_was_measured(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gather_bytes_per_s: float, chosen: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    record(measured(gather_bytes_per_s))
    found = run_ranks(2, measured_job, folder, tmp_path, ["auto", {"zero": 2}])
    (auto, stated), _ = found
    notes = [note for note in auto.notes if note.startswith("ranks: ")]
    assert len(notes) == 1
    assert notes[0].startswith(f"ranks: {chosen}, the fastest of ")
    assert not any(note.startswith("ranks: ") for note in stated.notes), "what is stated is not compared"
    for summary, gathers in ((auto, chosen == "zero 2"), (stated, True)):
        ranks = [summary.stats, *summary.other_ranks]
        assert [stats is not None and stats.gathered_bytes > 0 for stats in ranks] == [gathers] * 2
    texts = [
        {row["id"]: row["text"] for row in read_rows(folder / f"{tmp_path.name}-{place}.jsonl")} for place in (0, 1)
    ]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 36


def lasting(rank: int, folder: Path) -> float:
    """Calls until another rank fails; returns how long it took to raise. No rank gathers from another."""
    engine = zinfer.init_inference(folder, config({"replicas": 4}))
    ids = torch.tensor(random_prompts(1, min_tokens=7, max_tokens=7))
    (folder / f"begun-{rank}").touch()
    while True:
        begin_s = time.monotonic()
        try:
            with torch.no_grad():
                engine(input_ids=ids)
        except RankError as failure:
            took_s = time.monotonic() - begin_s
            engine.destroy()
            (folder / f"said-{rank}").write_text(str(failure))
            return took_s


def leaving(rank: int, folder: Path) -> str:
    """Replica 1 ends at once; 0 and 2 go on, and rank 2 fails some seconds later."""
    engine = zinfer.init_inference(folder, config({"replicas": 3}))
    ids = torch.tensor(random_prompts(1, min_tokens=7, max_tokens=7))
    until_s = time.monotonic() + (0, 0, 3)[rank]
    while time.monotonic() < until_s:
        engine(input_ids=ids)
    engine.destroy()  # rank 0 keeps the store, and waits for rank 2
    return "left"


@pytest.mark.slow
def test_a_replica_that_ends_early_leaves_the_others(tmp_path: Path) -> None:
    assert run_ranks(3, leaving, tiny_checkpoint("llama", tmp_path, num_layers=NUM_LAYERS)) == ["left"] * 3


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_replicas_end_with_a_lost_one(tmp_path: Path, lost: int) -> None:
    folder = tiny_checkpoint("llama", tmp_path, num_layers=NUM_LAYERS)
    with Ranks(4, lasting, folder) as ranks:
        ranks.wait_until(lambda: all((folder / f"begun-{rank}").exists() for rank in range(4)))
        begin_s = time.monotonic()
        ranks.kill(lost, signal.SIGKILL)
        found = ranks.results()
    assert not any(isinstance(each, Failed) for each in found), found
    # Rank 0 takes the store with it, which all notice at once; no connection to the others is needed, but their beats.
    assert time.monotonic() - begin_s < (60 if lost else 30)
    for rank in {0, 1, 2, 3} - {lost}:
        assert f"rank {lost} on " in (folder / f"said-{rank}").read_text()
