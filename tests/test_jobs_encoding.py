"""Jobs that embed and classify: rows equal to each text alone in transformers, streamed, and resumable."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import family_model
from jobs_support import letters_tokenizer, read_rows, write_rows
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from typer.testing import CliRunner

from zinfer.cli import app
from zinfer.engine.finite_check import AFTER
from zinfer.errors import ConfigError, PlanError
from zinfer.jobs.job import run_job

DISK = {"zero_optimization": {"offload_param": {"device": "nvme"}}}
FILES = {"model": "model", "input": "in.jsonl", "output": "out.jsonl"}
TEXTS = ["a", "hello you", "zinfer streams", "the quick brown fox jumps", "b", "again and again"]


def saved(model_type: str, class_name: str, folder: Path, **config: Any) -> PreTrainedModel:
    model = family_model(model_type, class_name)
    for name, value in config.items():
        setattr(model.config, name, value)
    model.save_pretrained(folder)
    letters_tokenizer().save_pretrained(folder)
    return model


def encoded(
    tmp_path: Path,
    task: str,
    rows: list[dict[str, Any]] | None = None,
    zinfer: dict[str, Any] | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    write_rows(tmp_path / "in.jsonl", rows or [{"id": text, "prompt": text} for text in TEXTS])
    config = DISK | {"zinfer": {"tokens_per_pass": 48, **(zinfer or {})}}
    summary = run_job(
        tmp_path / "model",
        tmp_path / "in.jsonl",
        tmp_path / "out.jsonl",
        config=config,
        device="cpu",
        task=task,
        **options,
    )
    assert summary.stats is None or summary.stats.disk_bytes_per_pass > 0
    return read_rows(tmp_path / "out.jsonl")


def ids_of(text: str) -> torch.Tensor:
    return torch.tensor([letters_tokenizer()(text).input_ids])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize(
    ("model_type", "class_name"),
    [
        ("bert", "BertModel"),
        ("bert", "BertForMaskedLM"),
        ("roberta", "RobertaModel"),
        ("distilbert", "DistilBertModel"),
        ("t5", "T5EncoderModel"),
        ("t5", "T5ForConditionalGeneration"),
        ("llama", "LlamaForCausalLM"),
    ],
)
def test_embeddings_are_those_of_each_text_alone(
    model_type: str, class_name: str, pooling: str, tmp_path: Path
) -> None:
    model = saved(model_type, class_name, tmp_path / "model")
    encoder = model.get_encoder() if model_type == "t5" else model.base_model
    rows = {row["id"]: row for row in encoded(tmp_path, "embed", pooling=pooling)}
    assert rows.keys() == set(TEXTS)
    for text in TEXTS:
        with torch.no_grad():
            hidden = encoder(input_ids=ids_of(text)).last_hidden_state[0]
        pooled = {"mean": hidden.mean(dim=0), "cls": hidden[0], "last": hidden[-1]}[pooling]
        wanted = nn.functional.normalize(pooled, dim=0)
        torch.testing.assert_close(torch.tensor(rows[text]["embedding"]), wanted, rtol=1e-4, atol=1e-5)
        assert rows[text]["num_prompt_tokens"] == len(text)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("problem", [None, "multi_label_classification"])
@pytest.mark.parametrize(
    ("model_type", "class_name"),
    [("bert", "BertForSequenceClassification"), ("roberta", "RobertaForSequenceClassification")],
)
def test_labels_are_those_of_each_text_alone(
    model_type: str, class_name: str, problem: str | None, tmp_path: Path
) -> None:
    model = saved(model_type, class_name, tmp_path / "model", problem_type=problem, id2label={0: "bad", 1: "good"})
    rows = {row["id"]: row for row in encoded(tmp_path, "classify")}
    for text in TEXTS:
        with torch.no_grad():
            logits = model(input_ids=ids_of(text)).logits[0]
        scores = logits.softmax(dim=0) if problem is None else logits.sigmoid()
        assert list(rows[text]["scores"]) == ["bad", "good"]
        torch.testing.assert_close(torch.tensor(list(rows[text]["scores"].values())), scores, rtol=1e-4, atol=1e-5)
        assert rows[text]["label"] == ("good" if logits[1] > logits[0] else "bad")


def test_a_job_goes_on_where_it_stopped_with_the_same_bytes(tmp_path: Path) -> None:
    saved("bert", "BertModel", tmp_path / "model")
    whole = encoded(tmp_path, "embed", batch_size=4)
    out = tmp_path / "out.jsonl"
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:2]) + lines[2][:30])
    assert sorted(map(json.dumps, encoded(tmp_path, "embed", batch_size=4))) == sorted(map(json.dumps, whole))
    with pytest.raises(Exception, match="pooling"):
        encoded(tmp_path, "embed", batch_size=4, pooling="cls")


def test_rows_that_cannot_be_encoded(tmp_path: Path) -> None:
    saved("bert", "BertModel", tmp_path / "model")
    rows: list[dict[str, Any]] = [
        {"id": "long", "prompt": "a" * 65},
        {"id": "fits", "prompt": "a" * 64},
        {"id": "hot", "prompt": "a", "temperature": 1.0},
        {"custom_id": "openai", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "a"}},
    ]
    found = {row.get("custom_id", row["id"]): row for row in encoded(tmp_path, "embed", rows)}
    assert "the prompt's 65 tokens are more than 64 (the model's positions); shorten it" in found["long"]["error"]
    assert len(found["fits"]["embedding"]) == 64
    assert "nothing is generated in this job" in found["hot"]["error"]
    assert "nothing is generated in this job" in json.dumps(found["openai"])


def test_passes_leave_no_room_for_weights_in_what_they_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("bert", "BertModel", tmp_path / "model")
    monkeypatch.setattr("zinfer.engine.streamed_model.free_device_bytes", lambda limits: 2_000_000)
    write_rows(tmp_path / "in.jsonl", [{"id": 0, "prompt": "a" * 60}])
    paths = [tmp_path / name for name in ("model", "in.jsonl", "out.jsonl")]
    with pytest.raises(
        PlanError, match=r"activations .* of 2.00 MB device memory.*where prompts are encoded, zinfer.tokens_per_pass"
    ):
        run_job(*paths, config=DISK, device="cpu", task="embed")
    run_job(*paths, config=DISK | {"zinfer": {"tokens_per_pass": 256}}, device="cpu", task="embed")
    assert len(read_rows(tmp_path / "out.jsonl")[0]["embedding"]) == 64


def test_where_nothing_can_be_set_aside_for_passes_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: PreTrainedConfig) -> None:
        raise PlanError("no width")

    saved("bert", "BertModel", tmp_path / "model")
    monkeypatch.setattr("zinfer.jobs.execution_mode.ModelSpec.read_encoder", refuse)
    write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}])
    options = [f"--{name}={tmp_path / path}" for name, path in FILES.items()]
    result = CliRunner().invoke(app, ["run", *options, "--device", "cpu", "--task", "embed"])
    assert result.exit_code == 0, result.output
    assert "weights may take too much: no width" in " ".join(result.stderr.split())


@pytest.mark.sampled(6)
@pytest.mark.parametrize("config", [{}, {"check_finite": True}], ids=["unasked", "asked"])
@pytest.mark.parametrize(
    ("model_type", "class_name", "task"),
    [
        ("bert", "BertModel", "embed"),
        ("bert", "BertForSequenceClassification", "classify"),
        ("t5", "T5EncoderModel", "embed"),
    ],
)
def test_numbers_that_are_not_finite_are_an_error_of_the_row(
    model_type: str, class_name: str, task: str, config: dict[str, Any], tmp_path: Path
) -> None:
    model = saved(model_type, class_name, tmp_path / "model")
    rows = {row["id"]: row for row in encoded(tmp_path, task)}
    model.get_input_embeddings().weight.data[ids_of("z")[0, 0]] = torch.nan
    model.save_pretrained(tmp_path / "model")
    damaged = {row["id"]: row for row in encoded(tmp_path, task, zinfer=config, restart=True)}
    error = damaged["zinfer streams"].pop("error")
    assert "not finite numbers" in error
    assert error.endswith("the first non-finite numbers come from what comes before the first layer")
    rows["zinfer streams"] = {"id": "zinfer streams"}
    assert damaged == rows


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("class_name", "task", "weight", "named"),
    [
        ("BertModel", "embed", "encoder.layer.1.output.dense.weight", "encoder.layer.1"),
        (
            "BertForSequenceClassification",
            "classify",
            "bert.encoder.layer.2.output.dense.weight",
            "bert.encoder.layer.2",
        ),
        ("BertForSequenceClassification", "classify", "classifier.weight", AFTER),
        ("T5ForConditionalGeneration", "embed", "encoder.block.2.layer.0.SelfAttention.o.weight", "encoder.block.2"),
        ("T5ForConditionalGeneration", "embed", "encoder.final_layer_norm.weight", AFTER),
    ],
)
def test_the_layer_that_broke_rows_is_named(
    class_name: str, task: str, weight: str, named: str, tmp_path: Path
) -> None:
    model = saved("t5" if class_name.startswith("T5") else "bert", class_name, tmp_path / "model")
    model.get_parameter(weight).data[0] = torch.nan
    model.save_pretrained(tmp_path / "model")
    for row in encoded(tmp_path, task):
        assert row["error"].endswith(f"the first non-finite numbers come from {named}")


def test_infinite_logits_are_no_certain_labels(tmp_path: Path) -> None:
    kind = "multi_label_classification"
    model = saved("bert", "BertForSequenceClassification", tmp_path / "model", problem_type=kind)
    model.classifier.bias.data[1] = torch.inf
    model.save_pretrained(tmp_path / "model")
    assert all("not finite numbers" in row["error"] for row in encoded(tmp_path, "classify"))


@pytest.mark.parametrize(
    ("class_name", "task", "message"),
    [
        ("BertModel", "generate", "a BertModel cannot generate text; use --task embed"),
        ("BertModel", "classify", r"a BertModel has no labels; the task classify needs a \*ForSequenceClass"),
        ("CLIPModel", "embed", "a CLIPModel takes images too"),
    ],
)
def test_a_model_that_has_not_what_the_task_needs(class_name: str, task: str, message: str, tmp_path: Path) -> None:
    saved("clip" if "CLIP" in class_name else "bert", class_name, tmp_path / "model")
    with pytest.raises(ConfigError, match=message):
        encoded(tmp_path, task)


def test_the_command(tmp_path: Path) -> None:
    saved("bert", "BertModel", tmp_path / "model")
    write_rows(tmp_path / "in.jsonl", [{"prompt": text} for text in TEXTS])
    paths = ["--model", str(tmp_path / "model"), "--input", str(tmp_path / "in.jsonl")]
    output = ["--output", str(tmp_path / "out.jsonl"), "--report", str(tmp_path / "page.html")]
    result = CliRunner().invoke(app, ["run", *paths, *output, "--device", "cpu", "--task", "embed", "--pooling", "cls"])
    assert result.exit_code == 0, result.output
    assert "6 done, 0 failed" in result.stdout
    assert "weights: " in result.stderr
    assert len(read_rows(tmp_path / "out.jsonl")) == 6
