"""Models by their names on the hub: downloaded once, whole and with nothing else, from a stand-in on loopback."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from checkpoints import tiny_mixtral
from hub_server import COMMIT, HubServer, hub_server
from huggingface_hub import constants
from jobs_support import letters_model
from test_foreign_engine import write_quantized_experts
from typer.testing import CliRunner

import zinfer
from zinfer import mii
from zinfer.cli import app
from zinfer.errors import CheckpointError
from zinfer.jobs.job import run_job
from zinfer.jobs.request import Pooling
from zinfer.serve.embedding_engine import EmbeddingEngine
from zinfer.weights import resolve_folder
from zinfer.weights.hub import missing_files

ROOT = Path(__file__).parents[1]
FIND = "import sys; from zinfer.weights import resolve_folder; print(resolve_folder(sys.argv[1]))"


def repository(folder: Path, files: Mapping[str, Any]) -> Path:
    """A folder with these files, of which no two are alike; those given as mappings are JSON, numbers are sizes."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Mapping):
            path.write_text(json.dumps({**content, "of": name}))
        else:
            path.write_bytes((name.encode() * (content // len(name) + 1))[-content:])
    return folder


def index(*shards: str) -> dict[str, object]:
    return {"metadata": {}, "weight_map": {f"tensor.{number}": shard for number, shard in enumerate(shards)}}


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
SHARDED = {"config.json": {}, "tokenizer.json": {}, "model.safetensors.index.json": index(*SHARDS)}
SHARDED |= {SHARDS[0]: 1000, SHARDS[1]: 1001}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "home" / "hub"


@pytest.fixture
def hub(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub with `org/tiny`, in two shards, for this process; `variables` for others."""
    with hub_server({"org/tiny": repository(tmp_path / "published", SHARDED)}) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield server


def held(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def refusal(model: str, **options: bool) -> str:
    with pytest.raises(CheckpointError) as caught:
        resolve_folder(model, **options)
    return str(caught.value)


OTHERS = {
    **{"README.md": 50, ".gitattributes": 50, "model.gguf": 50, "training_args.bin": 50, "trainer_state.json": {}},
    **{"original/config.json": {}, "original/model.safetensors": 50, "metal/model.bin": 50, "onnx/model.onnx": 50},
    **{"modeling_own.py": 50, "optimizer.pt": 50, "tf_model.h5": 50, "flax_model.msgpack": 50},
}
TEXT = {
    **{"config.json": {}, "generation_config.json": {}, "tokenizer.json": {}, "tokenizer_config.json": {}},
    **{
        "special_tokens_map.json": {},
        "added_tokens.json": {},
        "vocab.json": {},
        "merges.txt": 30,
        "tokenizer.model": 30,
    },
    **{"chat_template.jinja": 30, "additional_chat_templates/tools.jinja": 30, "hf_quant_config.json": {}},
}
PICKLED: dict[str, object] = {"pytorch_model.bin.index.json": index("pytorch_model-1.bin"), "pytorch_model-1.bin": 50}
LAYOUTS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "sharded": ({**SHARDED}, {**PICKLED, "consolidated.safetensors": 50, "model.fp16.safetensors": 50}),
    "one file": ({"model.safetensors": 50}, {"pytorch_model.bin": 50, "adapter_model.safetensors": 50}),
    "one file and an index": ({"model.safetensors": 50}, {"model.safetensors.index.json": index(*SHARDS)}),
    "pickled": ({"pytorch_model.bin": 50}, {"adapter_model.bin": 50}),
    "pickled shards": (PICKLED, {}),
    "no index": ({SHARDS[0]: 50, SHARDS[1]: 50}, {"consolidated.safetensors": 50, "pytorch_model.bin": 50}),
    "a name of its own": ({"weights.safetensors": 50}, {"pytorch_model.bin": 50}),
    "named in the config": (
        {"config.json": {"transformers_weights": "own.safetensors.index.json"}}
        | {"own.safetensors.index.json": index("own-1.safetensors"), "own-1.safetensors": 50},
        {"model.safetensors": 50},
    ),
    "an embedding model": (
        {"model.safetensors": 50, "modules.json": {}, "1_Pooling/config.json": {}, "2_Dense/model.safetensors": 50}
        | {"2_Dense/config.json": {}, "sentence_bert_config.json": {}, "config_sentence_transformers.json": {}},
        {"pytorch_model.bin": 50, "2_Dense/pytorch_model.bin": 50},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_run_reads_is_downloaded_once_and_nothing_else(
    layout: str, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, left = {**TEXT, **LAYOUTS[layout][0]}, {**OTHERS, **LAYOUTS[layout][1]}
    hub.models["org/name"] = repository(tmp_path / "source", {**left, **wanted})
    folder = resolve_folder("org/name")
    assert held(folder) == {*wanted}
    assert {name: (folder / name).read_bytes() for name in wanted} == {
        name: (tmp_path / "source" / name).read_bytes() for name in wanted
    }
    assert sorted(hub.served) == sorted((name, (folder / name).stat().st_size) for name in wanted)
    hub.requests.clear()
    assert resolve_folder("org/name") == resolve_folder("https://huggingface.co/org/name/tree/main") == folder
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_folder("org/name") == folder
    assert hub.requests == []


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: HubServer, tmp_path: Path) -> None:
    hub.models["org/tiny@v1.0"] = repository(tmp_path / "old", {**SHARDED, "vocab.txt": 9})
    old = resolve_folder("org/tiny@v1.0")
    assert "vocab.txt" in held(old)
    assert resolve_folder("https://huggingface.co/org/tiny/tree/v1.0") == old
    assert resolve_folder(f"org/tiny@{old.name}") == old
    new = resolve_folder("org/tiny")
    assert new.name == COMMIT
    assert resolve_folder("org/tiny@main") == new
    assert "'org/tiny@v2': no revision 'v2' on the hub; it has main, v1.0" in refusal("org/tiny@v2")
    assert "no snapshot of revision 'v2', only of main, v1.0 (it holds org/tiny)" in refusal(
        "org/tiny@v2", download=False
    )


@pytest.mark.parametrize("lost", ["tokenizer.json", SHARDS[1], "model.safetensors.index.json", "config.json"])
def test_what_a_snapshot_lacks_is_downloaded(lost: str, hub: HubServer, cache: Path) -> None:
    folder = resolve_folder("org/tiny")
    (folder / lost).resolve().unlink()
    (folder / lost).unlink()
    assert missing_files(folder) == [lost]
    assert f"at {folder} lacks {lost} (it holds org/tiny); --no-download" in refusal("org/tiny", download=False)
    hub.served.clear()
    assert resolve_folder("org/tiny") == folder
    assert hub.files() == {lost}
    assert held(folder) == {*SHARDED}


def test_without_a_kept_listing_the_index_and_the_weights_decide(hub: HubServer, cache: Path) -> None:
    """As in a cache that an older huggingface_hub has filled."""
    folder = resolve_folder("org/tiny")
    shutil.rmtree(folder.parent.parent / "trees")
    hub.requests.clear()
    assert resolve_folder("org/tiny") == folder
    assert hub.requests == []
    (folder / SHARDS[0]).unlink()
    assert missing_files(folder) == [SHARDS[0]]
    for name in held(folder) - {"config.json"}:
        (folder / name).unlink()
    assert missing_files(folder) == ["the weights"]
    assert held(resolve_folder("org/tiny")) == {*SHARDED}


def test_refusals_name_the_cause_and_the_remedy(
    hub: HubServer, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = f"{hub.url}/org/gated"
    hub.models["org/gated"], hub.gated = hub.models["org/tiny"], {"org/gated"}
    hub.models["org/guf"] = repository(tmp_path / "guf", {"README.md": 50, "q4.gguf": 50})
    assert f"'org/gated': its authors ask you to accept a licence: do so at {page}, then log" in refusal("org/gated")
    assert "'org/guf' on the hub holds GGUF files, often one for each type (q4.gguf): run" in refusal("org/guf")
    assert f"'org/tyny': no such folder, and no such model at {hub.url}: check the spelling" in refusal("org/tyny")
    hub.failing = 503
    assert f"'org/tiny': {hub.url} answers with HTTP 503: later try again" in refusal("org/tiny")
    hub.failing = 401
    assert "refuses the token (HTTP 401): log in again with `hf auth login`, or correct" in refusal_of_token(
        monkeypatch
    )
    hub.failing = None
    monkeypatch.setenv("HF_TOKEN", "accepted")
    assert held(resolve_folder("org/gated")) == {*SHARDED}
    assert "did you mean org/gated?" in refusal("org/gatet")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    message = refusal("org/tiny")
    assert f"not whole in the Hugging Face cache at {cache} (it holds org/gated), and http://127.0.0.1:9" in message
    assert (
        "cannot be reached (ConnectError: [Errno 111] Connection refused): check the network and HF_ENDPOINT" in message
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert refusal("org/tiny") == (
        f"'org/tiny': no such folder, and not in the Hugging Face cache at {cache} (it holds org/gated); "
        "HF_HUB_OFFLINE forbids to download it: unset that, or run `hf download org/tiny` where there is a network"
    )


def refusal_of_token(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HF_TOKEN", "expired")
    return refusal("org/tiny")


def test_the_disk_is_asked_before_the_weights_are(hub: HubServer, cache: Path) -> None:
    hub.sizes = {SHARDS[0]: 3 * 10**15, SHARDS[1]: 10**15, "README.md": 10**18}
    message = refusal("org/tiny")
    assert f"'org/tiny': 4,000.00 TB are to be downloaded to {cache}, whose disk has " in message
    assert "free: free some, or set HF_HOME to a folder on a larger disk" in message
    assert hub.files() == {"config.json", "model.safetensors.index.json"}
    blobs = cache / "models--org--tiny" / "blobs"
    (blobs / "0.1.incomplete").write_bytes(bytes(5000))
    assert f"free; delete {blobs}/*.incomplete, 5.00 kB of downloads that were killed, free some" in refusal("org/tiny")


Process = subprocess.Popen[str]


@pytest.fixture
def start(hub: HubServer, cache: Path) -> Iterator[Callable[..., Process]]:
    """Start processes that find `org/tiny`, by the environment alone."""
    started = list[Process]()

    def begin(prepare: Callable[[], None] | None = None) -> Process:
        environment = {**os.environ, **hub.variables, "HF_HOME": str(cache.parent)}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        words = [sys.executable, "-c", FIND, "org/tiny"]
        started.append(subprocess.Popen(words, env=environment, cwd=ROOT, preexec_fn=prepare, **pipes))
        return started[-1]

    yield begin
    hub.resume()
    for process in started:
        process.kill()
        process.communicate()


def ended(process: Process) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out.strip(), err


def test_a_download_that_was_killed_goes_on_with_the_files_that_are_left(
    hub: HubServer, cache: Path, tmp_path: Path, start: Callable[..., Process]
) -> None:
    repository(tmp_path / "published", {SHARDS[1]: 1 << 20})
    hub.stalls = {SHARDS[1]}
    process, snapshot = start(), cache / "models--org--tiny" / "snapshots" / COMMIT
    assert hub.stalled.wait(60)
    while not {*SHARDED} - {SHARDS[1]} <= held(snapshot):
        time.sleep(0.01)
    process.kill()
    assert ended(process)[0] == -signal.SIGKILL
    hub.resume()
    hub.served.clear()
    assert missing_files(snapshot) == [SHARDS[1]]
    assert ended(start())[:2] == (0, str(snapshot))
    assert hub.served == [(SHARDS[1], 1 << 20)]


def test_an_interrupt_ends_the_download_and_leaves_no_part(
    hub: HubServer, cache: Path, tmp_path: Path, start: Callable[..., Process]
) -> None:
    repository(tmp_path / "published", {SHARDS[1]: 64 << 20})
    hub.stalls = {SHARDS[1]}
    process = start()
    assert hub.stalled.wait(60)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)  # the signal comes first; else the test sees less
    hub.resume()
    code, out, err = ended(process)
    assert (code, out) == (-signal.SIGINT, "")
    assert "KeyboardInterrupt" in err
    assert SHARDS[1] not in held(cache / "models--org--tiny" / "snapshots" / COMMIT)
    assert list(cache.rglob("*.incomplete")) == []


def test_processes_of_one_host_download_once(hub: HubServer, cache: Path, start: Callable[..., Process]) -> None:
    processes = [start() for _ in range(3)]
    assert {ended(process)[:2] for process in processes} == {
        (0, str(cache / "models--org--tiny" / "snapshots" / COMMIT))
    }
    assert sorted(name for name, _ in hub.served) == sorted(SHARDED)


def test_a_disk_that_fills_up(hub: HubServer, tmp_path: Path, start: Callable[..., Process]) -> None:
    repository(tmp_path / "published", {SHARDS[1]: 1 << 20})

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, 1 << 19))

    code, _, err = ended(start(limit))
    assert code == 1
    assert (
        "was full before the download ended: free some of it, or set HF_HOME to a folder on a larger disk; then" in err
    )


def test_a_cache_that_cannot_be_written(hub: HubServer, cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text("a file")
    assert f"'org/tiny': {cache}" in (message := refusal("org/tiny"))
    assert "check its permissions and disk, or set HF_HOME to another folder" in message


@pytest.fixture
def letters(hub: HubServer, tmp_path: Path) -> str:
    """A model of letters on the hub."""
    hub.models["org/letters"] = letters_model(tmp_path / "letters")
    return "org/letters"


CPU = {"device": "cpu"}
DOORS: dict[str, Callable[..., object]] = {
    "LLM": lambda model, **options: zinfer.LLM(model, **CPU, **options).close(),
    "a draft": lambda model, **options: zinfer.LLM(ROOT / "examples/demo/model", draft_model=model, **CPU, **options),
    "init_inference": lambda model, **options: zinfer.init_inference(model, **CPU, **options).destroy(),
    "initialize": lambda model, **options: zinfer.initialize(model=model, **CPU, **options)[0].destroy(),
    "run_job": lambda model, **options: run_job(model, "in.jsonl", "out.jsonl", **CPU, **options),
    "pipeline": lambda model, **options: mii.pipeline(model, config={"zinfer": {**CPU, **options}}).destroy(),
    "mii.serve": lambda model, **options: mii.serve(model, config={"zinfer": options}, deployment_name="d"),
    "embeddings": lambda model, **options: EmbeddingEngine(model, None, {**CPU, **options}, Pooling.AUTO),
}


@pytest.mark.parametrize("door", DOORS)
def test_every_way_to_load_a_model_obeys_download(
    door: str, letters: str, hub: HubServer, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text('{"prompt": "abc", "max_new_tokens": 1}\n')
    with pytest.raises(CheckpointError, match=r"--no-download \(zinfer.download = false\) forbids to download it"):
        DOORS[door](letters, download=False)
    assert hub.requests == []
    if door not in ("a draft", "mii.serve"):
        DOORS[door](letters)
        assert hub.files() >= {path.name for path in (tmp_path / "letters").iterdir()}


def test_every_command_obeys_no_download(
    letters: str, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("off.json").write_text('{"zinfer": {"download": false}}')
    rows = ["--input", "in.jsonl", "--output", "out.jsonl"]
    words = {"run": rows, "serve": [], "chat": [], "quantize": ["--output", "store"], "replica": ["--socket", "s"]}
    for command, needed in (words | {"plan": [], "bench": [], "warmup": []}).items():
        for option in (["--no-download"], ["--config", "off.json"]):
            result = CliRunner().invoke(app, [command, "--model", letters, *needed, *option])
            assert result.exit_code == 2, (command, option, result.output)
            assert "'org/letters': no such folder, and not in the Hugging Face cache at" in result.stderr
            assert "--no-download (zinfer.download = false) forbids to download it" in result.stderr
    result = CliRunner().invoke(app, ["serve", "--model", "published", "--draft-model", letters, "--no-download"])
    assert "--draft-model: 'org/letters': no such folder" in result.stderr
    assert hub.requests == []


def test_a_job_of_a_model_on_the_hub(letters: str, hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "abc", "max_new_tokens": 4}\n')
    rows = list[str]()
    for model in (letters, tmp_path / "letters"):
        output = tmp_path / f"{len(rows)}.jsonl"
        words = ["run", "--model", str(model), "--input", str(tmp_path / "in.jsonl"), "--output", str(output)]
        result = CliRunner().invoke(app, [*words, "--device", "cpu"])
        assert result.exit_code == 0, result.output
        rows.append(output.read_text())
    assert rows[0] == rows[1] != ""


def test_a_misspelt_name_is_met_by_the_published_one(hub: HubServer) -> None:
    words = ["run", "--input", "in.jsonl", "--output", "out.jsonl", "--model"]
    result = CliRunner().invoke(app, [*words, "Qwen/Qwen3-33B"])
    assert result.exit_code == 2
    assert "no such model at" in result.stderr
    assert "did you mean Qwen/Qwen3-32B?" in result.stderr


PLAN = ["--machine", "rtx4090", "--batch-size", "8", "--prompt-len", "16", "--new-tokens", "4", "--json"]


def planned(model: str | Path, *options: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["plan", "--model", str(model), *PLAN, *options])
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_a_plan_downloads_the_config_alone(letters: str, hub: HubServer, tmp_path: Path) -> None:
    found = planned(letters)
    assert hub.files() == {"config.json"}
    assert found["model"]["bytes"] == planned(tmp_path / "letters")["model"]["bytes"] > 0
    hub.requests.clear()
    assert planned(letters, "--no-download") == found
    assert hub.requests == []
    assert "lacks the weights" in refusal(letters, download=False)
    resolve_folder(letters)
    hub.requests.clear()
    assert planned(letters)["model"] == found["model"]
    assert hub.requests == []


def test_a_plan_of_a_file_of_rows_downloads_the_tokenizer_too(letters: str, hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "abc", "max_new_tokens": 4}\n')
    words = ["plan", "--machine", "rtx4090", "--input", str(tmp_path / "in.jsonl"), "--model", letters]
    for _ in range(2):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        assert "1 rows of 3 tokens, 4 new ones each" in " ".join(result.stdout.split())
        assert {"config.json", "tokenizer.json"} <= hub.files()
        assert not any(name.endswith(".safetensors") for name in hub.files())
        hub.requests.clear()
    assert hub.requests == []


@pytest.mark.parametrize("how", ["quantized", "without a dtype"])
def test_a_plan_reads_the_headers_where_the_config_does_not_describe_the_weights(
    how: str, hub: HubServer, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    if how == "quantized":
        write_quantized_experts(source, "gptq", tiny_mixtral(), 32)
    else:
        config = json.loads((letters_model(source) / "config.json").read_text())
        (source / "config.json").write_text(json.dumps({key: config[key] for key in config if key != "dtype"}))
    hub.models["org/giant"] = source
    found, weights = planned("org/giant"), sum(path.stat().st_size for path in source.glob("*.safetensors"))
    assert found["model"] == {**planned(source)["model"], "name": "org/giant"}
    assert sum(sent for name, sent in hub.served if name.endswith(".safetensors")) <= min(weights, 100_001 * 4)
    assert not any(path.suffix == ".safetensors" for path in Path(constants.HF_HUB_CACHE).rglob("*"))
    result = CliRunner().invoke(app, ["plan", "--model", "org/giant", *PLAN, "--no-download"])
    assert (result.exit_code, "states no dtype" in result.stderr) == ((0, False) if how == "quantized" else (2, True))


def test_a_published_model_is_planned_without_a_network(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert planned("meta-llama/Llama-3.1-8B")["model"]["bytes"] > 16 * 10**9
    assert hub.requests == []


def test_a_bench_downloads_the_config_alone(letters: str, hub: HubServer) -> None:
    words = ["bench", "--model", letters, "--rows", "1", "--prompt-len", "8", "--new-tokens", "2", "--device", "cpu"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert hub.files() == {"config.json"}
