"""What config.json, generation_config.json and the tokenizer's files must not say is refused by file and key."""

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from jobs_support import letters_model

from zinfer.errors import CheckpointError
from zinfer.model.build import build_meta_model
from zinfer.requests.prompt_encoder import find_tokenizer
from zinfer.weights import Checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return letters_model(tmp_path / "model")


def change(file: Path, **members: Any) -> None:
    document = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(document | members))


def refused(folder: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        build_meta_model(Checkpoint.open(folder))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("key", ["eos_token_id", "bos_token_id", "pad_token_id"])
@pytest.mark.parametrize("value", ["x", -1, 1.0, True, 10**6, [0, -1], [[0]], {}], ids=str)
def test_a_special_token_that_is_none_is_refused(folder: Path, file: str, key: str, value: object) -> None:
    change(folder / file, **{key: value})
    refused(folder, f"{file}: {key} is ")


@pytest.mark.parametrize("value", [None, 0, [0, 1], []], ids=str)
def test_special_tokens_of_the_vocabulary_are_taken(folder: Path, value: object) -> None:
    change(folder / "config.json", eos_token_id=value)
    change(folder / "generation_config.json", eos_token_id=value)
    build_meta_model(Checkpoint.open(folder))


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"dtype": "float64"}, "config.json: dtype is float64, which layers do not compute in"),
        ({"dtype": "int8"}, "config.json: dtype is int8"),
        ({"num_hidden_layers": 100_000}, "config.json: num_hidden_layers is 100000, but the checkpoint holds "),
        ({"text_config": {"num_layers": 10**9}}, "config.json: text_config.num_layers is 1000000000, but the "),
        ({"num_key_value_heads": 64}, "config.json: num_key_value_heads is 64, which does not divide"),
        ({"num_key_value_heads": 0}, "config.json: num_key_value_heads is 0, which does not divide"),
        ({"backbone": "org/x"}, "config.json: backbone is 'org/x', which would be fetched from elsewhere"),
        ({"vision_config": {"backbone": "resnet50"}}, "config.json: vision_config.backbone is 'resnet50'"),
        ({"vision_config": {"architecture": "hf-hub:org/x"}}, "vision_config.architecture is 'hf-hub:org/x'"),
        ({"attn_implementation": "kernels-community/flash-attn2"}, "config.json: attn_implementation is 'kernels-com"),
        ({"attn_implementation": {"": "org/code:f"}}, "config.json: attn_implementation is 'org/code:f', which would"),
        ({"_attn_implementation": "org/code"}, "config.json: _attn_implementation is 'org/code', which would"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_what_a_config_must_not_say_is_refused_before_anything_is_built_or_fetched(
    folder: Path, members: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(*_args: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)
    change(folder / "config.json", **members)
    refused(folder, message)


def test_flash_attention_in_a_config_fetches_no_kernel(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fetch(*_args: object, **_options: object) -> None:
        raise AssertionError("a kernel was asked for")

    monkeypatch.setattr("transformers.modeling_utils.is_kernels_available", lambda: True)
    monkeypatch.setattr("transformers.modeling_utils.lazy_import_flash_attention", fetch)
    change(folder / "config.json", attn_implementation="flash_attention_2")
    model = build_meta_model(Checkpoint.open(folder))
    assert model.config._attn_implementation == "sdpa"
    assert "attn_implementation flash_attention_2 is not used here" in caplog.text


@pytest.mark.parametrize(
    ("file", "members"),
    [
        ("tokenizer_config.json", {"tokenizer_class": 5}),
        ("tokenizer.json", {"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}),
        ("tokenizer.json", {"normalizer": {"type": "none of them"}}),
    ],
)
def test_a_damaged_tokenizer_is_refused_in_a_sentence(folder: Path, file: str, members: dict[str, Any]) -> None:
    change(folder / file, **members)
    with pytest.raises(CheckpointError, match=r"model .* has no tokenizer that loads \(.*\); put the model's"):
        find_tokenizer(folder)
