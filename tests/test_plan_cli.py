"""`zinfer plan` in this process: what it prints, its exit codes and its words."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import tiny_checkpoint
from plan_support import CONFIGS, NUM_PARAMS, QUANTIZED_ELSEWHERE, SMALL_LLAMA, machine_with, search_less, write_config
from probe_support import CARD, made_up_device, made_up_findings
from typer.testing import CliRunner, Result

import zinfer
from zinfer.cli import app
from zinfer.errors import CheckpointError, ConfigError, ZinferError
from zinfer.planning.data_sheets import DATA_SHEETS, find_data_sheet
from zinfer.planning.presets import PRESETS
from zinfer.planning.step_time import speed
from zinfer.units import duration, human_bytes


@pytest.fixture(autouse=True)
def no_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No findings of an earlier probe, and short searches for what would fit."""
    search_less(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module", params=CONFIGS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def zinfer_plan(model: Path | str, *options: str) -> Result:
    return CliRunner().invoke(app, ["plan", "--model", str(model), *options], env={"COLUMNS": "200"})


def document(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


@pytest.mark.sampled(75)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_config_alone_is_planned_for_a_preset(name: str, preset: str, tmp_path: Path) -> None:
    options = ("--machine", preset, "--batch-size", "4", "--prompt-len", "256", "--new-tokens", "32")
    folder = write_config(tmp_path, CONFIGS[name])
    result = zinfer_plan(folder, *options)
    if (name, preset) == ("BLOOM-176B", "t4"):  # two slots of its embedding take 14.4 GB
        assert result.exit_code == 2
        assert "does not fit" in result.output
        return
    assert result.exit_code == 0, result.output
    for words in ("config.json alone", f"preset {preset}", "home DEVICE", "KV cache", "decode pass", "bottleneck"):
        assert words in result.stdout
    found = document(zinfer_plan(folder, *options, "--json"))
    assert sum(found["tier_bytes"].values()) == found["model"]["bytes"] == pytest.approx(2 * NUM_PARAMS[name], rel=1e-6)
    assert found["memory"]["device_bytes"] <= found["budgets"]["device_bytes"]
    assert found["memory"]["host_bytes"] <= found["budgets"]["host_bytes"]
    for time_of_pass in (found["prefill"], found["decode"]):
        terms = [time_of_pass[key] for key in ("disk_s", "link_s", "host_s", "device_s")]
        matrix_s = sum(time_of_pass[key] for key in ("matrix_s", "cache_s", "between_s"))
        assert time_of_pass["seconds"] == pytest.approx(max(*terms, matrix_s))
    seconds = found["prefill"]["seconds"] + 31 * found["decode"]["seconds"]
    assert found["tokens_per_s"] == pytest.approx(4 * 32 / seconds)
    assert f"({found['bottleneck']})" in result.stdout
    for each in found["advice"]:
        assert f"advice: {each['change']}" in result.stdout


def test_a_checkpoint_is_planned_as_it_is_run(checkpoint: Path, tmp_path: Path) -> None:
    """On this machine, whose disk is measured with the checkpoint's own files."""
    config = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}, "zinfer": {"device": "cpu"}}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    lengths = ("--batch-size", "2", "--prompt-len", "16", "--new-tokens", "4")
    found = document(zinfer_plan(checkpoint, "--config", str(path), *lengths, "--json"))
    assert found["machine"]["name"] == "this machine"
    assert found["machine"]["origin"] == "measured in a hurry; zinfer probe measures better"
    engine = zinfer.init_inference(checkpoint, config)
    try:
        assert found["homes"] == [home.tier.value for home in engine.plan.homes]
        assert found["streamed_bytes"] == engine.plan.streamed_bytes
        assert found["memory"]["slot_bytes"] == engine.plan.slot_bytes
    finally:
        engine.destroy()
    assert found["decode"]["disk_s"] == pytest.approx(
        found["tier_bytes"]["disk"] / found["machine"]["disk_bytes_per_s"], rel=0.01
    )


