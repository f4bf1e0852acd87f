"""Python code that a checkpoint brings along is never run, and nobody is asked whether it may."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engines import loaded
from jobs_support import letters_model, write_rows
from loading_support import Tensors, batch, eager_logits, llama, refused
from typer.testing import CliRunner

from zinfer.cli import app
from zinfer.errors import CheckpointError

__all__ = ["batch", "llama"]  # fixtures

AUTO_MAP = {"AutoConfig": "brought.BroughtConfig", "AutoModelForCausalLM": "brought.Brought"}
CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Path({marker!r}).touch()


class BroughtConfig(LlamaConfig):
    model_type = "brought"


class Brought(LlamaForCausalLM):
    config_class = BroughtConfig


class BroughtTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file that the code would make; a question on stdin fails the test too."""
    questions: list[object] = []

    def answer(*prompt: object) -> str:
        questions.append(prompt)
        return "y"

    monkeypatch.setattr("builtins.input", answer)
    yield tmp_path / "the code ran"
    assert questions == []
    assert not (tmp_path / "the code ran").exists()


def bring_code(folder: Path, marker: Path, **config: object) -> None:
    (folder / "brought.py").write_text(CODE.format(marker=str(marker)))
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": AUTO_MAP} | config))


def test_a_known_family_is_built_from_transformers_own_code(
    llama: Path, tmp_path: Path, marker: Path, batch: Tensors
) -> None:
    folder = shutil.copytree(llama, tmp_path / "model")
    bring_code(folder, marker)
    with loaded(folder) as engine:
        assert torch.equal(engine(**batch).logits, eager_logits(llama, batch))
        assert type(engine.module).__name__ == "LlamaForCausalLM"


def test_an_unknown_family_is_refused(llama: Path, tmp_path: Path, marker: Path) -> None:
    folder = shutil.copytree(llama, tmp_path / "model")
    bring_code(folder, marker, model_type="brought", architectures=["Brought"])
    with pytest.raises(CheckpointError, match=r"config\.json"):
        refused(folder)


@pytest.mark.parametrize("tokenizer_class", ["PreTrainedTokenizerFast", "BroughtTokenizer"])
def test_a_tokenizers_code_in_a_job(tmp_path: Path, marker: Path, tokenizer_class: str) -> None:
    folder = letters_model(tmp_path / "model")
    bring_code(folder, marker)
    path = folder / "tokenizer_config.json"
    brought = {"auto_map": {"AutoTokenizer": [None, "brought.BroughtTokenizer"]}, "tokenizer_class": tokenizer_class}
    path.write_text(json.dumps(json.loads(path.read_text()) | brought))
    rows = write_rows(tmp_path / "in.jsonl", [{"prompt": "ab"}])
    options = ["--input", str(rows), "--output", str(tmp_path / "out.jsonl"), "--device", "cpu"]
    result = CliRunner().invoke(app, ["run", "--model", str(folder), *options, "--max-new-tokens", "2"])
    assert result.exit_code in (0, 2), result.output
