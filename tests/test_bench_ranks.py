"""`zinfer bench` on several ranks: each makes and keeps its share, and one summary tells of all."""

import json
import os
from math import prod
from pathlib import Path
from typing import Any

import pytest
from ranks_support import Failed, Ranks, run_ranks
from test_bench import LLAMA, MIXTRAL, folder_of
from typer.testing import CliRunner

from zinfer.jobs.bench import run_bench
from zinfer.jobs.bench_request import BenchRequest
from zinfer.jobs.bench_result import BenchResult

ROWS = 6


def benched(
    rank: int, model: str, cache: Path, parallel: object, homes: list[str], most_bytes: int | None = None
) -> list[BenchResult]:
    """The bytes are for layers on the device."""
    os.environ["XDG_CACHE_HOME"] = str(cache)
    found = []
    for device in homes:
        options = {"parallel": parallel, "kv_cache_memory": "1MB", "kv_page_size": 16}
        if device == "none":
            options["max_weight_memory"] = most_bytes
        given = {"zero_optimization": {"offload_param": {"device": device}}, "zinfer": options}
        request = BenchRequest(model, 4, rows=ROWS, prompt_len=8, device="cpu", config=given)
        found.append(run_bench(request))
    return found


def command(rank: int, model: str, cache: Path, *options: str) -> tuple[int, str, str]:
    """The command in a process that torchrun started."""
    from zinfer.cli import app

    os.environ["XDG_CACHE_HOME"] = str(cache)
    shape = ("--rows", str(ROWS), "--prompt-len", "8", "--new-tokens", "4", "--device", "cpu")
    found = CliRunner().invoke(app, ["bench", "--model", model, *shape, *options])
    return found.exit_code, found.stdout, found.stderr


def test_each_rank_makes_and_keeps_its_half(tmp_path: Path) -> None:
    layers = 12
    model, homes = folder_of({**LLAMA, "num_hidden_layers": layers}, tmp_path), ["nvme", "none"]
    alone = benched(0, model, tmp_path, "auto", homes)
    outer, layers_bytes = alone[0].tier_bytes["DEVICE"], alone[0].tier_bytes["DISK"]
    cap = outer + layers_bytes * 4 // 5 + (2 << 20)  # with more each rank would have whole layers
    first, second = run_ranks(2, benched, model, tmp_path, {"zero": 2}, homes, cap)
    for place, (whole, together) in enumerate(zip(alone, first, strict=True)):
        assert second[place].ranks == together.ranks, "all ranks know of all"
        assert together.num_rows == whole.num_rows == ROWS
        assert together.num_new_tokens == whole.num_new_tokens == 4 * ROWS
        assert [each.num_rows for each in together.ranks] == [3, 3]
        assert together.tokens_per_s == together.num_new_tokens / max(each.seconds for each in together.ranks)
        assert [each.file_bytes for each in together.ranks] == [whole.file_bytes, 0], "the second reads the first's"
        assert len({each.file for each in together.ranks}) == 1
        for each in together.ranks:
            slack = 4096 * (layers + 3)
            assert abs(each.stats.loaded_bytes - whole.stats.loaded_bytes / 2) <= slack
            assert each.stats.streamed_bytes_per_pass == whole.stats.streamed_bytes_per_pass / 2
            assert each.stats.disk_bytes_per_pass == whole.stats.disk_bytes_per_pass / 2
            assert each.stats.gathered_bytes > 0
        for tier in ("HOST", "DISK"):
            assert together.tier_bytes[tier] == whole.tier_bytes[tier]
    for each in first[1].ranks:
        undivided_bytes = each.tier_bytes["DEVICE"] - outer - layers_bytes / 2  # the other halves of some layers
        assert undivided_bytes % (layers_bytes / layers / 2) == 0
        assert 0 <= undivided_bytes < layers_bytes * 0.3


@pytest.mark.slow
def test_replicas_have_all_of_it(tmp_path: Path) -> None:
    model = folder_of(LLAMA, tmp_path)
    [alone] = benched(0, model, tmp_path, "auto", ["cpu"])
    [[together], _] = run_ranks(2, benched, model, tmp_path, {"replicas": 2}, ["cpu"])
    assert [each.stats.loaded_bytes for each in together.ranks] == [alone.stats.loaded_bytes] * 2
    assert together.tier_bytes == {tier: 2 * nbytes for tier, nbytes in alone.tier_bytes.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({"tensor": 2}, LLAMA),
        ({"expert": 2}, MIXTRAL),
        pytest.param({"expert": 2, "tensor": 2}, MIXTRAL, marks=pytest.mark.slow),
    ],
)
def test_ranks_that_divide_layers_have_the_same_rows(
    tmp_path: Path, sizes: dict[str, int], shape: dict[str, Any]
) -> None:
    model = folder_of(shape, tmp_path)
    [alone] = benched(0, model, tmp_path, "auto", ["cpu"])
    size = prod(sizes.values())
    [[together], *_] = run_ranks(size, benched, model, tmp_path, sizes, ["cpu"])
    assert [each.num_rows for each in together.ranks] == [ROWS] * size
    assert (together.num_rows, together.num_new_tokens) == (ROWS, alone.num_new_tokens)
    for each in together.ranks:
        assert 1 / size <= each.stats.streamed_bytes_per_pass / alone.stats.streamed_bytes_per_pass < 1 / size + 0.04


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [{"pipeline": 2}, *(pytest.param({"pipeline": 2, mode: 2}, marks=pytest.mark.slow) for mode in ("zero", "tensor"))],
)
def test_stages_have_random_layers_of_their_own(tmp_path: Path, parallel: dict[str, int]) -> None:
    model, size = folder_of({**LLAMA, "num_hidden_layers": 4}, tmp_path), prod(parallel.values())
    [alone] = benched(0, model, tmp_path, "auto", ["cpu"])
    [[together], *_] = run_ranks(size, benched, model, tmp_path, parallel, ["cpu"])
    assert together.num_new_tokens == alone.num_new_tokens
    for each in together.ranks:
        norms_bytes = 0.02 * alone.stats.streamed_bytes_per_pass if "tensor" in parallel else 0
        assert 0 <= each.stats.streamed_bytes_per_pass - alone.stats.streamed_bytes_per_pass / size <= norms_bytes
        assert each.stats.passes > 0


@pytest.mark.slow
def test_the_first_rank_speaks(tmp_path: Path) -> None:
    model = folder_of(LLAMA, tmp_path)
    (tmp_path / "few.json").write_text('{"zinfer": {"max_weight_memory": "5MB"}}')
    (code, said, _), silent = run_ranks(2, command, model, tmp_path, "--config", str(tmp_path / "few.json"))
    assert code == 0
    assert silent == (0, "", "")
    assert said.count("zinfer bench") == 1
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    for name in ("rows", "passes", "loaded_bytes", "host_bytes", "random_file_bytes"):
        assert found[name] == sum(each[name] for each in found["ranks"])
    assert found["rows"] == ROWS
    assert "gathered from other ranks" in " ".join(said.replace("│", " ").split())


def test_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    found = Ranks(2, command, folder_of(LLAMA, tmp_path), tmp_path, "--ranks", "3").results()
    assert not any(isinstance(each, Failed) for each in found)
    assert [code for code, _, _ in found] == [2, 2]
    assert "--ranks is 3, but 2 processes were started; leave --ranks out" in " ".join(found[0][2].split())
