"""A job on a GPU plans its sizes, says which, and keeps them; here a made-up GPU is planned for, and the CPU runs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs_support import letters_model, prompt_rows, read_rows, write_rows
from plan_support import SMALL_LLAMA, machine_with, rates, search_less, write_config

import zinfer
from zinfer.config import resolve_settings
from zinfer.errors import ConfigError
from zinfer.jobs import UnusableInput, run_job
from zinfer.jobs.manifest import read_manifest
from zinfer.jobs.request import manifest_path
from zinfer.jobs.row_form import RowForm
from zinfer.jobs.token_rows import sample_rows
from zinfer.model.build import build_meta_model
from zinfer.model.context_length import read_limits
from zinfer.planning import job_sizes
from zinfer.planning.job_plan import Job
from zinfer.planning.job_sizes import choose_sizes, split
from zinfer.planning.presets import Machine
from zinfer.ranks.mesh import Mesh
from zinfer.weights import Checkpoint

NUM_ROWS = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return letters_model(tmp_path_factory.mktemp("model"), num_layers=4)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A small GPU with a slow link."""
    found = machine_with(1_000_000_000, 10**10, rates(link_bytes_per_s=1e8))
    monkeypatch.setattr(job_sizes, "this_machine", lambda settings, files: found)
    monkeypatch.setattr(job_sizes, "find_limits", lambda settings: found.limits)
    return found


def run(model: Path, folder: Path, **options: Any) -> tuple[list[str], dict[str, Any], list[dict[str, Any]]]:
    """The notes of a job, the sizes in its manifest, and its rows."""
    rows = folder / "in.jsonl"
    if not rows.exists():
        several = [(row["id"], row["prompt"]) for row in prompt_rows(NUM_ROWS)]
        given = [{"id": name, "prompt": text, "max_new_tokens": 1 + int(name[4:]) % 9} for name, text in several]
        write_rows(rows, given)
    summary = run_job(model, rows, folder / "out.jsonl", device="cpu", **options)
    manifest = read_manifest(manifest_path(folder / "out.jsonl"))
    assert manifest is not None
    return list(summary.notes), dict(manifest.sizes), read_rows(folder / "out.jsonl")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("key", ["max_token_latency", "draft_model"])
def test_keys_that_are_no_whole_numbers_are_kept(model: Path, tmp_path: Path, key: str) -> None:
    config = {"zinfer": {key: str(model) if key == "draft_model" else 2.5}}
    _, _, rows = run(model, tmp_path, config=config)
    output = tmp_path / "out.jsonl"
    output.write_bytes(b"".join(output.read_bytes().splitlines(keepends=True)[:9]))
    assert run(model, tmp_path, config=config)[2] == rows
    with pytest.raises(UnusableInput, match=f"settings.{key}.* in the manifest, absent now"):
        run(model, tmp_path)


