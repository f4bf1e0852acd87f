"""`zinfer bench`: a job on random weights moves the bytes of a real one, and its numbers are finite."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_support import machine_with, rates
from reader_support import PAGE
from typer.testing import CliRunner, Result

from zinfer.batching.llm import LLM
from zinfer.cli import app
from zinfer.config import Settings, resolve_settings
from zinfer.engine import random_weights
from zinfer.engine.random_weights import RandomWeights, random_bytes, write_random
from zinfer.engine.routing import skew_routers, skewed_choice
from zinfer.errors import ConfigError, JobError
from zinfer.jobs import bench as bench_module
from zinfer.jobs import memory_cap
from zinfer.jobs.bench import BenchRequest, BenchResult, run_bench
from zinfer.jobs.bench_prompts import BenchPrompt, share_of
from zinfer.jobs.bench_summary import bench_document, bench_table
from zinfer.jobs.memory_cap import held_beyond
from zinfer.nvme.page_cache import CachedPages
from zinfer.planning import job_sizes
from zinfer.planning.presets import Machine
from zinfer.ranks.mesh import Mesh

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 1024,
}
EXPERTS: dict[str, Any] = {**LLAMA, "dtype": "bfloat16", "num_local_experts": 8, "num_experts_per_tok": 2}
MIXTRAL: dict[str, Any] = {**EXPERTS, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
GPT_OSS: dict[str, Any] = {
    **EXPERTS,
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "head_dim": 32,
    "sliding_window": 64,
}
DEEPSEEK: dict[str, Any] = {
    **LLAMA,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "dtype": "bfloat16",
    "num_key_value_heads": 8,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
}


@pytest.fixture(autouse=True)
def no_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No findings of an earlier probe."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def folder_of(config: dict[str, Any], tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def on_disk(tmp_path: Path) -> dict[str, Any]:
    offload = {"device": "nvme", "nvme_path": str(tmp_path / "scratch")}
    return {"zero_optimization": {"offload_param": offload}, "zinfer": {"max_host_memory": "60MB"}}


def bench(model: str, **options: Any) -> BenchResult:
    usual = {"rows": 3, "prompt_len": 8, "new_tokens": 2, "device": "cpu"}
    return run_bench(BenchRequest(model=model, **(usual | options)))


def zinfer_bench(*options: str) -> Result:
    return CliRunner().invoke(app, ["bench", "--device", "cpu", *options])


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("config", "weights", "experts"),
    [
        (LLAMA, None, "uniform"),
        (LLAMA, "fp16", "uniform"),
        (MIXTRAL, "int4", "zipf"),
        (GPT_OSS, "int4", "uniform"),
        (DEEPSEEK, "int4", "zipf"),
        (DEEPSEEK, "fp8", "uniform"),
        (LLAMA, "int8", "uniform"),
    ],
)
def test_a_shape_streams_from_disk(config: dict[str, Any], weights: str | None, experts: str, tmp_path: Path) -> None:
    found = bench(folder_of(config, tmp_path), weights=weights, experts=experts, config=on_disk(tmp_path))
    stats = found.stats
    assert (found.num_prompt_tokens, found.num_new_tokens, stats.passes) == (24, 6, 2)
    assert stats.blocks_by_home["DISK"] == config["num_hidden_layers"]
    assert stats.disk_bytes_per_pass == found.tier_bytes["DISK"] > 0
    assert stats.bytes_read_disk >= stats.loaded_bytes + 2 * stats.disk_bytes_per_pass
    assert stats.bytes_to_device == found.tier_bytes["DEVICE"] + 2 * stats.streamed_bytes_per_pass
    assert list((tmp_path / "scratch").iterdir()) == []


def test_sizes_are_planned_with_the_disk_of_the_random_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the disk of a model without files would count as infinitely fast."""
    read: list[tuple[Path, int]] = []

    def found(settings: Settings, files: Sequence[Path] | None) -> Machine:
        assert files is not None
        read.extend((file.parent.parent, file.stat().st_size) for file in files)
        return machine

    machine = machine_with(1_000_000_000, 10**10, rates(link_bytes_per_s=1e8))
    monkeypatch.setattr(job_sizes, "this_machine", found)
    monkeypatch.setattr(job_sizes, "find_limits", lambda settings: machine.limits)
    monkeypatch.setattr("zinfer.jobs.bench._SAMPLE_BYTES", 1 << 20)
    assert bench(folder_of(LLAMA, tmp_path), config=on_disk(tmp_path)).num_new_tokens == 6
    assert read == [(tmp_path / "scratch", 1 << 20)]
    assert list((tmp_path / "scratch").iterdir()) == []


