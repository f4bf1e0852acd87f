"""Labels and scores of jobs, compared with transformers' pipeline and with each row alone in transformers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import PAD_TOKEN_ID, VOCAB_SIZE
from jobs_support import letters_tokenizer, read_rows, write_rows
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedModel,
    TextClassificationPipeline,
)
from typer.testing import CliRunner

from zinfer.cli import app
from zinfer.jobs.encoder import find_pad_token_id
from zinfer.jobs.job import run_job

TEXTS = ["a", "hello you", "zinfer streams", "the quick brown fox jumps", "b", "again and again"]
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
_GPT2: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "n_positions": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "initializer_range": 0.3,
}
CONFIGS = {
    "bert": lambda **keys: BertConfig(**_SHAPE, **keys),
    "gpt2": lambda **keys: GPT2Config(**_GPT2, **keys),
    "llama": lambda **keys: LlamaConfig(**_SHAPE, **keys),
}


def classifier(folder: Path, model_type: str, *, pads: bool = True, **keys: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForSequenceClassification.from_config(CONFIGS[model_type](**keys)).eval()
    model.save_pretrained(folder)
    tokenizer = letters_tokenizer()
    if not pads:
        tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    return model


def labelled(folder: Path, rows: list[dict[str, Any]], tokens_per_pass: int = 64) -> dict[Any, dict[str, Any]]:
    write_rows(folder / "in.jsonl", rows)
    paths = [folder / name for name in ("model", "in.jsonl", "out.jsonl")]
    run_job(*paths, config={"zinfer": {"tokens_per_pass": tokens_per_pass}}, device="cpu", task="classify")
    return {row["id"]: row for row in read_rows(folder / "out.jsonl")}


def scores_of(row: dict[str, Any]) -> torch.Tensor:
    return torch.tensor(list(row["scores"].values()))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("problem", "num_labels"),
    [
        (None, 1),
        (None, 3),
        ("regression", 1),
        ("regression", 2),
        ("single_label_classification", 2),
        ("multi_label_classification", 1),
        ("multi_label_classification", 3),
    ],
)
@pytest.mark.parametrize("model_type", ["bert", "llama"])
def test_scores_are_those_of_the_pipeline(
    model_type: str, problem: str | None, num_labels: int, tmp_path: Path
) -> None:
    keys = {"num_labels": num_labels, "problem_type": problem, "pad_token_id": PAD_TOKEN_ID}
    model = classifier(tmp_path / "model", model_type, **keys)
    pipeline = TextClassificationPipeline(model=model, tokenizer=letters_tokenizer())
    rows = labelled(tmp_path, [{"id": text, "prompt": text} for text in TEXTS])
    for text in TEXTS:
        wanted = pipeline(text, top_k=None)
        assert rows[text]["label"] == wanted[0]["label"]
        assert rows[text]["scores"] == pytest.approx({each["label"]: each["score"] for each in wanted}, abs=1e-4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("pads", [True, False], ids=["tokenizer-pads", "nothing-pads"])
@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_a_decoder_without_a_padding_token_labels_as_the_pipeline(model_type: str, pads: bool, tmp_path: Path) -> None:
    model = classifier(tmp_path / "model", model_type, pads=pads, pad_token_id=None, num_labels=2)
    pipeline = TextClassificationPipeline(model=model, tokenizer=letters_tokenizer())
    rows = labelled(tmp_path, [{"id": text, "prompt": text} for text in TEXTS])
    for text in TEXTS:
        wanted = {each["label"]: each["score"] for each in pipeline(text, top_k=None)}
        assert rows[text]["scores"] == pytest.approx(wanted, abs=1e-4)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("pad_token_id", [None, PAD_TOKEN_ID])
@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_prompts_that_hold_the_padding_token(model_type: str, pad_token_id: int | None, tmp_path: Path) -> None:
    model = classifier(tmp_path / "model", model_type, num_labels=3)
    model.config.pad_token_id = pad_token_id
    model.config.save_pretrained(tmp_path / "model")
    pad = PAD_TOKEN_ID
    prompts = [[5], [5, pad], [pad, 9, 7], [pad], [pad, pad, pad], [8, pad, 4, pad, pad], [3, 0], [6, 2, 0, 1, 0]]
    rows = labelled(tmp_path, [{"id": place, "prompt_token_ids": ids} for place, ids in enumerate(prompts)])
    for place, ids in enumerate(prompts):
        with torch.no_grad():
            wanted = model(torch.tensor([ids])).logits[0].softmax(dim=-1)
        torch.testing.assert_close(scores_of(rows[place]), wanted, rtol=1e-4, atol=1e-5)


def test_rows_that_end_with_every_token(tmp_path: Path) -> None:
    model = classifier(tmp_path / "model", "llama", pad_token_id=None, num_labels=2)
    prompts = [[7] * (token % 3) + [token] for token in range(VOCAB_SIZE)]
    rows = labelled(tmp_path, [{"id": ids[-1], "prompt_token_ids": ids} for ids in prompts], 4096)
    for ids in prompts:
        with torch.no_grad():
            wanted = model(torch.tensor([ids])).logits[0].softmax(dim=-1)
        torch.testing.assert_close(scores_of(rows[ids[-1]]), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("own", "tokenizers", "found"), [(None, 2, 2), (None, None, 0), (4, 2, 4), (-1, 2, 2), (VOCAB_SIZE, VOCAB_SIZE, 0)]
)
def test_the_padding_token_is_one_of_the_vocabulary(own: int | None, tokenizers: int | None, found: int) -> None:
    config = CONFIGS["llama"]()
    config.pad_token_id = own
    assert find_pad_token_id(config, SimpleNamespace(pad_token_id=tokenizers)) == found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--task", "embed", "--max-new-tokens", "4"], "max_new_tokens is for jobs that generate; leave it out"),
        (["--task", "classify", "--max-new-tokens", "4"], "leave it out beside the task classify"),
        (["--task", "classify", "--pooling", "last"], "pooling last is for the task embed; leave it out beside"),
        (["--pooling", "cls"], "pooling cls is for the task embed; leave it out beside the task generate"),
    ],
)
def test_options_that_the_task_does_not_use_are_refused(options: list[str], message: str, tmp_path: Path) -> None:
    classifier(tmp_path / "model", "bert")
    write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}])
    paths = [f"--model={tmp_path / 'model'}", f"--input={tmp_path / 'in.jsonl'}", f"--output={tmp_path / 'out.jsonl'}"]
    result = CliRunner().invoke(app, ["run", *paths, "--device", "cpu", *options])
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())
    assert not (tmp_path / "out.jsonl").exists()


def test_a_server_that_generates_refuses_a_pooling() -> None:
    model = Path(__file__).resolve().parent.parent / "examples" / "demo" / "model"
    result = CliRunner().invoke(app, ["serve", f"--model={model}", "--pooling", "last"])
    assert result.exit_code == 2, result.output
    assert "--pooling last is for --task embed" in " ".join(result.stderr.split())