def test_a_job_runs_with_the_sizes_it_planned_and_goes_on_with_them(
    model: Path, tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes, sizes, rows = run(model, tmp_path)
    assert len(rows) == NUM_ROWS
    (line,) = (note for note in notes if note.startswith("plan: "))
    assert f"passes of {sizes['tokens_per_pass']:,} tokens, {sizes['max_sequences']:,} sequences" in line
    assert "; next best, " in line
    monkeypatch.setattr(job_sizes, "plan_forms", None)  # not planned again, whatever the machine is now
    output = tmp_path / "out.jsonl"
    output.write_bytes(b"".join(output.read_bytes().splitlines(keepends=True)[:9]))
    notes, again, resumed = run(model, tmp_path)
    assert (again, resumed) == (sizes, rows)
    assert not any(note.startswith("plan: ") for note in notes)


def test_rows_from_all_over_the_input_are_planned_for(
    model: Path, tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what `zinfer plan` says of the input is what the job does."""
    jobs: list[Job] = []

    def noted(folder: Path, settings: Any, job: Job, *given: Any) -> dict[str, int | str]:
        jobs.append(job)
        return {}

    monkeypatch.setattr("zinfer.jobs.job_run.choose_sizes", noted)
    monkeypatch.setattr("zinfer.jobs.row_sample._NUM_SAMPLED", 10)
    texts = ["a" * 3] * 30 + ["b" * 40] * 10 + ["c" * 200] * 10
    rows = write_rows(tmp_path / "in.jsonl", [{"id": str(at), "prompt": text} for at, text in enumerate(texts)])
    run_job(model, rows, tmp_path / "out.jsonl", device="cpu", batch_size=5, max_new_tokens=2)
    (job,) = jobs
    assert sorted({*job.prompt_lens}) == [3, 40]
    assert list(job.prompt_lens).count(40) == 2
    assert job.num_rows == 40, "a fifth of the sampled rows cannot be used"
    limits = read_limits(build_meta_model(Checkpoint.open(model), None), None)
    sample = sample_rows(rows, model, 1000, RowForm(2), limits)
    assert (sample.job(), sample.num_read, len(sample.bad)) == (job, 10, 2)


def test_only_speed_that_is_asked_for_quantizes_the_cache(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is stated stays: it is in no plan."""
    search_less(monkeypatch)
    folder, job, said = write_config(tmp_path, SMALL_LLAMA), Job(200, [100, 300, 500], [8, 16, 32]), []
    careful = choose_sizes(folder, resolve_settings(), job, said.append)
    fast = choose_sizes(folder, resolve_settings({"zinfer": {"optimize": "speed"}}), job, said.append)
    assert "kv_cache_dtype" not in careful
    assert fast["kv_cache_dtype"] == "int8"
    assert " in INT8" in said[1]
    config = {"zinfer": {"tokens_per_pass": 77, "kv_cache_memory": "20MB", "kv_cache_dtype": "fp8"}}
    stated = choose_sizes(folder, resolve_settings(config), job, said.append)
    assert stated.keys() <= {"max_sequences", "admission_order", "speculate"}
    assert said[2].startswith("plan: passes of 77 tokens")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["ngram", "off"])
def test_whether_tokens_are_guessed_is_kept_whatever_the_rates_are_now(
    model: Path, tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """On a GPU guesses change which tokens share a pass, and with them the last bits of all."""
    other = {"ngram": "off", "off": "ngram"}[kind]
    for now in (kind, other):
        monkeypatch.setattr(job_sizes, "choose_kind", lambda *_, now=now: now)
        _, sizes, _ = run(model, tmp_path)
        assert sizes["speculate"] == kind
        output = tmp_path / "out.jsonl"
        output.write_bytes(b"".join(output.read_bytes().splitlines(keepends=True)[:9]))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("keys", "chosen"), [({"speculate": "ngram"}, None), ({}, "ngram"), ({}, "off")])
def test_tokens_are_guessed_in_a_job_whose_link_leaves_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, str], chosen: str | None
) -> None:
    found = machine_with(10**9, 10**10, rates(link_bytes_per_s=1e4 if chosen == "ngram" else 1e12))
    monkeypatch.setattr(job_sizes, "this_machine", lambda settings, files: found)
    monkeypatch.setattr(job_sizes, "find_limits", lambda settings: found.limits)
    homes = {"zero_optimization": {"offload_param": {"device": "cpu"}}}
    folder, job = write_config(tmp_path, SMALL_LLAMA), Job(20, [100], [8])
    sizes = choose_sizes(folder, resolve_settings({**homes, "zinfer": keys}), job, print)
    assert sizes.get("speculate") == chosen


@pytest.mark.sampled(2)
@pytest.mark.parametrize("room", [{"kv_cache_memory": 500_000}, {"num_pages": 40}], ids=["bytes", "pages"])
def test_a_small_job_runs_with_a_cache_of_another_dtype(
    model: Path, tmp_path: Path, monkeypatch: Any, room: dict[str, int]
) -> None:
    """As an LLM does that is told the same sizes, and a job that goes on with them."""
    sizes: dict[str, Any] = {"tokens_per_pass": 64, "max_sequences": 9, "kv_page_size": 16, **room}
    sizes |= {"kv_cache_dtype": "int8", "kv_cache_tier": "host", "admission_order": "longest_first"}
    monkeypatch.setattr("zinfer.jobs.job_run.choose_sizes", lambda *_: sizes)
    _, kept, rows = run(model, tmp_path)
    assert kept == sizes | {name: kept[name] for name in room}
    assert kept.get("num_pages") == room.get("num_pages")
    output = tmp_path / "out.jsonl"
    whole = output.read_bytes()
    output.write_bytes(b"".join(whole.splitlines(keepends=True)[:9]))
    run(model, tmp_path)
    assert output.read_bytes() == whole
    with zinfer.LLM(model, device="cpu", **sizes) as llm:
        given = [json.loads(line) for line in (tmp_path / "in.jsonl").read_text().splitlines()]
        params = [zinfer.SamplingParams(max_new_tokens=row["max_new_tokens"]) for row in given]
        found = llm.generate([row["prompt"] for row in given], params)
    texts = {row["id"]: row["text"] for row in rows}
    assert [texts[row["id"]] for row in given] == [each.text for each in found]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mesh", [Mesh(tensor=2), Mesh(pipeline=2), Mesh(zero=2)])
