"""Stages of a pipeline whose ranks divide their layers: each has its part of some layers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import tiny_checkpoint, tiny_mixtral
from jobs_support import letters_model, letters_tokenizer, prompt_rows, read_rows, write_rows
from ranks_support import Failed, Ranks, run_ranks
from test_expert_parallel import mixtral
from test_pipeline import Computed, computed
from test_pipeline_llm import job
from test_products import lasting
from test_tensor_parallel import texts

from zinfer.jobs.summary import JobSummary
from zinfer.offload.stats import RunStats

MODES = ("tensor", "expert")
ALONE: dict[str, int] = {}
INT4 = {"bits": 4, "group_size": 16}
NUM_LAYERS = 5
MOST_ERROR = 1e-5
CASES: dict[str, list[tuple[str, str, dict[str, Any] | None]]] = {
    "tensor": [("untied", "cpu", None), ("gpt2", "nvme", None), ("mixtral", "nvme", INT4)],
    "expert": [("mixtral", "cpu", None)],
}
"""Models, homes and quantization by the mode that divides the layers of two stages."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("stages")
    tiny_mixtral().save_pretrained(folder / "mixtral")
    return {
        "untied": tiny_checkpoint("llama", folder / "untied", num_layers=NUM_LAYERS, tie=False),
        "gpt2": tiny_checkpoint("gpt2", folder / "gpt2", num_layers=NUM_LAYERS),
        "mixtral": folder / "mixtral",
    }


def config(homes: str, parallel: dict[str, int], codes: dict[str, Any] | None, folder: Path) -> dict[str, Any]:
    own: dict[str, Any] = {"device": "cpu", "parallel": parallel} | ({"quantization": codes} if codes else {})
    offload = {"device": homes} | ({"nvme_path": str(folder)} if codes and homes == "nvme" else {})
    return {"zero_optimization": {"offload_param": offload}, "zinfer": own}


Job = tuple[Path, dict[str, Any]]
Found = tuple[list[Computed], list[Any], JobSummary | None]


def several(rank: int, jobs: list[Job], served: list[Job], rows: tuple[Path, str, dict[str, int]] | None) -> Found:
    """What engines compute, what continuous batches give, and a job."""
    return computed(rank, jobs), [texts(rank, *each)[0] for each in served], job(rank, *rows) if rows else None


@pytest.mark.slow
def test_two_stages_of_two_ranks_compute_what_one_process_does(folders: dict[str, Path], tmp_path: Path) -> None:
    """Of bytes each rank has its part of its stage's."""
    cases = [(mode, *case) for mode in MODES for case in CASES[mode]]

    def jobs(*, is_alone: bool) -> list[Job]:
        return [
            (folders[name], config(homes, ALONE if is_alone else {"pipeline": 2, mode: 2}, codes, tmp_path / mode))
            for mode, name, homes, codes in cases
        ]

    of_one, divided = jobs(is_alone=True), jobs(is_alone=False)
    letters_model(tmp_path / "model", num_layers=4)
    write_rows(tmp_path / "in.jsonl", prompt_rows(16))
    alone, told, _ = several(0, of_one, [of_one[0], of_one[-1]], (tmp_path, "alone.jsonl", ALONE))
    sizes = {"pipeline": 2, "tensor": 2}
    found = run_ranks(4, several, divided, [divided[0], divided[-1]], (tmp_path, "stages.jsonl", sizes))
    for rank, (_, own_told, _) in enumerate(found):
        assert own_told == told, rank
    for place, (case, (logits, tokens, whole)) in enumerate(zip(cases, alone, strict=True)):
        assert len(set(tokens.flatten().tolist())) > 8, "tokens that any model would give"
        own = [each[place] for each, *_ in found]
        for own_logits, own_tokens, _ in own:
            assert float((own_logits - logits).abs().max() / logits.abs().max()) <= MOST_ERROR, case
            assert torch.equal(own_tokens, tokens), case
        check_bytes([stats for _, _, stats in own], whole, case)
    check_rows(tmp_path, found[0][2], 16)


