"""The real `zinfer quantize`, killed in every way: the store that it leaves at last is that of an undisturbed run."""

import json
import os
import random
import re
import signal
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from checkpoints import tiny_checkpoint
from store_support import Quantizing, contents, document, formats_of
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner, Result

from zinfer.cli import app
from zinfer.kernels.quantized import QuantFormat

DEMO = Path(__file__).parent.parent / "examples" / "demo" / "model"
NUM_LAYERS = 24
NUM_BLOCKS = NUM_LAYERS + 2
# Searching for ranges takes a while, so that a signal comes before the end.
OPTIONS = ("--bits", "4", "--group-size", "64", "--asymmetric", "--search", "clip", "--device", "cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers of 1.3 MB."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        vocab_size=131,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="8MB")
    return folder


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The store of an undisturbed run."""
    command = Quantizing(model, tmp_path_factory.mktemp("whole") / "store", *OPTIONS)
    code, out, err = command.run()
    assert code == 0, err
    assert re.search(rf"blocks +│ +{NUM_BLOCKS} ", out)
    return contents(command.output)


@pytest.mark.slow
def test_a_command_that_is_killed_again_and_again_writes_the_same_bytes(
    model: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    command = Quantizing(model, tmp_path / "store", *OPTIONS)
    code, _ = command.end(signal.SIGKILL, lambda: command.num_finished() >= 0)
    assert code == -signal.SIGKILL
    for place in sorted(random.Random(11).sample(range(2, NUM_BLOCKS // 2), 2)):
        code, _ = command.end(signal.SIGKILL, lambda place=place: command.num_finished() > place)  # type: ignore[misc]
        assert code == -signal.SIGKILL
        assert place < command.num_finished() < NUM_BLOCKS
        assert not document(command.output)["finished"]
    num_finished = command.num_finished()

    def is_writing() -> bool:
        return command.num_finished() > num_finished and any(command.output.glob(".zinfer_store.block*"))

    assert command.end(signal.SIGKILL, is_writing)[0] == -signal.SIGKILL
    num_finished = command.num_finished()
    code, out, err = command.run()
    assert code == 0, err
    assert f"{NUM_BLOCKS}, {num_finished} of them before this run" in out
    assert f"{num_finished} of {NUM_BLOCKS} blocks are there already; going on." in err
    assert contents(command.output) == whole
    assert not (command.output / ".zinfer_store.lock").exists()
    code, out, err = command.run()
    assert code == 0
    assert "is finished already, from this model with these settings; nothing was written." in err


def test_signals_full_disks_and_second_writers_keep_what_is_finished(
    model: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    command = Quantizing(model, tmp_path / "store", *OPTIONS)
    # The norm's and the embedding's file fit, a layer's does not.
    limit_bytes = (
        max(len(whole["block-00001-of-00026.safetensors"]), len(whole["block-00002-of-00026.safetensors"])) - 1
    )
    code, _, said = command.run(limit_bytes=limit_bytes)
    assert code == 1, said
    assert re.search(
        r"error: \[Errno 27\] File too large: '.*/block-\d+-of-00026\.safetensors'\. The finished blocks in", said
    )
    assert "are kept; make room and run the same command again to go on" in said
    assert not list(command.output.glob(".zinfer_store.b*"))
    num_finished = command.num_finished()
    assert 1 <= num_finished < NUM_BLOCKS
    code, said = command.end(signal.SIGINT, lambda: command.num_finished() > num_finished)
    assert code == 130, said
    assert re.search(
        r"SIGINT: stopped\. The finished blocks in .* are kept; run the same command again to go on\.", said
    )
    num_finished = command.num_finished()
    process = command.start()
    while command.num_finished() == num_finished:
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGSTOP)
    code, _, refusal = command.run()
    assert code == 2, refusal
    assert "store is being written by another process; wait for it or end it" in refusal
    os.killpg(process.pid, signal.SIGTERM)
    os.killpg(process.pid, signal.SIGCONT)
    _, said = process.communicate(timeout=100)
    assert process.returncode == 143, said
    assert command.num_finished() < NUM_BLOCKS
    assert command.run()[0] == 0
    assert contents(command.output) == whole


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("small"), num_layers=2)


def invoke(model: Path, output: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["quantize", "--model", str(model), "--output", str(output), *options])


def test_options_become_the_stores_settings(small: Path, tmp_path: Path) -> None:
    patterns = ("--include", "mlp", "--include", "self_attn.q_proj", "--exclude", "down_proj")
    result = invoke(small, tmp_path / "store", "--bits", "4", "--group-size", "32", "--asymmetric", *patterns)
    assert result.exit_code == 0, result.output
    assert "ratio" in result.stdout
    members = document(tmp_path / "store")
    assert formats_of(tmp_path / "store") == [asdict(QuantFormat(4, 32, symmetric=False))]
    kinds = {name.split(".", 3)[3] for name in members["parameters"]}
    assert kinds == {"mlp.gate_proj.weight", "mlp.up_proj.weight", "self_attn.q_proj.weight"}
    result = invoke(small, tmp_path / "other", "--format", "fp8", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert formats_of(tmp_path / "other") == [asdict(QuantFormat(8, is_float=True))]


def test_a_configurations_section_is_the_same_as_options(small: Path, tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    section = {"bits": 4, "group_size": 32, "search": "clip"}
    config.write_text(json.dumps({"train_batch_size": 1, "zinfer": {"quantization": section}}))
    assert invoke(small, tmp_path / "store", "--config", str(config)).exit_code == 0
    result = invoke(small, tmp_path / "store", "--bits", "4", "--group-size", "32", "--search", "clip")
    assert result.exit_code == 0, result.output
    assert "is finished already" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--bits", "3"), r"error: zinfer\.quantization\.bits = 3: expected 4 or 8"),
        (("--bits", "4", "--format", "fp8"), r"error: .*bits"),
        (("--config", "ds.json"), r"error: the configuration asks for no quantized weights; state zinfer\.quant"),
        (("--config", "ds.json", "--asymmetric", "--group-size", "8"), r"--group-size, --asymmetric both set"),
        (("--config", "none.json"), r"none\.json: cannot be read \(No such file or directory\)"),
        (("--group-size", "48"), r"group_size = 48 does not divide the \d+ columns of model\.layers\.0"),
    ],
)
def test_what_cannot_be_used_exits_2(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text("{}")
    result = invoke(small, tmp_path / "store", *options)
    assert result.exit_code == 2, result.output
    assert re.search(message, result.stderr)
    assert not (tmp_path / "store").exists()


def test_folders_that_cannot_be_used_exit_2(small: Path, tmp_path: Path) -> None:
    assert invoke(small, tmp_path / "store").exit_code == 0
    result = invoke(tmp_path / "store", tmp_path / "again")
    assert result.exit_code == 2
    assert "already quantized" in result.stderr
    result = invoke(tmp_path / "nothing", tmp_path / "again")
    assert result.exit_code == 2
    assert "nothing': no such folder" in result.stderr
    result = invoke(small, tmp_path / "store", "--bits", "4")
    assert result.exit_code == 2
    assert "settings.rules[0].bits: 8 in the store, 4 now" in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_exits_2(small: Path, tmp_path: Path) -> None:
    result = invoke(small, tmp_path / "store", "--device", "cuda")
    assert result.exit_code == 2
    assert "torch sees no CUDA device" in result.stderr


def test_a_folder_that_cannot_be_made_exits_1(small: Path) -> None:
    result = invoke(small, Path("/proc/store"))
    assert result.exit_code == 1
    assert re.search(r"error: .*'/proc/store'.*check the disk and run the same command again", result.stderr)


def test_the_report_is_written_and_its_options_are_checked_first(tmp_path: Path) -> None:
    model = tiny_checkpoint("llama", tmp_path / "model", num_layers=2)
    store, page = tmp_path / "store", tmp_path / "report.html"
    arguments = ["--model", str(model), "--output", str(store), "--bits", "4", "--group-size", "32", "--device", "cpu"]
    rows, texts = tmp_path / "rows.jsonl", tmp_path / "texts.jsonl"
    texts.write_text('{"prompt": "7+8="}\n')
    rows.write_text('{"prompt_token_ids": [5, 6]}\n{"prompt_token_ids": [5, 999]}\n')
    for wrong, message in (
        (["--report", str(page), "--prompts", str(texts)], "line 1: the model's folder has no tokenizer"),
        (["--report", str(page), "--prompts", str(rows)], "line 2"),
        (["--prompts", str(model / "config.json")], "--report FILE.html"),
        (["--report", str(tmp_path / "no" / "report.html")], "is not a folder"),
        (["--report", str(page), "--prompts", str(tmp_path / "none.jsonl")], "no such file"),
    ):
        refused = CliRunner().invoke(app, ["quantize", *arguments, *wrong])
        assert refused.exit_code == 2
        assert message in refused.stderr
        assert not store.exists()
    result = CliRunner().invoke(app, ["quantize", *arguments, "--report", str(page)])
    assert result.exit_code == 0, result.output
    assert page.read_text().count("<rect") == 2 * 7
    assert "quantization errors" in result.stdout


def test_errors_are_reported_where_the_models_cannot_be_compared(tmp_path: Path) -> None:
    model = tiny_checkpoint("llama", tmp_path / "model", num_layers=2)
    page, rows, config = tmp_path / "report.html", tmp_path / "rows.jsonl", tmp_path / "config.json"
    rows.write_text('{"prompt_token_ids": [5, 6]}\n')
    small = {"quantization": {"bits": 4, "group_size": 32}, "max_device_memory": "20kB"}
    config.write_text(json.dumps({"zinfer": {"device": "cpu", **small}}))
    files = {"model": model, "output": tmp_path / "store", "config": config, "report": page, "prompts": rows}
    arguments = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    result = CliRunner().invoke(app, ["quantize", *arguments])
    assert result.exit_code == 2, result.output
    assert "max_device_memory" in result.stderr
    assert page.read_text().count("<rect") == 2 * 7