def test_ranks_with_parts_of_a_model_are_planned_in_pages(model: Path, machine: Machine, mesh: Mesh) -> None:
    """Whose bytes differ among them."""
    job = Job(100, [12], [20])
    sizes = choose_sizes(model, resolve_settings(), job, print, mesh)
    assert "tokens_per_pass" in sizes
    assert ("num_pages" in sizes) == (mesh.num_in_step > 1) == ("kv_cache_memory" not in sizes)
    if mesh.num_in_step > 1:
        assert sizes["speculate"] == "off"
        keys, arguments = split(sizes)
        with zinfer.LLM(model, device="cpu", **keys, **arguments) as llm:
            assert llm.batching.num_pages == sizes["num_pages"]


def test_the_memory_beside_a_draft_model_is_not_planned(model: Path, machine: Machine) -> None:
    said: list[str] = []
    keys = {"draft_model": str(model)}
    assert choose_sizes(model, resolve_settings({"zinfer": keys}), Job(100, [12], [20]), said.append) == {}
    assert said == ["the usual sizes, since the memory beside zinfer.draft_model is known once that is loaded"]
    without = choose_sizes(
        model, resolve_settings({"zinfer": keys | {"speculate": "off"}}), Job(100, [12], [20]), print
    )
    assert "tokens_per_pass" in without


def test_nothing_that_fits_is_said(model: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_sizes, "this_machine", lambda settings, files: machine_with(1_000_000, 10**10))
    said: list[str] = []
    assert choose_sizes(model, resolve_settings(), Job(100, [12], [20]), said.append) == {"speculate": "off"}
    assert said[0].startswith("the usual sizes, since no plan was found: ")


def test_an_llm_is_planned_for_a_job(
    model: Path, machine: Machine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(1000, [5, 9], [8, 30])
    planned = choose_sizes(model, resolve_settings(), job, print)
    with zinfer.LLM(model, device="cpu", job=job) as llm:
        assert f"passes of {planned['tokens_per_pass']:,} tokens" in caplog.text
        budget = llm.batching
        assert (budget.tokens_per_pass, budget.max_sequences, budget.order) == (
            planned["tokens_per_pass"],
            planned["max_sequences"],
            planned.get("admission_order", "arrival"),
        )
        assert budget.kv_bytes <= int(planned["kv_cache_memory"])
        assert len(llm.generate(["abc"], max_new_tokens=3)) == 1
    with zinfer.LLM(model, {"zinfer": {"tokens_per_pass": 77}}, device="cpu", job=job) as llm:
        assert llm.batching.tokens_per_pass == 77, "what is stated stays"
    with pytest.raises(ConfigError, match="for a model's folder, not for a module"):
        zinfer.LLM(torch.nn.Linear(2, 2), job=job)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="sizes are planned for one process"):
        zinfer.LLM(model, device="cpu", job=job)


@pytest.mark.parametrize("lengths", [(0, [5], [5]), (5, [], []), (5, [5, 6], [5])])
def test_a_job_has_rows(lengths: tuple[int, list[int], list[int]]) -> None:
    with pytest.raises(ConfigError, match="give at least one row, and as many of one as of the other"):
        Job(*lengths)


@pytest.mark.parametrize("job", [3, 0, {"num_rows": 3}, "rows.jsonl"])
def test_an_llm_takes_no_other_job(tmp_path: Path, job: Any) -> None:
    with pytest.raises(ConfigError, match=r"job = .*: expected a zinfer\.Job, .*such as zinfer\.Job\(num_rows=1000"):
        zinfer.LLM(tmp_path / "nothing", device="cpu", job=job)
