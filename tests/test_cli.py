"""The `zinfer` command in this process: its exit codes and what it says."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs_support import letters_model, prompt_rows, read_rows, write_rows
from typer.testing import CliRunner, Result

import zinfer
from zinfer.batching.batcher import Batcher
from zinfer.cli import app
from zinfer.cli.app import _COMMANDS
from zinfer.jobs.completer import RaggedCompleter
from zinfer.jobs.request import manifest_path

DEMO = Path(__file__).resolve().parent.parent / "examples" / "demo" / "model"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return letters_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "in.jsonl", prompt_rows(6))


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def zinfer_run(model: Path, prompts: Path, output: Path, *options: str) -> Result:
    paths = ["--model", str(model), "--input", str(prompts), "--output", str(output)]
    return CliRunner().invoke(app, ["run", *paths, "--device", "cpu", "--max-new-tokens", "4", *options])


def config_file(folder: Path, content: dict[str, Any]) -> str:
    path = folder / "ds.json"
    path.write_text(json.dumps(content))
    return str(path)


def test_a_job_that_is_done_exits_0_with_a_table(model: Path, prompts: Path, output: Path, tmp_path: Path) -> None:
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}
    result = zinfer_run(model, prompts, output, "--config", config_file(tmp_path, config))
    assert result.exit_code == 0, result.output
    assert "6 done, 0 failed" in result.stdout
    assert len(read_rows(output)) == 6
    assert result.stderr.count("without effect: train_batch_size (") == 1
    assert "weights: 2 blocks on disk, 3 in memory; " in result.stderr
    [passes] = re.findall(r"passes +│ ([\d,]+)", result.stdout)
    [(read, unit)] = re.findall(r"moved +│ ([\d.]+) (kB|MB) read from disk", result.stdout)
    weights_bytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    assert int(passes) >= 4
    assert float(read) * {"kB": 1e3, "MB": 1e6}[unit] > int(passes) * weights_bytes / 2


def test_a_job_with_failed_rows_exits_3(model: Path, output: Path, tmp_path: Path) -> None:
    prompts = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}, "{"])
    for failed in ("1 failed: 1 x malformed", "1 failed; 2 rows before this run"):
        result = zinfer_run(model, prompts, output)
        assert result.exit_code == 3
        assert re.search(rf"1 done, {failed} +│", result.stdout)


def test_the_summary_is_a_line_of_json(model: Path, prompts: Path, output: Path) -> None:
    result = zinfer_run(model, prompts, output, "--json")
    said = json.loads(result.stdout)
    assert (said["command"], said["num_rows"], said["num_done"], said["num_failed"]) == ("run", 6, 6, 0)
    phases = ["starting", "checking", "planning", "loading", "first pass", "passes", "end"]
    assert list(said["phase_s"]) == phases
    assert all(seconds > 0 for seconds in said["phase_s"].values())
    assert sum(said["phase_s"].values()) == pytest.approx(said["wall_s"])
    assert said["ranks"][0]["passes"] > 0
    again = json.loads(zinfer_run(model, prompts, output, "--json").stdout)
    assert (again["num_skipped"], again["ranks"]) == (6, [])


def test_a_job_has_one_prediction(
    model: Path, prompts: Path, output: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The plan, the first lines of the run and its summary show the same number under the same name."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # without a probe, rates are measured once a process
    dry = zinfer_run(model, prompts, output, "--dry-run")
    result = zinfer_run(model, prompts, output)
    [planned] = re.findall(r"predicted +│ +(.*?) +│", dry.stdout)
    [begun] = re.findall(r"^predicted: (.*) for \d+ sequences$", result.stderr, re.MULTILINE)
    [(promised, took)] = re.findall(r"predicted +│ (.*); they took (.*?) +│", result.stdout)
    assert planned == begun
    assert begun.startswith(f"{promised} of ")
    assert f"{took.split(' for ')[0]}" in result.stdout


@pytest.mark.parametrize("command", ["run", pytest.param("bench", marks=pytest.mark.slow)])
def test_the_time_of_the_summary_is_the_process_own(command: str, model: Path, prompts: Path, output: Path) -> None:
    """From its start, with the imports and the end, by the clock of the one that started it."""
    code = (
        "import atexit, sys, time; atexit.register(lambda: print(time.monotonic(), file=sys.stderr)); "
        "from zinfer.cli import main; main()"
    )
    job = ["--input", str(prompts), "--output", str(output)]
    bench = ["--rows", "3", "--prompt-len", "4", "--new-tokens", "2"]
    words = [command, "--model", str(model), *(job if command == "run" else bench), "--device", "cpu", "--json"]
    began_s = time.monotonic()
    child = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    said, lived_s = json.loads(child.stdout), float(child.stderr.splitlines()[-1]) - began_s
    phases = ["starting", "checking", "planning", "loading", "first pass", "passes", "end"]
    assert list(said["phase_s"])[:2] == phases[:2]
    assert set(phases) <= set(said["phase_s"])
    assert sum(said["phase_s"].values()) == pytest.approx(said["wall_s"])
    assert said["wall_s"] == pytest.approx(lived_s, abs=0.3)
    assert said["phase_s"]["starting"] + said["phase_s"]["passes"] < said["wall_s"] <= lived_s + 0.02


def test_the_summary_says_why_rows_failed(model: Path, output: Path, tmp_path: Path) -> None:
    deep = '{"prompt": ' + "[" * 99 + "]" * 99 + "}"
    unusable = [{"prompt_token_ids": [10**6]}, {"prompt": "a" * 9999}, {"prompt": 5}, deep]
    result = zinfer_run(model, write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}, *unusable]), output)
    said = " ".join(result.stdout.replace("│", " ").split())
    assert "1 done, 4 failed: 2 x malformed, 1 x unknown token ids, 1 x too long" in said, said


def without_shard(model: Path) -> None:
    min(model.glob("*.safetensors")).unlink()


def with_bad_header(model: Path) -> None:
    file = min(model.glob("*.safetensors"))
    file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without_shard, "missing shard"),
        (with_bad_header, "model-00001-of"),
        (lambda model: (model / "config.json").unlink(), "config.json"),
        (lambda model: (model / "generation_config.json").write_text("{"), "generation_config.json: at byte 1 not"),
        (lambda model: (model / "tokenizer.json").unlink(), "put the model's tokenizer files into the folder"),
        (lambda model: (model / "tokenizer.json").write_text("{"), "has no tokenizer that loads"),
    ],
)
def test_an_unusable_model_exits_2(
    tmp_path: Path, prompts: Path, output: Path, damage: Callable[[Path], Any], message: str
) -> None:
    model = letters_model(tmp_path / "model")
    damage(model)
    result = zinfer_run(model, prompts, output)
    assert result.exit_code == 2, result.output
    assert "zinfer: error: " in result.stderr
    assert message in result.stderr
    assert not output.exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"zero_optimisation": {}}, "unknown key zero_optimisation"),
        ({"zinfer": {"device": "cuda"}}, "zinfer.device is given twice with different values"),
        ({"zinfer": {"max_device_memory": "1kB"}}, "zinfer.max_device_memory is"),
    ],
)
def test_an_unusable_config_exits_2(
    model: Path, prompts: Path, output: Path, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    result = zinfer_run(model, prompts, output, "--config", config_file(tmp_path, config))
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert not output.exists()


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        ({"dtype": "fp32"}, ["--weights", "fp16"], ['dtype = "fp16" (--weights)', 'dtype = "fp32" ({})']),
        ({"zinfer": {"quantization": {"bits": 4}}}, ["--weights", "int8"], ["(--weights)", "bits = 4 ({})"]),
        ({"zinfer": {"kv_cache_dtype": "int8"}}, ["--kv-cache", "fp8"], ['"fp8" (--kv-cache)', '"int8" ({})']),
        (
            {"zinfer": {"max_device_memory": "1GB"}},
            ["--max-device-memory", "2GB"],
            ['"2GB" (--max-device-memory)', '"1GB" ({})'],
        ),
        ({"zinfer": {"device": "cuda"}}, [], ['"cpu" (--device)', '"cuda" ({})']),
        ({"zinfer": {"optimize": "accuracy"}}, ["--fast"], ["(--fast)", '"accuracy" ({})']),
    ],
)
def test_an_option_that_the_config_contradicts_is_named(
    tmp_path: Path, prompts: Path, output: Path, config: dict[str, Any], options: list[str], words: list[str]
) -> None:
    path = config_file(tmp_path, config)
    commands = [zinfer_run(DEMO, prompts, output, "--config", path, *options)]
    if "--fast" not in options:
        served = ["serve", "--model", str(DEMO), "--device", "cpu", "--config", path, *options]
        commands.append(CliRunner().invoke(app, served))
    for result in commands:
        assert result.exit_code == 2, result.output
        said = " ".join(result.stderr.split())
        for each in words:
            assert each.format(path) in said
        assert "keyword arguments" not in said


def test_unusable_files_exit_2(model: Path, prompts: Path, output: Path, tmp_path: Path) -> None:
    twice = write_rows(tmp_path / "twice.jsonl", [{"id": "a", "prompt": "p"}, {"id": "a", "prompt": "p"}])
    output.write_text("a stranger's\n")
    for path, target, message in (
        (twice, tmp_path / "new", "lines 1 and 2 both have the id 'a'"),
        (tmp_path / "gone", tmp_path / "new", "does not exist"),
        (prompts, output, "has no manifest"),
        (prompts, tmp_path / "no" / "folder", "No such file or directory"),
    ):
        result = zinfer_run(model, path, target)
        assert result.exit_code == 2, result.output
        assert message in result.stderr
    assert output.read_text() == "a stranger's\n"


def test_an_empty_input_exits_0(model: Path, output: Path, tmp_path: Path) -> None:
    result = zinfer_run(model, write_rows(tmp_path / "empty.jsonl", []), output)
    assert result.exit_code == 0, result.output
    assert "0 done, 0 failed" in result.stdout
    assert output.read_bytes() == b""


def test_another_job_needs_restart(model: Path, prompts: Path, output: Path) -> None:
    assert zinfer_run(model, prompts, output).exit_code == 0
    refused = zinfer_run(model, prompts, output, "--batch-size", "2")
    assert refused.exit_code == 2
    assert "settings.batch_size: 4096 in the manifest, 2 now" in refused.stderr
    assert zinfer_run(model, prompts, output, "--batch-size", "2", "--restart").exit_code == 0
    assert json.loads(manifest_path(output).read_text())["settings"]["batch_size"] == 2


@pytest.mark.parametrize("option", [["--max-new-tokens", "0"], ["--batch-size", "0"], ["--device", "tpu"], ["--frob"]])
def test_unusable_options_exit_2(model: Path, prompts: Path, output: Path, option: list[str]) -> None:
    assert zinfer_run(model, prompts, output, *option).exit_code == 2


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_a_batch_keeps_the_rows(
    model: Path, prompts: Path, output: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    complete, calls = RaggedCompleter.complete, iter(range(9))

    def signalled(*args: Any) -> Any:
        if next(calls) == 2:
            os.kill(os.getpid(), number)
        return complete(*args)

    former = signal.getsignal(number)
    monkeypatch.setattr(RaggedCompleter, "complete", signalled)
    result = zinfer_run(model, prompts, output, "--batch-size", "2")
    assert result.exit_code == code
    assert f"{number.name}: stopped. The rows in {output} are kept; run the same command again" in result.stderr
    assert len(read_rows(output)) == 4
    assert signal.getsignal(number) is former
    monkeypatch.undo()
    result = zinfer_run(model, prompts, output, "--batch-size", "2")
    assert "6 done, 0 failed; 4 rows before this run" in result.stdout


def test_a_disk_that_fails_in_the_middle_exits_1(
    model: Path, prompts: Path, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, complete = letters_model(tmp_path / "model"), RaggedCompleter.complete

    def truncating(*args: Any) -> Any:
        for file in copy.glob("*.safetensors"):
            os.truncate(file, 4096)
        return complete(*args)

    monkeypatch.setattr(RaggedCompleter, "complete", truncating)
    config = config_file(tmp_path, {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}})
    result = zinfer_run(copy, prompts, output, "--config", config)
    assert result.exit_code == 1, result.output
    assert re.search(
        r"DiskReadError: .*model-0000\d-of-\d+\.safetensors: reading at byte \d+: .* \(errno \d+, E", result.stderr
    )
    assert "run the same command again to go on" in result.stderr


def test_a_failing_engine_shows_its_traceback(
    model: Path, prompts: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: Batcher, *_: object) -> Any:
        raise RuntimeError("boom")

    monkeypatch.setattr(Batcher, "step", failing)
    result = zinfer_run(model, prompts, output)
    assert result.exit_code == 1
    assert "Traceback" in result.stderr
    assert 'raise RuntimeError("boom")' in result.stderr
    assert "zinfer: error: rows 'row-0' to 'row-5': RuntimeError: boom" in result.stderr


NEEDED = {
    "run": ["--input", "in.jsonl", "--output", "out.jsonl"],
    "quantize": ["--output", "store"],
    "replica": ["--socket", "socket"],
}
"""Options that commands need along with --model."""
NO_MODELS = {
    "": "the model's name is empty",
    "./nothere": "'./nothere': no such folder: pass the folder that holds config.json",
    "org/absent": "'org/absent': no such folder, ",
    "hub.gguf": "'hub.gguf': no such file: check the path",
    "org/absent-GGUF": "run `hf download org/absent-GGUF --include '*Q4_K_M*'`",
    "https://huggingface.co/org/absent": "'org/absent': no such folder, ",
    "https://example.org/absent": "an address, and zinfer downloads from the Hugging Face hub alone",
}
TAKING_MODELS = [
    name for name in _COMMANDS if "--model " in CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "300"}).stdout
]


@pytest.mark.parametrize("command", TAKING_MODELS)
def test_every_command_refuses_a_name_that_is_no_model(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for model, words in NO_MODELS.items():
        result = CliRunner().invoke(app, [command, "--model", model, *NEEDED.get(command, [])])
        assert list(tmp_path.iterdir()) == []
        assert result.exit_code == 2, (model, result.output)
        assert words in result.stderr
        assert result.stderr.startswith("zinfer: error: ")


def test_a_published_name_gets_its_name_on_the_hub() -> None:
    result = CliRunner().invoke(app, ["serve", "--model", "llama-3.1-70b"])
    assert result.exit_code == 2
    assert "the published model of this name is --model meta-llama/Llama-3.1-70B" in result.stderr


def test_a_name_that_is_no_model_is_refused_before_torch_is_imported() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from zinfer.cli import app\n"
        f"for command in {TAKING_MODELS}:\n"
        f"    result = CliRunner().invoke(app, [command, '--model', './nothere', *{NEEDED}.get(command, [])])\n"
        "    print(command, result.exit_code, [name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout == "".join(f"{command} 2 []\n" for command in TAKING_MODELS)
    assert {"run", "serve", "chat", "quantize", "warmup", "bench", "plan", "replica"} <= {*TAKING_MODELS}


def test_weights_are_read_while_modules_are_imported(tmp_path: Path) -> None:
    model = letters_model(tmp_path / "model")
    (tmp_path / "in.jsonl").write_text('{"prompt_token_ids": [5, 6], "max_new_tokens": 1}\n')
    code = (
        "import os, sys, threading; from zinfer.cli import main\n"
        "started, start = [], threading.Thread.start\n"
        "def noting(thread): started.append(thread.name); start(thread)\n"
        "threading.Thread.start = noting\n"
        "class Watch:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'torch': print(*started, file=sys.stderr, flush=True); os._exit(0)\n"
        "sys.meta_path.insert(0, Watch()); main()"
    )
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    run = [sys.executable, "-c", code, "run", "--model", str(model), *files, "--device", "cpu"]
    child = subprocess.run(run, capture_output=True, text=True, check=True)
    assert "zinfer-ahead" in child.stderr.splitlines()[0]


def test_threads_and_exit_functions_end_before_the_process_does() -> None:
    code = (
        "import atexit, threading, time, torch; from zinfer.cli import main\n"
        "atexit.register(print, 'registered')\n"
        "threading.Thread(target=lambda: (time.sleep(0.5), print('waited'))).start(); main()"
    )
    words = ["run", "--model", "./nothere", "--input", "in.jsonl", "--output", "out.jsonl"]
    child = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert (child.returncode, child.stdout) == (2, "waited\nregistered\n")
    assert "nothere" in child.stderr


def test_help_and_version_import_nothing_heavy() -> None:
    """No command's module, and no package that prints; what counts is what was imported, not how long it took."""
    code = (
        "import sys; from zinfer.cli import main\n"
        "try: main()\n"
        "finally: print(*(name for name in sys.modules if name.partition('.')[0] in sys.argv[2:]), file=sys.stderr)"
    )
    heavy = ["torch", "transformers", "numpy", "rich", "psutil", "huggingface_hub", "zinfer"]
    for option, words in (
        ("--help", r"Usage: (.|\n)* families  List the tested .*\n"),
        ("--version", r"zinfer [\d.]+\n"),
    ):
        child = subprocess.run([sys.executable, "-c", code, option, *heavy], capture_output=True, text=True, check=True)
        imported = child.stderr.split()
        assert [name for name in imported if name.partition(".")[0] != "zinfer"] == []
        assert len(imported) <= 8, imported
        assert re.match(words, child.stdout)