def test_what_stays_on_disk_is_read_from_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Homes are filled from the page cache, which would make the passes too fast."""
    measure, held = bench_module._measure, list[bool]()

    def looking(request: BenchRequest, llm: LLM, weights: RandomWeights, *more: Any) -> BenchResult:
        with weights.file.open("rb") as file:
            pages = CachedPages(file.fileno())
        places = range(0, weights.file_bytes - PAGE, PAGE)
        held.append(sum(pages.hold(place, PAGE) for place in places) > len(places) // 2)
        return measure(request, llm, weights, *more)

    monkeypatch.setattr(bench_module, "_measure", looking)
    model = folder_of(LLAMA, tmp_path)
    bench(model, config=on_disk(tmp_path))
    monkeypatch.setattr(RandomWeights, "leave_cache", lambda self: None)
    bench(model, config=on_disk(tmp_path))
    assert held == [False, True]


def test_numbers_that_are_not_finite_stop_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_weights, "random_bytes", lambda size, dtype: torch.full((size,), 255, dtype=torch.uint8))
    with pytest.raises(JobError, match="prompt 1: the model's logits are not finite numbers"):
        bench(folder_of(LLAMA, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(("size_gb", "experts"), [(2, 7), pytest.param(20, 64, marks=pytest.mark.slow)])
def test_gigabytes_with_a_tenth_allowed(
    size_gb: int, experts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = size_gb * 10**9 // 20
    monkeypatch.setattr(random_weights, "_USUAL_BYTES", size_gb * (256 << 20) // 20)  # a smaller file takes less time
    shape = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 100, "num_local_experts": experts}
    model = folder_of({**MIXTRAL, **shape}, tmp_path)
    stated = {"tokens_per_pass": 64, "max_sequences": 1, "kv_cache_memory": unit // 10}  # of the cap too
    config = {"zinfer": {"max_host_memory": 2 * unit, **stated}}
    found = bench(model, rows=1, prompt_len=1, new_tokens=1, memory_cap=2 * unit, config=config)
    sizes, stats = found.tier_bytes, found.stats
    assert sum(sizes.values()) > 20 * unit
    assert stats.device_bytes <= 2 * unit
    assert stats.host_bytes <= 2 * unit
    assert sizes["DEVICE"] > 0.9 * unit  # slots, the cache and passes take the rest of the cap
    assert sizes["HOST"] > unit
    assert found.file_bytes < 0.3 * unit
    assert stats.passes == 1
    assert stats.loaded_bytes == sizes["DEVICE"] + sizes["HOST"]
    assert stats.bytes_read_disk >= sum(sizes.values())
    assert stats.bytes_to_device == sum(sizes.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("read_as", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_random_bytes_are_finite_however_they_are_read(dtype: torch.dtype, read_as: torch.dtype) -> None:
    values = random_bytes(1 << 16, dtype).view(read_as).float()
    assert values.isfinite().all()
    assert len(values.unique()) > 20


def test_the_file_is_as_large_as_asked_and_repeats_no_page(tmp_path: Path) -> None:
    file = tmp_path / "random.bin"
    write_random(file, (33 << 20) + 5, torch.float16)
    held = file.read_bytes()
    assert len(held) == (33 << 20) + 4096
    pages = [held[at : at + 4096] for at in range(0, len(held), 4096)]
    assert len(set(pages)) == len(pages)


def test_a_full_disk_names_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"1,?000\.00 TB of random weights are needed.*nvme_path"):
        write_random(tmp_path / "random.bin", 10**15, torch.float16)


def test_zipf_prefers_the_first_experts() -> None:
    logits = torch.randn(4096, 8, generator=torch.Generator().manual_seed(0))
    chosen = skewed_choice(logits, 2)
    assert (chosen[:, 0] != chosen[:, 1]).all()
    counts = torch.bincount(chosen.flatten(), minlength=8)
    assert counts.sum() == 2 * 4096
    assert counts[0] > 3 * counts[7] > 0
    plain = torch.bincount(logits.topk(2).indices.flatten(), minlength=8)
    assert plain.max() < 1.2 * plain.min()


def test_zipf_chooses_expert_n_about_one_nth_as_often() -> None:
    num_tokens = 1 << 16
    logits = 3 + 0.1 * torch.randn(num_tokens, 64, generator=torch.Generator().manual_seed(0))
    counts = torch.bincount(skewed_choice(logits, 1).flatten(), minlength=64)
    wanted = num_tokens / sum(1 / n for n in range(1, 65))
    for n in (1, 2, 4, 8, 16, 64):
        assert counts[n - 1] * n == pytest.approx(wanted, rel=0.2), f"expert {n}"


def test_zipf_needs_routers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--experts zipf: LlamaForCausalLM has no experts; use --experts uniform"):
        bench(folder_of(LLAMA, tmp_path), experts="zipf")

    class OddRouter(torch.nn.Module):
        pass

    with pytest.raises(ConfigError, match=r"Sequential has routers \(OddRouter\) that cannot be skewed"):
        skew_routers(torch.nn.Sequential(OddRouter()))


def test_the_command_prints_a_table_and_a_json_line(tmp_path: Path) -> None:
    options = ("--rows", "2", "--prompt-len", "4", "--new-tokens", "3")
    found = zinfer_bench("--model", folder_of(LLAMA, tmp_path), *options)
    assert found.exit_code == 0, found.output
    *table, line = found.stdout.splitlines()
    document = json.loads(line)
    assert (document["prompt_tokens"], document["new_tokens"], document["passes"]) == (8, 6, 3)
    assert document["predicted_s"] > 0
    assert document["tokens_per_s"] == pytest.approx(6 / document["seconds"])
    assert document["shares"].keys() == {"link", "disk", "compute"}
    for words in ("random weights", "blocks repeat its bytes", "predicted", "achieved"):
        assert any(words in row for row in table), words
    assert "weights: 7 blocks in memory\n" in found.stderr
    found = zinfer_bench("--model", str(tmp_path / "model"), *options, "--json")
    assert json.loads(found.stdout)["new_tokens"] == 6


def test_the_rows_of_a_file_are_the_prompts(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt_token_ids": [5, 6, 7]}\n{"prompt_token_ids": [9]}\n')
    found = bench(folder_of(LLAMA, tmp_path), rows=None, input=rows)
    assert (found.num_rows, found.num_prompt_tokens, found.num_new_tokens) == (2, 4, 4)


def test_a_row_gets_as_many_new_tokens_as_it_asks_for(tmp_path: Path) -> None:
    folder, rows = folder_of(LLAMA, tmp_path), tmp_path / "rows.jsonl"
    rows.write_text('{"prompt_token_ids": [5, 6, 7], "max_new_tokens": 3}\n{"prompt_token_ids": [9]}\n')
    found = bench(folder, rows=None, input=rows, new_tokens=6)
    assert (found.num_new_tokens, found.predicted.num_passes) == (9, 6)
    words = r"rows ask for 3 new tokens and others for 6 \(--new-tokens\); rivals generate as many for each"
    with pytest.raises(ConfigError, match=words):
        bench(folder, rows=None, input=rows, new_tokens=6, compare=("accelerate",))
    rows.write_text('{"prompt_token_ids": [5], "max_new_tokens": 2000}\n')
    with pytest.raises(ConfigError, match=r"line 1: .*2,?000 new ones are more than 1,?024"):
        bench(folder, rows=None, input=rows, new_tokens=6)
    rows.write_text('{"prompt_token_ids": [5], "n": 2, "temperature": 1.0}\n')
    with pytest.raises(ConfigError, match="line 1: n is 2, and a bench generates one text a row; repeat the row"):
        bench(folder, rows=None, input=rows, new_tokens=6)


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ({"rows": 2}, "give --rows 4 at least"),
        ({"input": Path("rows.jsonl")}, "add rows to rows.jsonl until it has 4, or give --ranks 2 at most"),
    ],
)
def test_too_few_prompts_for_the_ranks_are_refused(given: dict[str, Any], remedy: str) -> None:
    request = BenchRequest("model", 4, **given)
    with pytest.raises(ConfigError, match=f"^2 prompts are too few for 4 ranks; {remedy}$"):
        share_of([BenchPrompt((1,), 4)] * 2, 0, Mesh.of({}, ["a"] * 4), request)


def test_the_names_of_published_models_are_listed() -> None:
    assert "llama-3-70b" in zinfer_bench("--model", "list").stdout.split()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rows", "1", "--memory-cap", "1MB"], "--memory-cap 1.00 MB (zinfer.max_device_memory): "),
        (["--rows", "1", "--memory-cap", "24G"], "--max-device-memory = '24G': expected a positive number of bytes"),
        (["--rows", "1", "--input", "x.jsonl"], "--rows and --input both set the number of rows; remove one"),
        ([], "--rows or --input is missing"),
        (["--rows", "1", "--prompt-len", "4000"], "--prompt-len and --new-tokens: "),
        (["--input", "absent.jsonl"], "absent.jsonl does not exist"),
    ],
)
def test_unusable_options_are_one_line(options: list[str], said: str, tmp_path: Path) -> None:
    check_refused(zinfer_bench("--model", folder_of(LLAMA, tmp_path), *options), said)


def check_refused(found: Result, said: str) -> None:
    assert found.exit_code == 2
    assert said in found.stderr
    assert "Traceback" not in found.output
    assert len([line for line in found.stderr.splitlines() if line.startswith("zinfer: error: ")]) == 1
    assert found.stdout == ""


def test_models_that_are_not_there(tmp_path: Path) -> None:
    check_refused(zinfer_bench("--model", "lama-3-8b", "--rows", "1"), "did you mean meta-llama/Meta-Llama-3-8B?")
    empty = zinfer_bench("--model", str(tmp_path), "--rows", "1")
    check_refused(empty, "an empty folder: pass the folder that holds config.json")


def test_a_cap_above_what_is_free_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_cap, "choose_device", lambda settings: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 2 * 10**9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    settings = resolve_settings({})
    with (
        pytest.raises(ConfigError, match=r"24.00 GB are asked for, but only 1.00 GB of a card are free"),
        held_beyond(24 * 10**9, settings),
    ):
        pass
    with held_beyond(None, settings) as held:
        assert held == (0, 10**9)


@pytest.mark.gpu
@pytest.mark.alone
def test_the_rest_of_a_gpu_is_held() -> None:
    torch.cuda.empty_cache()
    before, _ = torch.cuda.mem_get_info()
    with held_beyond(10**9, resolve_settings({})) as (held, used):
        inside, total = torch.cuda.mem_get_info()
        assert inside <= 10**9
        assert held == before - 10**9
        assert used == total - before
    assert torch.cuda.mem_get_info()[0] >= before - (64 << 20)


def test_what_was_held_is_said(tmp_path: Path) -> None:
    found = bench(folder_of(LLAMA, tmp_path))
    document = bench_document(found)
    assert document["held_bytes"] == document["context_bytes"] == 0
    assert "held" not in list(bench_table(found).columns[0].cells)


@pytest.mark.parametrize("stated", [None, "auto", "ngram"])
def test_texts_of_random_weights_are_not_guessed_unless_asked_for(
    stated: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def opens(settings: Settings, *others: object) -> None:
        asked.append(settings.batching.speculate)

    monkeypatch.setattr("zinfer.batching.batched_model.open_speculation", opens)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    config = {} if stated is None else {"zinfer": {"speculate": stated}}
    run_bench(BenchRequest(str(tmp_path), 2, rows=1, prompt_len=4, device="cpu", config=config))
    assert asked == ["ngram" if stated == "ngram" else "off"]
