"""Shared by tests of batch jobs: a tiny model, a tokenizer of single letters, an engine that streams nothing."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VOCAB_SIZE, tiny_checkpoint
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from zinfer.engine.finite_check import FiniteWatch
from zinfer.errors import ConfigError
from zinfer.model.partition import find_layers
from zinfer.offload.stats import RunStats
from zinfer.planning.step_time import PassTime, Prediction

BOS, PAD, EOS = "<s>", "<pad>", "</s>"
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ m.role }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}reply:{% endif %}"
)


def letters_tokenizer(*, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Token 3 is a blank, then come the characters in their own order; every token is one character."""
    characters = [chr(code) for code in (*range(32, 127), *range(161, 161 + VOCAB_SIZE - 98))]
    vocabulary = {token: number for number, token in enumerate([BOS, PAD, EOS, *characters])}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = Split(Regex("."), "isolated")
    backend.decoder = Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, pad_token=PAD, eos_token=EOS)
    tokenizer.chat_template = chat_template
    return tokenizer


def letters_model(folder: Path, *, chat_template: str | None = None, seed: int = 0, num_layers: int = 2) -> Path:
    """A random Llama of 128 positions in two shards, with its tokenizer."""
    tiny_checkpoint("llama", folder, num_layers=num_layers, seed=seed)
    letters_tokenizer(chat_template=chat_template).save_pretrained(folder)
    return folder


class ResidentEngine:
    """Has an engine's names over a plain transformers model; `calls` counts batches."""

    def __init__(self, model: str, settings: object = None, **_options: object) -> None:
        self.module = AutoModelForCausalLM.from_pretrained(model)
        self.device = torch.device("cpu")
        self.calls = 0
        self.is_destroyed = False

    def generate(self, **kwargs: Any) -> Any:
        self.calls += 1
        return self.module.generate(**kwargs)

    def generate_unchecked(self, **kwargs: Any) -> Any:
        return self.generate(**kwargs)

    def find_broken(self, work: Callable[[], Any], num_rows: int) -> list[str | None]:
        return FiniteWatch(self.module, find_layers(self.module), num_rows).broken_rows(work)

    def stats(self) -> RunStats:
        return RunStats(passes=self.calls)

    def predict(self, batch_size: int, prompt_len: int, new_tokens: int) -> Prediction:
        """A second for every pass."""
        prefill, decode = (PassTime(num, 0.0, 1.0, 0.0, 0.0, 0.0) for num in (batch_size * prompt_len, batch_size))
        return Prediction(prefill, decode, 0, batch_size * 1.0, float(new_tokens), "a guess")

    def destroy(self) -> None:
        self.is_destroyed = True


@contextmanager
def padded_by(engine: Callable[..., Any] | None) -> Iterator[None]:
    """Jobs run every family in padded batches of an engine that this makes; None: they decide for themselves."""

    def refuse(model: object) -> None:
        raise ConfigError("for a test")

    with pytest.MonkeyPatch.context() as patched:
        if engine is not None:
            patched.setattr("zinfer.jobs.execution_mode.check_family", refuse)
            patched.setattr("zinfer.jobs.execution_mode.InferenceEngine", engine)
        yield


def write_rows(path: Path, rows: Iterable[Mapping[str, Any] | str | bytes]) -> Path:
    """One line for each: a mapping as JSON, text and bytes as they are."""
    lines = [
        row if isinstance(row, bytes) else (row if isinstance(row, str) else json.dumps(row)).encode() for row in rows
    ]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of an output, each checked to be one whole line."""
    data = path.read_bytes()
    assert not data or data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


def prompt_rows(num_rows: int) -> list[dict[str, Any]]:
    """Prompts of 1 to 17 letters; every third one samples."""
    rows: list[dict[str, Any]] = []
    for number in range(num_rows):
        text = "".join(chr(97 + (number * 7 + place * 3) % 26) for place in range(1 + number % 17))
        row: dict[str, Any] = {"id": f"row-{number}", "prompt": text, "max_new_tokens": 4 + number % 9}
        rows.append({**row, "temperature": 1.5} if number % 3 == 0 else row)
    return rows