@pytest.mark.parametrize(("name", "words"), _COMMANDS.items())
def test_help_describes_a_command_as_the_help_of_the_command_does(name: str, words: str) -> None:
    shown = CliRunner().invoke(app, ["--help"]).stdout
    assert (f"\n  {name} " in shown) == bool(words)
    told = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "300"})
    assert told.exit_code == 0
    assert " ".join(words.split()) in " ".join(told.stdout.split())
    assert f" {name} [OPTIONS]" in told.stdout


@pytest.mark.parametrize(
    ("stated", "wanted"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")]
)
def test_threads_are_told_how_to_wait_before_torch_is_imported(stated: dict[str, str], wanted: str) -> None:
    code = "import os, sys, zinfer; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment | stated
    )
    assert child.stdout == f"{wanted} False\n"


def test_dir_lists_the_public_names_and_imports_nothing() -> None:
    code = "import sys, zinfer; print({*zinfer.__all__} < {*dir(zinfer)}, 'torch' in sys.modules)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout == "True False\n"
    kinds = {getattr(zinfer, name).__class__.__name__ for name in zinfer.__all__}
    assert kinds <= {"type", "EnumType", "function", "str"}


def test_the_package_runs_as_a_module() -> None:
    child = subprocess.run([sys.executable, "-m", "zinfer", "--version"], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"zinfer \d+\.\d+\.\d+\n", child.stdout)