def check_rows(folder: Path, summary: JobSummary | None, num_rows: int) -> None:
    """The rows of a job are one process's, and all four ranks computed each pass."""
    wanted, rows = ({row["id"]: row for row in read_rows(folder / f"{name}.jsonl")} for name in ("alone", "stages"))
    assert len(rows) == len(wanted) == num_rows
    assert rows == wanted
    assert summary is not None
    passes = [stats.passes for stats in (summary.stats, *summary.other_ranks) if stats is not None]
    assert len(passes) == 4
    assert min(passes) == max(passes) > 0


def check_bytes(own: list[RunStats], whole: RunStats, case: tuple[Any, ...]) -> None:
    """Of five layers one stage has three, and its ranks half of each. Norms are not divided."""
    for stats in own:
        assert stats.streamed_bytes_per_pass < 0.32 * whole.streamed_bytes_per_pass, case
        assert stats.disk_bytes_per_pass < 0.32 * whole.disk_bytes_per_pass or not whole.disk_bytes_per_pass, case
        assert case[2] != "cpu" or stats.loaded_bytes < 0.32 * whole.loaded_bytes, case
        assert stats.gathered_bytes == 0
    for name in ("streamed_bytes_per_pass", "disk_bytes_per_pass", *(["loaded_bytes"] if case[2] == "cpu" else [])):
        together, of_one = sum(getattr(stats, name) for stats in own), getattr(whole, name)
        assert of_one <= together <= 1.05 * of_one, (case, name)


@pytest.mark.slow
def test_a_job_whose_stages_divide_experts(tmp_path: Path) -> None:
    letters_tokenizer().save_pretrained(mixtral(tmp_path / "model", 4))
    write_rows(tmp_path / "in.jsonl", prompt_rows(24))
    job(0, tmp_path, "alone.jsonl", ALONE)
    summary, *_ = run_ranks(4, job, tmp_path, "stages.jsonl", {"pipeline": 2, "expert": 2})
    check_rows(tmp_path, summary, 24)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"zero": 2, "tensor": 2}, {"expert": 2, "tensor": 2}], ids=["zero", "expert"])
def test_three_modes_on_eight_ranks(folders: dict[str, Path], sizes: dict[str, int]) -> None:
    """Stages that share and divide their layers, and stages whose groups divide experts."""
    of_one, jobs = [
        [(folders["mixtral"], config(homes, each, None, Path())) for homes in ("cpu", "nvme")]
        for each in (ALONE, {"pipeline": 2, **sizes})
    ]
    alone, told, _ = several(0, of_one, of_one[:1], None)
    for rank, (found, own_told, _) in enumerate(run_ranks(8, several, jobs, jobs[:1], None)):
        assert own_told == told, rank
        for (own_logits, own_tokens, _), (logits, tokens, _) in zip(found, alone, strict=True):
            assert float((own_logits - logits).abs().max() / logits.abs().max()) <= MOST_ERROR, rank
            assert torch.equal(own_tokens, tokens), rank


@pytest.mark.slow
@pytest.mark.parametrize("lost", [1, 2])
def test_a_killed_rank_ends_the_others(folders: dict[str, Path], tmp_path: Path, lost: int) -> None:
    with Ranks(4, lasting, folders["untied"], {"pipeline": 2, "tensor": 2}, tmp_path) as ranks:
        ranks.wait_until(lambda: all((tmp_path / str(rank)).exists() for rank in range(4)))
        ranks.kill(lost)
        found = ranks.results()
    for rank in {0, 1, 2, 3} - {lost}:
        assert not isinstance(found[rank], Failed), found[rank]
        assert f"rank {lost}" in found[rank]


@pytest.mark.slow
def test_parts_of_two_ranks_are_kept_for_any_number_of_stages(folders: dict[str, Path], tmp_path: Path) -> None:
    """Written by the first of three stages, and read by two."""
    alone = computed(0, [(folders["untied"], config("cpu", ALONE, INT4, Path()))])
    kept = tmp_path / "kept"
    writing = config("cpu", {"pipeline": 3, "tensor": 2}, INT4, Path()) | {"save_mp_checkpoint_path": str(kept)}
    run_ranks(6, computed, [(folders["untied"], writing)])
    for rank, (found,) in enumerate(
        run_ranks(4, computed, [(kept, config("cpu", {"pipeline": 2, "tensor": 2}, None, Path()))])
    ):
        assert torch.equal(found[1], alone[0][1]), rank
        assert float((found[0] - alone[0][0]).abs().max() / alone[0][0].abs().max()) <= MOST_ERROR