def probe_on_file(folder: Path, *gpus: str) -> Path:
    findings = made_up_findings(
        card=replace(CARD, gpus=gpus), devices=tuple(made_up_device() for _ in gpus or ("the CPU",)), together=()
    )
    path = folder / f"probe-{len(gpus)}.json"
    path.write_text(findings.to_json())
    return path


def test_a_probe_on_file_gives_the_rates(checkpoint: Path, tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text('{"zinfer": {"device": "cpu"}}')
    options = ("--config", str(config), "--prompt-len", "16", "--new-tokens", "4", "--json")
    found = document(zinfer_plan(checkpoint, *options, "--probe", str(probe_on_file(tmp_path))))
    assert found["machine"]["origin"] == "measured by zinfer probe on 2026-11-21"
    assert found["machine"]["link_bytes_per_s"] == 55e9
    assert found["machine"]["disk_bytes_per_s"] == 20e9
    of_gpu = str(probe_on_file(tmp_path, "a GPU"))
    check_refused(zinfer_plan(checkpoint, *options, "--probe", of_gpu), "rates of a cuda device")
    both = zinfer_plan(checkpoint, *options, "--probe", of_gpu, "--machine", "h200")
    check_refused(both, "--machine and --probe both set")


def test_presets_are_listed() -> None:
    result = CliRunner().invoke(app, ["plan", "--machine", "list"], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    assert all(f"│ {preset} " in result.stdout for preset in PRESETS)
    assert re.search(r"h200 +│ +141 +│ +512 +│ +55.5 +│ +4.1 +│ +4,100 +│ +790", result.stdout)


@pytest.mark.parametrize(
    ("name", "preset"), [(each, sheet.name) for sheet in DATA_SHEETS.values() for each in sheet.aliases]
)
def test_cards_are_found_by_their_names_in_nvidia_smi(name: str, preset: str) -> None:
    assert find_data_sheet(name).name == find_data_sheet(name.upper()).name == find_data_sheet(preset).name == preset


@pytest.mark.slow
def test_figures_of_a_preset_can_be_stated(tmp_path: Path) -> None:
    folder = write_config(tmp_path, CONFIGS["Llama-3-70B"])
    stated = ("--host-memory", "128GB", "--link", "20 GB/s", "--disk", "3GB/s")
    found = document(zinfer_plan(folder, "--machine", "RTX 4090", *stated, "--json"))
    assert (found["machine"]["link_bytes_per_s"], found["machine"]["disk_bytes_per_s"]) == (20e9, 3e9)
    assert found["budgets"]["host_bytes"] == 128e9 - (16 << 30)
    told = zinfer_plan(folder, "--machine", "rtx4090", *stated).stdout
    assert "preset rtx4090, 128.00 GB of host memory, link 20.00 GB/s, disk 3.00 GB/s" in told
    as_it_is = document(zinfer_plan(folder, "--machine", "rtx4090", "--json"))
    assert found["tokens_per_s"] > as_it_is["tokens_per_s"], "64 GB do not hold the model"
    check_refused(zinfer_plan(folder, *stated), "--host-memory and --link and --disk", "add --machine NAME")
    check_refused(zinfer_plan(folder, "--machine", "t4", "--link", "fast"), "--link = 'fast'", "like 25GB/s")
    check_refused(zinfer_plan(folder, "--machine", "t4", "--host-memory", "9GB/s"), "--host-memory = '9GB/s': expected")
    check_refused(zinfer_plan(folder, "--machine", "t4", "--link", "25Gb/s"), "Gb are bits", "such as", "like 25GB/s")


def check_refused(result: Result, *words: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert all(word in result.stderr for word in words), result.stderr


def test_a_budget_above_what_a_machine_has_is_said_and_does_not_replace_it(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    batch = ("--machine", "rtx4090", "--batch-size", "4", "--prompt-len", "64", "--new-tokens", "8", "--json")

    def planned(host: str | None, *options: str) -> tuple[int, str]:
        config.write_text(json.dumps({"zinfer": {"max_host_memory": host} if host else {}}))
        result = zinfer_plan("llama-3-70b", *batch, "--config", str(config), *options)
        return document(result)["memory"]["host_bytes"], " ".join(result.stderr.split())

    host_bytes, said = planned("300GB")
    assert 50 * 10**9 < host_bytes <= 64 * 10**9, "the preset's 64 GB"
    assert said == (
        "zinfer: zinfer.max_host_memory is 300.00 GB, more than the 64.00 GB that there are for it: these are planned "
        "with; --host-memory states what the host of a preset has"
    )
    host_bytes, said = planned("300GB", "--host-memory", "512GB")
    assert (host_bytes > 64 * 10**9, said) == (True, "")
    assert planned("60GB")[0] > planned(None)[0] > planned("30GB")[0]


def test_what_cannot_be_planned_is_refused_in_words(checkpoint: Path, tmp_path: Path) -> None:
    large = write_config(tmp_path / "large", CONFIGS["OPT-175B"])
    check_refused(
        zinfer_plan(checkpoint, "--machine", "abacus"), "no such preset; there are t4, a10", "b200 (`--machine"
    )
    (tmp_path / "empty").mkdir()
    check_refused(zinfer_plan(tmp_path / "empty", "--machine", "h200"), "empty folder", "config.json")
    check_refused(zinfer_plan(tmp_path / "nowhere", "--machine", "h200"), "no such folder")
    check_refused(
        zinfer_plan("llama3-70b", "--machine", "h200"), "no such folder", "did you mean meta-llama/Meta-Llama-3-70B?"
    )
    fits_not = zinfer_plan(large, "--machine", "a6000", "--batch-size", "64")
    check_refused(fits_not, "the request does not fit", "KV cache", "lower the batch size first")
    check_refused(fits_not, "what would fit: a job that shares its passes (--rows 64 instead of --batch-size), or --b")
    check_refused(zinfer_plan(large, "--machine", "h200", "--prompt-len", "2048"), "2048 (the model's positions)")
    check_refused(zinfer_plan(large, "--probe", str(tmp_path / "none.json")), "none.json", "zinfer probe --json")


@pytest.mark.parametrize("name", QUANTIZED_ELSEWHERE)
def test_a_config_that_a_run_refuses_is_not_planned(name: str, checkpoint: Path, tmp_path: Path) -> None:
    """In the run's own words, although there are no weights to plan with."""
    config = QUANTIZED_ELSEWHERE[name]
    planned = zinfer_plan(write_config(tmp_path / "alone", config), "--machine", "h200", "--rows", "9")
    whole = tmp_path / "whole"
    shutil.copytree(checkpoint, whole)
    section = {"quantization_config": config["quantization_config"]}
    write_config(whole, json.loads((whole / "config.json").read_text()) | section)
    with pytest.raises(CheckpointError) as refused:
        zinfer.init_inference(whole, {"zinfer": {"device": "cpu"}})
    check_refused(planned, str(refused.value))
    assert "use the full-precision checkpoint and quantize it while loading" in planned.stderr


@pytest.mark.parametrize(
    "config",
    [
        {"checkpoint": "elsewhere"},
        {"injection_policy": {"Foo": ["a.b"]}},
        {"min_out_tokens": 10**6},
        {"moe": {"enabled": True, "moe_experts": [8]}},
        {"zinfer": {"quantization": {"bits": 8, "include": ["nothing"]}}},
        {"zinfer": {"draft_model": "nowhere"}},
    ],
)
def test_a_configuration_that_a_run_refuses_is_not_planned(
    config: dict[str, Any], checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(ZinferError) as refused:
        zinfer.LLM(str(checkpoint), {**config, "zinfer": {"device": "cpu", **config.get("zinfer", {})}})
    written = tmp_path / "ds.json"
    written.write_text(json.dumps(config))
    planned = zinfer_plan(checkpoint, "--machine", "h200", "--config", str(written), "--rows", "9")
    check_refused(planned, str(refused.value))


def test_rows_that_are_scored_may_fill_the_context(checkpoint: Path, tmp_path: Path) -> None:
    positions = json.loads((checkpoint / "config.json").read_text())["max_position_embeddings"]
    row = {"prompt_token_ids": [5] * positions, "max_new_tokens": 0, "prompt_logprobs": 0}
    rows = tmp_path / "in.jsonl"
    rows.write_text(json.dumps(row) + "\n")
    assert document(zinfer_plan(checkpoint, "--machine", "t4", "--input", str(rows), "--json"))["rows"] == 1
    rows.write_text(json.dumps({**row, "max_new_tokens": 1}) + "\n")
    check_refused(zinfer_plan(checkpoint, "--machine", "t4", "--input", str(rows)), "leaves no room for new ones")


def test_a_config_alone_does_not_tell_which_weights_are_quantized(tmp_path: Path) -> None:
    groups = {name: {"targets": [name], "weights": {"num_bits": 4, "group_size": 128}} for name in ("up", "down")}
    section = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    folder = write_config(tmp_path, CONFIGS["Llama-3-70B"] | {"quantization_config": section})
    refused = zinfer_plan(folder, "--machine", "h200")
    check_refused(refused, "config.json: quantization_config says", "plan with the whole checkpoint, or remove")


def test_without_files_and_record_a_probe_is_asked_for(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "large", CONFIGS["OPT-175B"])
    named = "plan for a machine that is known with --machine (`zinfer plan --machine list` lists them)"
    check_refused(zinfer_plan(folder), "run `zinfer probe --path FOLDER` once", named)


def test_a_machine_that_is_not_known_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    """In a process of its own, which imports neither torch nor transformers for it."""
    code = (
        "import sys; from zinfer.cli import app\n"
        f"try: app(['plan', '--model', {str(tmp_path / 'none')!r}, '--machine', 'rtx4900'])\n"
        "finally: print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "False False\n"), ended.stderr
    assert "--machine rtx4900: no such preset; did you mean rtx4090" in ended.stderr


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("a100", "a100-40gb or a100-80gb"),
        ("NVIDIA H100", "h100-pcie or h100-sxm"),
        ("rtx", "rtx3090, rtx4090, rtx5090 or a6000"),
    ],
)
def test_a_name_that_leaves_cards_open_is_answered_with_them(name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=rf"--machine {name}: no such preset; did you mean {near}\? \("):
        find_data_sheet(name)


def test_an_a10g_is_no_a10() -> None:
    a10, a10g = find_data_sheet("NVIDIA A10"), find_data_sheet("NVIDIA A10G")
    assert (a10.flops_per_s, a10g.flops_per_s) == (125e12, 70e12)
    assert a10.memory_bytes_per_s == a10g.memory_bytes_per_s


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--host-memory", "1", "--host-memory = '1' is 1 byte, too little for any machine; write 1GB"),
        ("--host-memory", "128", "--host-memory = '128' is 128 bytes, too little for any machine; write 128GB"),
        ("--host-memory", "2kB", "--host-memory = '2kB' is 2,000 bytes, too little for any machine; state its unit"),
        ("--link", "25", "--link = '25' is 25 bytes/s, too little for any machine; write 25GB/s"),
        ("--disk", "7", "--disk = '7' is 7 bytes/s, too little for any machine; write 7GB/s"),
    ],
)
def test_a_figure_without_its_unit_is_refused_with_what_was_read(option: str, value: str, words: str) -> None:
    refused = zinfer_plan("llama-3-70b", "--machine", "rtx4090", option, value, "--rows", "100")
    assert refused.exit_code == 2
    assert words in " ".join(refused.stderr.split())


def test_a_host_with_next_to_nothing_is_planned_or_refused(tmp_path: Path) -> None:
    folder, config = write_config(tmp_path, SMALL_LLAMA), tmp_path / "ds.json"
    for tier in ("host", "auto"):
        own = {"max_host_memory": 1} | ({"kv_cache_tier": tier} if tier == "host" else {})
        config.write_text(json.dumps({"zinfer": own}))
        options = ("--machine", "t4", "--rows", "100", "--prompt-len", "16", "--new-tokens", "4", "--ranks", "2")
        ended = zinfer_plan(folder, *options, "--config", str(config))
        assert ended.exit_code in (0, 2), ended.output
        assert not isinstance(ended.exception, ArithmeticError)


@pytest.mark.slow
def test_a_cap_is_named_with_its_own_figure_where_devices_divide_layers(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    options = (
        "--machine",
        "h200",
        "--ranks",
        "2",
        "--parallel",
        "tensor=2",
        "--batch-size",
        "2",
        "--config",
        str(config),
    )
    config.write_text('{"zinfer": {"max_device_memory": "1GB"}}')
    refused = " ".join(zinfer_plan("llama-3-70b", *options).stderr.split())
    found = re.search(r"zinfer.max_device_memory is 1.00 GB, too little: at least (\d+) bytes .* of 2 devices", refused)
    assert found, refused
    config.write_text(json.dumps({"zinfer": {"max_device_memory": int(found[1])}}))
    planned = zinfer_plan("llama-3-70b", *options)
    assert planned.exit_code == 0, planned.stderr
    assert f" {human_bytes(int(found[1]))} of each of 2 devices, beside" in planned.stdout


def test_a_batch_size_of_a_job_is_refused(tmp_path: Path) -> None:
    folder = write_config(tmp_path, SMALL_LLAMA)
    refused = zinfer_plan(folder, "--machine", "h200", "--rows", "9", "--batch-size", "32")
    check_refused(refused, "--batch-size", "--rows plans a job", "zinfer.max_sequences")


def test_a_refusal_names_what_was_stated_and_what_would_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, lengths = (
        write_config(tmp_path, SMALL_LLAMA | {"vocab_size": 512}),
        ("--prompt-len", "16", "--new-tokens", "4"),
    )
    options = ("--machine", "a6000", "--batch-size", "2", *lengths)
    fits = "what would fit: zinfer.quantization {"
    monkeypatch.setitem(PRESETS, "a6000", machine_with(833_500_000, 10**10))
    refused = zinfer_plan(folder, *options)
    check_refused(refused, "the device memory for weights is", "set zinfer.num_slots to 1, or quantize", fits)
    assert "max_device_memory" not in refused.stderr
    config = tmp_path / "ds.json"
    config.write_text('{"zinfer": {"max_weight_memory": "1MB", "num_slots": 2}}')
    refused = zinfer_plan(folder, *options, "--config", str(config))
    check_refused(refused, "zinfer.max_weight_memory is 1.00 MB", "raise it, or quantize")
    config.write_text('{"zinfer": {"max_weight_memory": "5MB", "num_slots": 2}}')
    refused = zinfer_plan(folder, *options, "--config", str(config))
    check_refused(refused, "zinfer.max_weight_memory is 5.00 MB", "raise it, or lower zinfer.num_slots, or quantize")
    monkeypatch.setitem(PRESETS, "a6000", machine_with(1_000_000_000, 10**10))
    config.write_text('{"zinfer": {"max_device_memory": "20MB"}}')
    refused = zinfer_plan(folder, *options, "--config", str(config))
    check_refused(refused, "zinfer.max_device_memory is 20.00 MB, too little: at least ", "(834.", "reserve 825.")
    refused = zinfer_plan(folder, "--machine", "a6000", "--batch-size", "4096", "--prompt-len", "64")
    fits = "what would fit: a job that shares its passes"
    check_refused(refused, fits, "or --batch-size ", "lower the batch size first")


def test_the_model_must_be_named() -> None:
    result = CliRunner().invoke(app, ["plan", "--machine", "h200"])
    assert result.exit_code == 2
    assert "--model" in result.stderr


@pytest.mark.slow
def test_ranks_share_the_weights_and_divide_the_rows(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"zero_optimization": {"offload_param": {"device": "cpu"}}}))
    shape = ("--machine", "h200", "--config", str(config), "--prompt-len", "64", "--new-tokens", "8", "--json")
    one = document(zinfer_plan("llama-3-70b", *shape, "--batch-size", "8"))
    two = document(zinfer_plan("llama-3-70b", *shape, "--batch-size", "16", "--ranks", "2"))
    assert two["request"]["batch_size"] == one["request"]["batch_size"] == 8, "each of the ranks has half of the rows"
    assert two["decode"]["link_s"] == pytest.approx(one["decode"]["link_s"] / 2, rel=1e-3)
    assert two["tokens_per_s_of_all_ranks"] == 2 * two["tokens_per_s"] > 3.9 * one["tokens_per_s"], (
        "both are link-bound"
    )
    assert two["memory"]["host_bytes"] == pytest.approx(one["memory"]["host_bytes"] / 2, rel=0.05)
    told = zinfer_plan("llama-3-70b", *shape[:-1], "--ranks", "2")
    assert "one of 2 ranks; all together:" in told.stdout


def test_a_plan_begins_with_its_answer_and_says_what_does_not_run_yet(tmp_path: Path) -> None:
    job = ("--gpu", "4090", "--rows", "64", "--prompt-len", "64", "--new-tokens", "8")
    first, second, *_ = zinfer_plan("Qwen/Qwen3-Next-80B-A3B", *job).stdout.splitlines()
    assert re.fullmatch(r"qwen3-next-80b-a3b on an RTX 4090 with 64 GB: .* for 64 rows, bound by .*", first)
    assert second.endswith("(bf16, 163 GB); planned as if it had full attention in every layer")
    found = document(zinfer_plan("Qwen/Qwen3-Next-80B-A3B", *job, "--json"))
    assert (found["answer"], found["note"]) == (first, second)
    batch = ("--machine", "a10", "--batch-size", "4", "--prompt-len", "64", "--new-tokens", "8")
    first, second, *_ = zinfer_plan("Qwen/Qwen3-32B", *batch).stdout.splitlines()
    found = document(zinfer_plan("Qwen/Qwen3-32B", *batch, "--json"))
    faster = next(each for each in found["advice"] if '"bits": 4' in each["change"])
    assert first == (
        f"qwen3-32b on an A10 with 64 GB: {speed(found['tokens_per_s'])}, {duration(found['seconds'])} for 4 prompts, "
        f"bound by the link to the GPU; with INT4 weights {speed(faster['tokens_per_s'])}"
    )
    assert second.startswith("zinfer plan: qwen3-32b on a10")
    weights = document(zinfer_plan("Qwen/Qwen3-32B", *batch, "--json", "--weights", "int4"))
    assert weights["model"]["bytes"] < 0.4 * found["model"]["bytes"]


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("", "the model's name is empty"),
        ("./llama-3-70b", "'./llama-3-70b': no such folder: pass the folder that holds config.json"),
        ("mistralai/Foo-7B", "not in the Hugging Face cache"),
        ("Qwen/Qwen3-33B", "did you mean Qwen/Qwen3-32B?"),
        ("unsloth/gpt-oss-120b-GGUF", "HF_HUB_OFFLINE forbids to download it"),
        ("https://huggingface.co/org/name", "HF_HUB_OFFLINE forbids to download it"),
        ("https://example.org/name", "an address, and zinfer downloads from the Hugging Face hub alone"),
        ("moonshotai/Kimi-K3", "does not run it yet, and knows too little of its layers"),
    ],
)
def test_a_name_that_is_no_model_is_refused_before_torch_is_imported(model: str, words: str) -> None:
    code = (
        "import sys; from zinfer.cli import app\n"
        f"try: app(['plan', '--model', {model!r}, '--machine', 'rtx4090'])\n"
        "finally: print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "False False\n"), ended.stderr
    assert words in ended.stderr
